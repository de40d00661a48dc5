"""The script as a person starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core import parallel_state
from ranks import run_ranks

from launch import options, prepare, train
from twinkle_megatron.survive import StopSignals

ROOT = Path(__file__).parents[2]
SIZES = {'layers': 2, 'hidden-size': 32, 'vocab-size': 600, 'seq-length': 32, 'log-every': 1, 'eval-every': 4}
SMALL = [f'--{name}={size}' for name, size in SIZES.items()]


def start(*options, tmp_path, timeout=240):
    """`launch/local.sh` from another folder, with this interpreter."""
    env = {'PATH': os.environ['PATH'], 'HOME': str(tmp_path), 'PYTHON': sys.executable, 'OMP_NUM_THREADS': '1'}
    env |= {name: value for name, value in os.environ.items() if name.startswith('MPL') or name == 'LD_LIBRARY_PATH'}
    command = [ROOT / 'launch/local.sh', *options]
    return subprocess.run(
        command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )


def figures(tmp_path, name):
    return [json.loads(line) for line in (tmp_path / 'runs' / name / 'metrics.jsonl').read_text().splitlines()]


def test_four_processes_train_and_leave_figures_and_a_picture(tmp_path):
    run = start('--tp', '2', '--pp', '2', '--steps', '8', '--lr', '1e-2', *SMALL, tmp_path=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = figures(tmp_path, 'python-reference-tp2-pp2')
    held_out = [line['held_out_loss_nats'] for line in lines if 'held_out_loss_nats' in line]
    assert len(held_out) == 3
    assert held_out[0] > held_out[1] > held_out[2]
    assert len([line for line in lines if 'train_loss_nats' in line]) == 8
    assert (tmp_path / 'runs/python-reference-tp2-pp2/loss.png').stat().st_size > 10_000
    assert f'{held_out[0]:.3f} nats per token before, {held_out[2]:.3f} after' in run.stdout
    assert 'Warning' not in run.stderr


def test_the_linear_head_gives_the_same_curve(tmp_path):
    curves = []
    for head in ('logits', 'linear'):
        args = options.parse(
            ['--tp=2', '--steps=5', f'--head={head}', f'--runs={tmp_path / "runs"}', '--name=run', *SMALL]
        )
        args.dataset, _ = prepare.prepare(args)
        run_ranks(in_ranks, 2, args)
        curves.append(_curve(figures(tmp_path, 'run')))
    for built, never_built in zip(*curves, strict=True):
        assert built == pytest.approx(never_built, rel=1e-4)


def in_ranks(args):
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    train.train(args, StopSignals())


def _curve(lines):
    return [{name: x for name, x in line.items() if not name.endswith(('seconds', 'second'))} for line in lines]


@pytest.mark.long
def test_the_curve_is_the_same_under_every_layout(tmp_path):
    options = ['--steps', '4', '--lr', '1e-3', '--warmup', '0.5', *SMALL]
    curves = []
    for layout in ((1, 1, 1), (2, 2, 1), (2, 1, 2)):
        sizes = [text for name, size in zip(('--tp', '--pp', '--dp'), layout) for text in (name, str(size))]
        run = start(*sizes, '--name', 'run', *options, tmp_path=tmp_path)
        assert run.returncode == 0, run.stderr
        curves.append(_curve(figures(tmp_path, 'run')))
    for curve in curves[1:]:
        for one, other in zip(curve, curves[0], strict=True):
            assert one == pytest.approx(other, rel=1e-4)


def test_training_goes_on_from_the_weights_of_another_layout(tmp_path):
    (tmp_path / 'my.jsonl').write_text('\n'.join(f'{{"text": "{n} is the square of {n}"}}' for n in range(40)))
    files = [f'--data={tmp_path / "my.jsonl"}', f'--runs={tmp_path}', '--seq-length=32', '--micro-batch-size=8']
    new = ['--layers=2', '--hidden-size=32', '--vocab-size=300', f'--save-weights={tmp_path / "w.npz"}']
    lines = []
    for ranks, more in ((4, ['--tp=2', '--pp=2', *new]), (1, [f'--init-weights={tmp_path / "w.npz"}'])):
        args = options.parse([*files, '--epochs=1', '--lr=1e-2', '--name=run', *more])
        args.dataset, _ = prepare.prepare(args)
        run_ranks(in_ranks, ranks, args)
        lines.append([json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()])
    (first, *_, saved), (loaded, *_, last) = lines
    assert loaded['held_out_loss_nats'] == pytest.approx(saved['held_out_loss_nats'], rel=1e-5)
    assert first['held_out_loss_nats'] > saved['held_out_loss_nats'] > last['held_out_loss_nats']


def test_a_bad_rollout_ends_the_run_before_a_process_is_started(policy_file, tmp_path):
    (tmp_path / 'r.jsonl').write_text('{"temperature": 1}\n{"prompt": [1], "completion": [2], "old_logps": []}\n')
    run = start('--loss', 'grpo', '--data', 'r.jsonl', '--init-weights', str(policy_file), tmp_path=tmp_path)
    assert run.returncode == 1
    assert run.stdout == ''
    assert run.stderr.startswith('r.jsonl, line 2: has no "group", and the first line of the file no "num_generations"')
    assert 'Traceback' not in run.stderr


def test_rollouts_among_texts_are_told_apart(tmp_path):
    (tmp_path / 'r.jsonl').write_text('{"prompt": [1], "completion": [2], "old_logps": [-1], "reward": 0, "group": 1}')
    run = start('--data', 'r.jsonl', tmp_path=tmp_path)
    assert run.stderr.startswith(
        'r.jsonl, line 1: has a "completion" as rollouts have; train on these with --loss grpo'
    )


def test_a_bad_line_ends_the_run_before_a_process_is_started(tmp_path):
    (tmp_path / 'my.jsonl').write_text('{"text": "fine"}\n{"txt": "not"}\n')
    run = start('--data', 'my.jsonl', *SMALL, tmp_path=tmp_path)
    assert run.returncode == 1
    assert run.stdout == ''
    assert run.stderr.startswith('my.jsonl, line 2: has none of the keys "text", "messages", "prompt" and "response"')
    assert 'Traceback' not in run.stderr
    assert not (tmp_path / 'runs').exists()


def test_a_wrong_option_ends_the_run_before_a_process_is_started(tmp_path):
    run = start('--steps', 'abc', tmp_path=tmp_path)
    assert run.returncode == 2
    assert run.stderr.endswith("error: argument --steps: must be a whole number of at least 1, got 'abc'\n")


@pytest.mark.parametrize('place', ['file/w.npz', 'folder'])
def test_weights_that_could_not_be_written_end_the_run_before_a_process_is_started(place, tmp_path):
    (tmp_path / 'file').touch()
    (tmp_path / 'folder').mkdir()
    run = start('--save-weights', place, tmp_path=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith('error: --save-weights')
    assert 'Traceback' not in run.stderr


def test_a_bad_pair_ends_the_run_before_a_process_is_started(policy_file, tmp_path):
    (tmp_path / 'p.jsonl').write_text(
        '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": "b"}\n'
    )
    run = start('--loss', 'dpo', '--data', 'p.jsonl', '--init-weights', str(policy_file), tmp_path=tmp_path)
    assert run.returncode == 1
    assert run.stdout == ''
    assert run.stderr.startswith('p.jsonl, line 2: has no "rejected"')
    assert 'Traceback' not in run.stderr
    assert not (tmp_path / 'runs').exists()


def test_best_tokens_are_trained_on_and_a_bad_line_ends_the_run_before_a_process_is_started(policy_file, tmp_path):
    best = {'prompt_length': 1, 'topk_logprobs': [[-0.5, -1.5]] * 3, 'topk_indices': [[5, 6], [7, 8], [9, 10]]}
    lines = [json.dumps(best | {'input_ids': [i, 50 + i, 5, 7]}) for i in range(12)]
    (tmp_path / 't.jsonl').write_text('\n'.join(lines))
    given = ['--loss', 'gkd', '--data', 't.jsonl', '--init-weights', str(policy_file)]
    run = start(
        *given, '--tp', '2', '--steps', '2', '--topk-tail', 'bucket', '--save-weights', 'w.npz', tmp_path=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert 'teacher   2 best tokens at each, with 83.0% of its probability on average' in run.stderr
    assert 'train     11 sequences, 33 trained tokens' in run.stderr
    assert (tmp_path / 'w.npz').exists()
    (tmp_path / 't.jsonl').write_text('\n'.join([*lines, '{"input_ids": [1, 2]}']))
    run = start(*given, tmp_path=tmp_path)
    assert run.returncode == 1
    assert run.stderr.startswith('t.jsonl, line 13: has no "topk_logprobs"')
    assert 'Traceback' not in run.stderr
