"""Distillation: a student that is its teacher has nothing to learn, and training is the same however it is split."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks

from launch import distillation, gpt, options, prepare, weights
from launch.datasets import best_tokens
from tests.launch.test_policy import PNG, assert_same
from tests.launch.tiny_policy import PROMPTS, TEXT, VOCAB, trained
from twinkle_megatron import MegatronModel

SEQUENCES = [[*prompt, *range(40 + i, 44 + i)] for i, prompt in enumerate(PROMPTS * 3)]


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """Documents of words that the policy knows."""
    path, words = tmp_path_factory.mktemp('text') / 'text.jsonl', TEXT.split()
    lines = [{'text': ' '.join([*words[i % 7 : i % 7 + 6], str(i)])} for i in range(48)]
    path.write_text('\n'.join(map(json.dumps, lines)))
    return path


def log_probs_of(path, sequences):
    """Of each place of each sequence the log-probs of all tokens under a policy."""
    parallel_state.initialize_model_parallel()
    args = options.parse([f'--init-weights={path}', '--steps=1'])
    model, found = MegatronModel(gpt.build(args, VOCAB)[0], vocab_size=VOCAB, head='logits'), []

    def keep(inputs, outputs, **extra):
        found.append(outputs['logits'][0, :, :VOCAB].log_softmax(-1).tolist())
        return outputs['logits'].sum() * 0

    model.set_loss(keep)
    rows = [torch.tensor([ids]) for ids in sequences]
    model.forward_only(inputs=[{'input_ids': row, 'labels': row} for row in rows])
    return found


@pytest.fixture(scope='module')
def told(policy_file):
    """Those of `SEQUENCES`."""
    return run_ranks(log_probs_of, 1, policy_file, SEQUENCES)[0]


def best_file(path, told, k):
    """A file of the best `k` tokens at each place behind the prompt; every third sequence tells of one token less."""
    lines = []
    for i, (ids, places) in enumerate(zip(SEQUENCES, told)):
        best = [np.argsort(places[place - 1])[::-1][: k - (i % 3 == 0)].tolist() for place in range(1, len(ids))]
        scores = [[places[place][token] for token in tokens] for place, tokens in enumerate(best)]
        lines.append({'input_ids': ids, 'prompt_length': len(ids) - 4})
        lines[-1] |= {'topk_logprobs': [None, *scores], 'topk_indices': [None, *best]}
    path.write_text('\n'.join(map(json.dumps, lines)))
    return f'--data={path}'


@pytest.fixture
def train(tmp_path):
    """Trains on `ranks` ranks with each of some lists of options; for each the lines of figures and the weights."""

    def run(ranks, *lists):
        fixed = ['--loss=gkd', '--lr=3e-3', '--micro-batches=2', '--log-every=1', '--eval-every=2', '--steps=4']
        fixed += [f'--runs={tmp_path}', f'--save-weights={tmp_path}/end.npz', '--seq-length=16']
        runs = [options.parse([*fixed, f'--name={ranks}-{i}', *more]) for i, more in enumerate(lists)]
        for args in runs:
            args.dataset, _ = prepare.prepare(args)
        ends = run_ranks(partial(trained, train=distillation.train), ranks, *runs, timeout=120)[0]
        assert all((args.run / 'distillation.png').read_bytes().startswith(PNG) for args in runs)
        return [(lines_of(args.run / 'metrics.jsonl'), end) for args, end in zip(runs, ends)]

    return run


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def held_out(lines, key='divergence'):
    return [line[f'held_out_{key}_nats'] for line in lines if 'held_out_loss_nats' in line]


SMALL = ['--layers=2', '--hidden-size=16', '--heads=4']


def test_a_student_that_is_its_teacher_has_nothing_to_learn(train, policy_file, text, told, tmp_path):
    same = [f'--init-weights={policy_file}']
    beside = [f'--data={text}', f'--teacher-weights={policy_file}', *same]
    best = [best_file(tmp_path / 'best.jsonl', told, 5), *same, '--micro-batch-size=2']
    lists = [beside, [*beside, '--topk=5', '--beta=0'], best, [*best, '--topk-tail=bucket', '--beta=1']]
    for lines, _ in train(1, *lists):
        assert held_out(lines)[0] == pytest.approx(0, abs=1e-6)
        if 'teacher_loss_nats' in lines[0]:
            assert lines[0]['teacher_loss_nats'] == pytest.approx(lines[0]['held_out_loss_nats'], rel=1e-6)


def test_a_student_beside_its_teacher_comes_nearer_and_is_the_same_under_every_layout(train, policy_file, text):
    beside = [f'--data={text}', f'--teacher-weights={policy_file}', *SMALL]
    best = [*beside, '--topk=7', '--topk-tail=bucket', '--temperature=2']
    split = train(4, [*beside, '--tp=2', '--pp=2']), train(2, [*best, '--dp=2', '--head=linear'])
    for alone, (other,) in zip(train(1, beside, best), split):
        start, *_, end = held_out(alone[0])
        assert 0 < end < 0.99 * start
        assert_same(alone, other)


def test_a_student_of_best_tokens_comes_nearer_and_is_the_same_under_every_layout(train, policy_file, told, tmp_path):
    (tmp_path / 'tokenizer.json').write_text(weights.read_about(policy_file).tokenizer)
    best = [best_file(tmp_path / 'best.jsonl', told, 5), f'--tokenizer={tmp_path / "tokenizer.json"}', *SMALL]
    lists = [best, [*best, '--topk-tail=bucket']]
    split = train(2, [*lists[0], '--tp=2']), train(4, [*lists[1], '--pp=2', '--dp=2'])
    for alone, (other,) in zip(train(1, *lists), split):
        start, *_, end = held_out(alone[0])
        assert 0 < end < 0.99 * start
        assert_same(alone, other)


def test_cross_entropy_is_measured_by_a_teacher_and_trains_as_without_one(train, policy_file, text):
    beside = [f'--data={text}', f'--teacher-weights={policy_file}', *SMALL]
    (measured, _), (learnt, _) = train(1, [*beside, '--loss=cross-entropy', '--beta=0.25'], [*beside, '--beta=0.25'])
    assert held_out(measured)[0] == held_out(learnt)[0]
    assert held_out(measured)[-1] > held_out(learnt)[-1]
    assert held_out(measured, 'loss')[-1] < held_out(measured, 'loss')[0]
    assert not any('divergence_nats' in line for line in measured)


def on_policy(args, code):
    """The loop of the page, from this student and teacher."""
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    model = MegatronModel(*gpt.build(args, VOCAB), vocab_size=VOCAB)
    names = {'model': model, 'prompts': PROMPTS, 'steps': 4, 'end': 1}
    names['teacher'] = model.teacher(gpt.frozen(args, args.teacher_weights))
    exec(code, names)
    return names['divergences']


def test_the_on_policy_loop_of_the_page_brings_the_student_nearer(policy_file):
    page = (Path(__file__).parents[2] / 'docs/distillation.md').read_text()
    (code,) = re.findall(r'```python\n(.*?)```', page, re.S)
    given = ['--loss=gkd', f'--teacher-weights={policy_file}', '--steps=4', '--lr=3e-3', '--tp=2', '--pp=2', *SMALL]
    found = run_ranks(on_policy, 4, options.parse(given), code, timeout=120)
    assert found == found[:1] * 4
    assert 0 < found[0][-1] < found[0][0]


def test_the_example_of_a_file_is_one(policy_file, tmp_path):
    page = (Path(__file__).parents[2] / 'docs/distillation.md').read_text()
    (line,) = re.findall(r'^{"input_ids".*', page, re.M)
    (tmp_path / 'topk.jsonl').write_text(f'{line}\n{line.replace("[5, 17, 8]", "[6, 17, 8]")}')
    tokenizer = weights.read_about(policy_file).tokenizer
    folder = best_tokens.prepare(tmp_path / 'topk.jsonl', tokenizer, seq_length=8, least=1, cache=tmp_path)
    assert best_tokens.load(folder).train.indices[0].tolist() == [[8, 3]]
