"""Training a sentence encoder: what goes in, what it begins at, and that it is the same however it is split."""

import json
import math
from argparse import Namespace
from functools import partial

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks

from launch import embedding, gpt, parallel
from launch.datasets import anchors
from launch.datasets.anchors import Groups
from launch.figures.embedding_progress import EmbeddingRecorder, Similarities
from tests.launch.test_policy import LAYOUTS, PNG, assert_same
from tests.launch.tiny_policy import VOCAB, as_groups, numbers, options_for, trained
from twinkle_megatron import EmbeddingHead, MegatronModel

THREE = Groups([np.arange(1, n + 1) for n in (3, 2, 4, 1, 2, 5, 1)], np.array([0, 2, 5, 7]))


def test_texts_of_whole_groups_are_padded_and_anchors_marked():
    (row,) = embedding.micro_batches(THREE, [numbers(2, 0)], packed=False)
    assert row['input_ids'].tolist() == [[1, 2, 3, 4, 5], [1, 0, 0, 0, 0], [1, 2, 3, 0, 0], [1, 2, 0, 0, 0]]
    assert row['attention_mask'].tolist() == [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert row['labels'].tolist() == [1, 0, 1, 0]


def test_a_packed_row_holds_texts_one_after_the_other():
    rows = embedding.micro_batches(THREE, [numbers(0), numbers(1)], packed=True)
    assert [row['input_ids'].tolist() for row in rows] == [[[1, 2, 3, 1, 2]], [[1, 2, 3, 4, 1, 1, 2]]]
    assert [row['position_ids'].tolist() for row in rows] == [[[0, 1, 2, 0, 1]], [[0, 1, 2, 3, 0, 0, 1]]]
    assert [row['labels'].tolist() for row in rows] == [[1, 0], [1, 0, 0]]
    assert all('attention_mask' not in row for row in rows)


def test_similarities_are_cosines_and_a_tie_is_no_find():
    half = math.sqrt(0.5)
    positives = np.array([[1, 0], [0, 1], [0, 1]])
    found = Similarities.of(np.array([[half, half], [0.6, 0.8], [1, 0]]), positives)
    assert found.own == pytest.approx([half, 0.8, 0])
    assert found.best_other == pytest.approx([half, 0.8, 1])
    assert found.mean_other == pytest.approx([half, 0.7, 0.5])
    assert found.found.tolist() == [0, 0, 0]
    assert found.nearest[2] == 0
    assert Similarities.of(np.eye(2), np.eye(2)).figures == {'recall@1': 1, 'pos_sim': 1, 'neg_sim': 0}


def test_the_end_shows_recall_before_and_after_and_what_a_guess_has(tmp_path, capsys):
    args = Namespace(run=tmp_path, steps=1, save_weights=None, start=0)
    recorder = EmbeddingRecorder(args, active=True)
    before = Similarities(*map(np.array, ([0.5, 0.25], [0.5, 0.0], [0.5, 0.0], [1, 1])))
    after = Similarities(*map(np.array, ([0.75, 0.5], [0.25, 0.0], [0.25, 0.0], [0, 1])))
    recorder.held_out(0, before)
    recorder.step()
    values = {'loss': 1.5, 'pos_sim': 0.5, 'pos_sim_min': 0.25, 'pos_sim_max': 1.0, 'neg_sim': 0.125, 'lr': 1e-3}
    recorder.train(1, values | {'grad_norm': 0.5, 'total_tokens': 10.0, 'elapsed_seconds': 1.0})
    recorder.held_out(1, after)
    recorder.finish(before, after)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == 'step 0  held out       pos_sim  0.375  neg_sim  0.250  recall@1  50.0%'
    assert shown[1].startswith('step 1  loss  1.5000  pos_sim  0.500  neg_sim  0.125  grad norm  0.500  lr 1.0e-03')
    assert 'of 2 held-out groups: mean ± 1.96 standard errors; a guess has a recall@1 of 1/2 = 0.500' in shown
    assert any(line.split()[:4] == ['recall@1', '0.500', '±', '0.980'] for line in shown)
    lines = lines_of(tmp_path / 'metrics.jsonl')
    assert lines[0] == {
        'step': 0,
        'held_out_recall@1': 0.5,
        'held_out_pos_sim': 0.375,
        'held_out_neg_sim': 0.25,
        'chance': 0.5,
    }
    assert {'loss', 'pos_sim', 'pos_sim_min', 'pos_sim_max', 'neg_sim', 'grad_norm'} <= set(lines[1])
    first, _ = lines_of(tmp_path / 'held_out.jsonl')
    assert first == {
        'own_before': 0.5,
        'best_other_before': 0.5,
        'mean_other_before': 0.5,
        'nearest_before': 1,
        'own_after': 0.75,
        'best_other_after': 0.25,
        'mean_other_after': 0.25,
        'nearest_after': 0,
    }
    assert (tmp_path / 'embedding.png').read_bytes().startswith(PNG)


def test_no_step_has_a_group_twice():
    args = Namespace(steps=9, micro_batches=2, micro_batch_size=2, seed=3)
    steps = [chosen.tolist() for chosen in parallel.orders(7, args, distinct=True)]
    assert [len(set(chosen)) for chosen in steps] == [4] * 9
    assert {k for chosen in steps for k in chosen} == set(range(7))


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """32 groups to train on and 10 held out."""
    folder = tmp_path_factory.mktemp('groups')
    (folder / 'groups.jsonl').write_text(as_groups(range(32)))
    (folder / 'held.jsonl').write_text(as_groups(range(100, 110)))
    return folder


@pytest.fixture
def train(policy_file, files, tmp_path):
    """Trains on `ranks` ranks with each of some lists of options; for each the lines of figures and the weights."""

    def run(ranks, *lists):
        fixed = [f'--held-out={files / "held.jsonl"}', '--eval-every=2', '--loss=infonce', '--micro-batch-size=2']
        runs = [
            options_for(files / 'groups.jsonl', policy_file, tmp_path, f'--name={ranks}-{i}', *fixed, *more)
            for i, more in enumerate(lists)
        ]
        ends = run_ranks(partial(trained, train=embedding.train), ranks, *runs, timeout=120)[0]
        return [(lines_of(args.run / 'metrics.jsonl'), end) for args, end in zip(runs, ends)]

    return run


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_encoder_learns_which_texts_belong_together(train):
    lines, _ = train(1, ['--epochs=12', '--lr=3e-3', '--pooling=mean', '--micro-batch-size=4'])[0]
    losses = [line['loss'] for line in lines if 'loss' in line]
    assert losses[-1] < 0.5 * losses[0]
    measured = [line for line in lines if 'held_out_recall@1' in line]
    assert [line['step'] for line in measured[:2]] == [0, 2]
    assert {line['chance'] for line in measured} == {0.1}
    assert measured[-1]['held_out_recall@1'] > measured[0]['held_out_recall@1'] + 0.2


@pytest.mark.parametrize('layout', ['tp2 pp2', *(pytest.param(x, marks=pytest.mark.long) for x in
                                    ('dp2', 'packed tp2 pp2'))])  # fmt: skip
def test_figures_and_weights_are_the_same_under_every_layout_and_packed(train, layout):
    ranks, more = LAYOUTS[layout]
    both = ['--steps=3', '--hard-negatives=2']
    one, packed = train(1, both, [*both, '--packed'])
    assert_same(one, packed)
    assert_same(one, train(ranks, [*both, *more])[0])


def test_every_pooling_trains_the_same_on_one_process_and_on_data_parallel_ranks(train):
    lists = [[f'--pooling={pooling}', '--steps=2'] for pooling in ('last', 'mean')]
    for one, two in zip(train(1, *lists), train(2, *([*more, '--dp=2'] for more in lists))):
        assert_same(one, two)


def of_one_by_one(args):
    """Embeddings of the held-out texts, each by itself, and all of them as they are measured."""
    parallel_state.initialize_model_parallel()
    model = MegatronModel(gpt.build(args, VOCAB)[0], vocab_size=VOCAB, head=EmbeddingHead(pooling=args.pooling))
    data = anchors.load(args.dataset).held_out
    single = [model.predict(inputs=[{'input_ids': torch.from_numpy(ids).long()[None]}])[0] for ids in data.ids]
    return torch.cat(single).numpy(), embedding.embeddings(model, data, args)


def test_embeddings_of_all_texts_stand_in_their_order(policy_file, files, tmp_path):
    held_out = f'--held-out={files / "held.jsonl"}'
    args = options_for(files / 'groups.jsonl', policy_file, tmp_path, held_out, '--loss=infonce', '--steps=1')
    single, together = run_ranks(of_one_by_one, 1, args)[0]
    np.testing.assert_allclose(together, single, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-6)
