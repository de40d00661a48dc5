"""The script as a person starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    for head in ('logits', 'linear'):
        run = start('--tp', '2', '--steps', '5', '--head', head, *SMALL, tmp_path=tmp_path)
        assert run.returncode == 0, run.stderr
    built, never_built = (_curve(figures(tmp_path, f'python-reference-tp2-pp1-{h}')) for h in ('logits', 'linear'))
    for one, other in zip(built, never_built, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


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
