"""Training on pairs: it begins at the reference, and is the same however it is split."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks

from launch import gpt, kinds, options, preference, weights
from launch.datasets import pairs
from launch.datasets.responses import micro_batches
from launch.figures import preference_progress
from tests.launch.test_policy import LAYOUTS, PNG, assert_same
from tests.launch.tiny_policy import VOCAB, as_pairs, numbers, options_for, trained
from twinkle_megatron import MegatronModel


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """32 pairs to train on and 10 held out."""
    folder = tmp_path_factory.mktemp('pairs')
    (folder / 'pairs.jsonl').write_text(as_pairs(range(32)))
    (folder / 'held.jsonl').write_text(as_pairs(range(100, 110)))
    return folder


@pytest.fixture
def train(policy_file, files, tmp_path):
    """Trains on `ranks` ranks with each of some lists of options; for each the lines of figures and the weights."""

    def run(ranks, *lists):
        fixed = [f'--held-out={files / "held.jsonl"}', '--eval-every=2', '--lr=3e-3', '--loss=dpo']
        runs = [
            options_for(files / 'pairs.jsonl', policy_file, tmp_path, f'--name={ranks}-{i}', *fixed, *more)
            for i, more in enumerate(lists)
        ]
        ends = run_ranks(partial(trained, train=preference.train), ranks, *runs, timeout=120)[0]
        assert all((args.run / 'preference.png').read_bytes().startswith(PNG) for args in runs)
        return [(lines_of(args.run / 'metrics.jsonl'), end) for args, end in zip(runs, ends)]

    return run


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same_training(one, other):
    """All but the accuracy of the first step, before which every margin is 0: rounding alone decides it."""
    lines = [[{**line, 'accuracy': 0} if line['step'] == 1 else line for line in of] for of, _ in (one, other)]
    assert_same((lines[0], one[1]), (lines[1], other[1]))


def measured(lines):
    return [line for line in lines if 'held_out_margin' in line]


def test_the_first_step_stands_at_the_reference_and_then_the_chosen_are_preferred(train, tmp_path):
    (lines, _) = train(1, ['--epochs=4', '--beta=0.5'])[0]
    first = next(line for line in lines if 'loss' in line)
    assert first['loss'] == pytest.approx(math.log(2), abs=1e-5)
    assert first['margin'] == pytest.approx(0, abs=1e-4)
    start, *_, end = measured(lines)
    assert (start['step'], start['held_out_margin']) == (0, 0)
    assert end['held_out_margin'] > 0.5
    assert end['held_out_accuracy'] > 0.8
    rows = lines_of(tmp_path / '1-0/held_out.jsonl')
    assert len(rows) == 10
    assert start['held_out_chosen_logps'] == pytest.approx(np.mean([row['ref_chosen_logp'] for row in rows]), rel=1e-9)
    margins = [
        0.5 * (r['chosen_logp'] - r['ref_chosen_logp'] - r['rejected_logp'] + r['ref_rejected_logp']) for r in rows
    ]
    assert end['held_out_margin'] == pytest.approx(np.mean(margins), rel=1e-5)
    assert end['held_out_accuracy'] == pytest.approx(np.mean([margin > 0 for margin in margins]))


@pytest.mark.parametrize('layout', ['tp2 pp2', *(pytest.param(x, marks=pytest.mark.long) for x in
                                    ('dp2', 'packed tp2 pp2', 'linear'))])  # fmt: skip
def test_figures_and_weights_are_the_same_under_every_layout_and_packed(train, layout):
    ranks, more = LAYOUTS[layout]
    both = ['--steps=3', '--lr=1e-3', '--sft-weight=0.1', '--label-smoothing=0.1']
    one, packed = train(1, both, [*both, '--packed'])
    assert_same_training(one, packed)
    assert_same_training(one, train(ranks, [*both, *more])[0])


def test_every_loss_trains_the_same_on_one_process_and_on_data_parallel_ranks(train):
    lists = [[f'--loss={loss}', '--steps=3', '--lr=1e-3'] for loss in kinds.PAIRS.losses]
    lists += [['--loss-type=kto', '--steps=3', '--lr=1e-3']]
    for one, two in zip(train(1, *lists), train(2, *([*more, '--dp=2'] for more in lists))):
        assert measured(one[0])[-1]['held_out_margin'] > 0
        assert_same_training(one, two)


def test_losses_without_a_reference_are_measured_by_the_policy_of_the_start(train):
    for loss in ('simpo', 'orpo'):
        (lines, _) = train(1, [f'--loss={loss}', '--steps=2'])[0]
        steps = [line for line in lines if 'loss' in line]
        assert not any('margin' in line for line in steps)
        assert all({'chosen_logps', 'rejected_logps'} <= set(line) for line in steps)
        assert measured(lines)[-1]['held_out_rewards/chosen'] == pytest.approx(
            0.1 * (measured(lines)[-1]['held_out_chosen_logps'] - measured(lines)[0]['held_out_chosen_logps']), rel=1e-3
        )


def test_the_cache_of_the_reference_gives_the_same_training_and_refuses_another_policy(train, tmp_path, policy_file):
    cached = ['--steps=2', f'--reference-cache={tmp_path / "cache"}']
    (plain, new, again) = train(1, ['--steps=2'], cached, cached)
    assert_same_training(plain, new)
    assert_same_training(new, again)
    assert len(list((tmp_path / 'cache').iterdir())) == 8 + 3  # micro-batches of 4 pairs, of 32 and of 10
    tensors = weights.read(policy_file)
    tensors['output_layer.weight'] = 2 * tensors['output_layer.weight']
    weights.save(tmp_path / 'other.npz', tensors, weights.read_about(policy_file))
    with pytest.raises(Exception, match='cache must hold the log-probs of this reference'):
        train(1, [*cached, f'--init-weights={tmp_path / "other.npz"}'])


def of_one_by_one(args, path):
    """Log-probs of the responses in the file, each by itself."""
    parallel_state.initialize_model_parallel()
    model = MegatronModel(gpt.build(args, VOCAB)[0], vocab_size=VOCAB, head='logits')
    model.set_loss('CrossEntropyLoss')
    data = pairs.load(path).held_out
    inputs = micro_batches(data, [numbers(i) for i in range(len(data))], False)
    return [float(logps.sum()) for logps in model.forward_only(inputs=inputs)['logps']]


def test_the_log_probs_of_the_file_are_those_of_its_responses(train, tmp_path, policy_file, files):
    args = options_for(
        files / 'pairs.jsonl', policy_file, tmp_path, f'--held-out={files / "held.jsonl"}', '--loss=dpo', '--steps=1'
    )
    found = run_ranks(of_one_by_one, 1, args, args.dataset)[0]
    train(2, ['--steps=1', '--dp=2', '--packed', '--micro-batch-size=2'])
    rows = lines_of(tmp_path / '2-0/held_out.jsonl')
    assert [row[f'ref_{side}_logp'] for row in rows for side in ('chosen', 'rejected')] == pytest.approx(
        found, rel=1e-5
    )


def test_the_table_has_means_and_1_96_standard_errors_over_pairs():
    before, after = np.array([[-4.0, -5], [-8, -6]]), np.array([[-3.0, -6], [-8, -7]])
    table = {line.name: line.of for line in preference_progress.held_out_table(before, after, beta=0.5)}
    margin = np.array([0.5 * (3 - 1), 0.5 * (-1 + 2)])
    found = table['margin over the policy of before']
    assert found['before'] == {'mean': 0, 'plus_or_minus': 0}
    assert found['after']['mean'] == pytest.approx(margin.mean())
    assert found['after']['plus_or_minus'] == pytest.approx(1.96 * margin.std(ddof=1) / math.sqrt(2))
    assert table['accuracy: share above 0']['after']['mean'] == 1
    assert table['chosen is more likely: share']['before']['mean'] == 0.5
    assert table['log-prob of rejected, nats']['difference']['mean'] == pytest.approx(-1)


def test_options_reach_the_loss(policy_file):
    given = ['--data=p', f'--init-weights={policy_file}']
    for argv, expected in (
        (
            '--loss=dpo --loss-type=hinge --beta=0.3 --sft-weight=2',
            {'loss_type': 'hinge', 'beta': 0.3, 'nll_weight': 2},
        ),
        ('--loss=dpo --label-smoothing=0.2', {'loss_type': 'sigmoid', 'beta': 0.1, 'label_smoothing': 0.2}),
        ('--loss=simpo --gamma=0.25', {'beta': 2.5, 'gamma': 0.25}),
        ('--loss=cpo --cpo-alpha=0.5', {'beta': 0.1, 'nll_weight': 0.5}),
        ('--loss=orpo --beta=0.2', {'beta': 0.2, 'pair_weight': 0.2}),
    ):
        args = options.parse([*argv.split(), *given])
        loss, names = preference.LOSSES[args.loss]
        made = loss(**{name: getattr(args, name) for name in names})
        assert {name: getattr(made, name) for name in expected} == expected


def test_responses_of_pairs_lie_side_by_side():
    assert preference.responses_of(torch.tensor([3, 0])).tolist() == [6, 7, 0, 1]
