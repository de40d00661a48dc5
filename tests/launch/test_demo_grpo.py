"""`make demo-grpo` as a person starts it, but tiny; and what it says of its rewards."""

import json
from functools import partial

import numpy as np
import pytest
from megatron.core import parallel_state
from ranks import run_ranks

from launch import options, prepare, task, train
from launch.figures import intervals
from tests.launch import demos
from tests.launch.test_progress import PNG
from twinkle_megatron.survive import StopSignals

start = partial(demos.start, 'demo_grpo')


def demo(tmp_path, *layout):
    tiny = ['--lines=300', '--pretrain-steps=12', '--prompts=32', '--held-out=12', '--generations=8', '--log-every=1']
    run = start(tmp_path, *tiny, '--seeds', '7', *layout)
    assert run.returncode == 0, run.stderr
    return run.stdout, tmp_path / 'runs/demo-grpo'


def figures(folder):
    return [json.loads(line) for line in (folder / 'seed-7/metrics.jsonl').read_text().splitlines()]


def pretrain(args):
    parallel_state.initialize_model_parallel()
    train.train(args, StopSignals())


@pytest.mark.long
def test_the_demo_samples_trains_and_samples_again(tmp_path):
    lines, base = tmp_path / 'lines.jsonl', tmp_path / 'runs/demo-grpo/base.npz'  # as an earlier run leaves them
    lines.write_text(''.join(json.dumps({'text': line}) + '\n' for line in task.code_lines(300)))
    sizes = ['--vocab-size=1000', '--micro-batch-size=32', '--steps=12', '--seq-length=32']
    args = options.parse([f'--data={lines}', f'--runs={tmp_path}', f'--save-weights={base}', *sizes])
    args.dataset, _ = prepare.prepare(args)
    run_ranks(pretrain, 1, args)
    shown, folder = demo(tmp_path, '--tp=2', '--pp=1')
    lines = figures(folder)
    assert lines[0]['token_ratio_max'] == pytest.approx(1, abs=1e-4)  # sampled by other processes, but exactly so
    assert lines[0]['approx_kl'] < 1e-9
    assert [line['step'] for line in lines] == [1, 2, 3, 4]
    assert {'reward', 'approx_kl', 'clip_ratio', 'entropy'} <= set(lines[-1])
    rollouts = [json.loads(line) for line in (folder / 'rollouts-7.jsonl').read_text().splitlines()[1:]]
    assert len(rollouts) == 32 * 8
    assert {rollout['reward'] for rollout in rollouts} <= {0.0, 1.0}
    prompts, held_out = (set((folder / f'{name}.jsonl').read_text().splitlines()) for name in ('prompts', 'held-out'))
    assert (len(prompts), len(held_out)) == (32, 12)
    assert not prompts & held_out
    result = json.loads((folder / 'result.json').read_text())
    assert f'{result["seed 7"]["before"]["mean"]:.3f} ± ' in shown
    assert (folder / 'demo.png').read_bytes().startswith(PNG)
    assert str(folder.relative_to(tmp_path) / 'demo.png') in shown


@pytest.mark.long
def test_the_demo_is_the_same_under_another_layout(tmp_path):
    found = []
    for name, layout in (('a', ['--tp=2', '--pp=2']), ('b', ['--tp=1', '--pp=1'])):
        (tmp_path / name).mkdir()
        found.append(figures(demo(tmp_path / name, *layout)[1]))
    for one, other in zip(*found, strict=True):
        for key in ('loss', 'reward', 'approx_kl', 'clip_ratio', 'entropy', 'grad_norm'):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6)


def test_a_step_that_fails_ends_the_demo_with_its_message_alone(tmp_path):
    run = start(tmp_path, '--tp=3', '--lines=300', '--prompts=8', '--held-out=4')
    assert run.returncode == 1
    assert run.stderr.endswith('error: --heads 4 must be a multiple of --tp 3; try --tp 2 or 4\n')


def test_the_interval_is_1_96_standard_errors_of_the_mean_over_prompts():
    values = np.array([0.0, 0.25, 1.0, 0.5])
    found = intervals.interval(values)
    assert found['mean'] == pytest.approx(0.4375)
    assert found['plus_or_minus'] == pytest.approx(1.96 * np.std(values, ddof=1) / 2)
    assert intervals.interval(values[:1])['plus_or_minus'] == 0
