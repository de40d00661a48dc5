"""The folder of a run: nothing in it is removed, and one process at a time is at work there."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import earlier

HOLDS = """
import sys, time
from pathlib import Path
from launch.earlier import hold
hold(Path(sys.argv[1]))
print('held', flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that is at work in a run."""
    command = [sys.executable, '-c', HOLDS, str(tmp_path / 'run')]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as process:
        assert process.stdout.readline() == 'held\n'
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def _released():
    yield
    while earlier._held:
        earlier._held.popitem()[1].close()


def test_two_processes_are_not_at_work_in_one_run(holder, tmp_path, capsys):
    with pytest.raises(ValueError, match=rf'run is in use by process {holder.pid} on .*: let it end, or'):
        earlier.hold(tmp_path / 'run', patience=0.2)
    assert f'waits up to 0.2 s for process {holder.pid} on' in capsys.readouterr().err
    earlier.hold(tmp_path / 'other', patience=0.2)
    earlier.hold(tmp_path / 'other', patience=0.2)  # by this one again


def test_a_process_that_was_killed_holds_nothing(holder, tmp_path):
    holder.kill()
    began = time.monotonic()
    earlier.hold(tmp_path / 'run', patience=30)
    assert time.monotonic() - began < 20
    assert (tmp_path / 'run/lock').read_text().startswith('process ')


def test_a_file_system_without_locks_does_not_matter(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(95, 'Operation not supported')

    monkeypatch.setattr(earlier.fcntl, 'flock', none)
    earlier.hold(tmp_path / 'run', patience=0)


def test_a_folder_without_checkpoints_is_a_beginning(tmp_path):
    args = argparse.Namespace(run=tmp_path, resume='never')
    assert earlier.start_of(args) == 0
    (tmp_path / 'checkpoints/.step-00000003.part-of-a-save').mkdir(parents=True)
    assert earlier.start_of(args) == 0
