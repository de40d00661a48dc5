"""What people watch: a log of each rank, TensorBoard, Weights & Biases, curves, and how a run has ended."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
import types
from argparse import Namespace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch import plot
from launch.figures import logs
from launch.figures.boards import Boards
from twinkle_megatron.survive import AGAIN

PNG = b'\x89PNG\r\n\x1a\n'


def scalars(folder, name):
    events = EventAccumulator(str(folder / 'tensorboard')).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_has_each_figure_once_where_a_run_goes_on(tmp_path):
    board = Boards(tmp_path, 0, {})
    for step in (1, 2, 3):
        board.write({'step': step, 'loss': 1.0 * step, 'kind': 'text'})
    board.close()
    time.sleep(1.1)  # TensorBoard reads files by their names, which have seconds, then a number: 10 before 9
    board = Boards(tmp_path, 2, {})  # the third step was lost
    board.write({'step': 3, 'loss': 30.0})
    board.close()
    assert scalars(tmp_path, 'loss') == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_weights_and_biases_is_used_where_it_is_installed_and_asked_for(tmp_path, monkeypatch):
    calls = []
    wandb = types.ModuleType('wandb')
    wandb.__spec__ = types.SimpleNamespace()
    wandb.init = lambda **given: (
        calls.append(given)
        or types.SimpleNamespace(
            log=lambda figures, step: calls.append((step, figures)), finish=lambda: calls.append('finished')
        )
    )
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    monkeypatch.delenv('WANDB_API_KEY', raising=False)
    monkeypatch.delenv('WANDB_MODE', raising=False)
    Boards(tmp_path, 0, {}).close()
    assert not calls
    monkeypatch.setenv('WANDB_MODE', 'offline')
    board = Boards(tmp_path, 0, vars(Namespace(lr=0.1)))
    board.write({'step': 4, 'loss': 2.0})
    board.close()
    assert calls[0]['name'] == tmp_path.name
    assert calls[0]['config'] == {'lr': '0.1'}
    assert calls[1:] == [(4, {'loss': 2.0}), 'finished']


def test_each_rank_has_a_log_that_tells_what_it_was_warned_of_and_what_ended_it(tmp_path):
    code = (
        'import logging, sys\nfrom pathlib import Path\nfrom launch.figures import logs\n'
        f'folder = Path({str(tmp_path)!r})\n'
        'logs.start(folder / "logs", 3, 16)\n'
        'logging.getLogger("twinkle_megatron").warning("heard")\n'
        'with logs.end_told(folder):\n    raise KeyError("no such thing")\n'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60, cwd=Path.cwd())
    text = (tmp_path / 'logs/rank-03.log').read_text()
    assert 'KeyError' in done.stderr
    for expected in (
        'rank 3 of 16',
        'WARNING twinkle_megatron: heard',
        'ended by an error',
        "failed: KeyError: 'no such",
    ):
        assert expected in text


def test_the_end_of_a_run_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv('RANK', '0')
    with logs.end_told(tmp_path):
        pass
    for error in (SystemExit(AGAIN), RuntimeError('two\nlines')):
        with pytest.raises(type(error)), logs.end_told(tmp_path):
            raise error
    monkeypatch.setenv('RANK', '1')
    with logs.end_told(tmp_path):
        pass
    finished, stopped, failed = (tmp_path / 'ends.log').read_text().splitlines()
    assert 'finished' in finished
    assert 'stopped, to go on with --resume auto' in stopped
    assert 'failed: RuntimeError: two' in failed


@pytest.fixture(autouse=True)
def _same_handlers():
    before = logging.getLogger().handlers[:]
    yield
    assert logging.getLogger().handlers == before


def test_curves_of_several_runs_are_drawn_beside_each_other(tmp_path, capsys):
    for name, end in (('one', ''), ('other', '{"step": 3, "lo')):
        (tmp_path / name).mkdir()
        lines = [{'step': step, 'loss': 5 - step, 'grad_norm': 1.0} for step in (1, 2)]
        (tmp_path / name / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n' + end)
    runs, out = [str(tmp_path / 'one'), str(tmp_path / 'other')], tmp_path / 'out/curves.png'
    for more in ([], ['--key', 'loss']):
        assert plot.main([*runs, '--out', str(out), *more]) == 0
        assert out.read_bytes().startswith(PNG)
    assert plot.main([*runs, '--key', 'lost']) == 2
    assert "no run has the figure 'lost'; there are grad_norm, loss" in capsys.readouterr().err
    assert plot.main([str(tmp_path / 'third')]) == 2
    assert 'a RUN is the folder of one' in capsys.readouterr().err
