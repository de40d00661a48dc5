"""The process above those that train: which signals it hands on, and which exit code it has."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from twinkle_megatron.survive import AGAIN

RANK = r"""
import os, signal, sys, time
told = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: told.append(1))
os.write(1, b'listens\n')
while not told:
    time.sleep(0.05)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
sys.exit(85)
"""


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1])
def test_signals_that_keep_coming_do_not_change_the_exit_code(number, tmp_path):
    (tmp_path / 'rank.py').write_text(RANK)
    options = ['--standalone', '--nproc-per-node', '2', str(tmp_path / 'rank.py')]
    command = [sys.executable, '-m', 'launch.processes', *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as process:
        try:
            assert [process.stdout.readline() for _ in range(2)] == ['listens\n'] * 2
            end = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < end:
                os.kill(process.pid, number)
                time.sleep(0.01)
            assert process.returncode == AGAIN, process.stderr.read()
        finally:
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
                child.kill()
            process.kill()


def test_a_signal_before_the_ranks_are_there_is_handed_on(tmp_path):
    (tmp_path / 'rank.py').write_text(RANK)
    code = (
        'import os, signal, sys\nfrom launch import processes\n'
        'torchrun = processes.torchrun\n'
        'def late():\n    os.kill(os.getpid(), signal.SIGUSR1)\n    torchrun()\n'
        'processes.torchrun = late\n'
        f'sys.argv = ["processes", "--standalone", "--nproc-per-node", "1", {str(tmp_path / "rank.py")!r}]\n'
        'processes.main()\n'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60, cwd=Path.cwd())
    # it ends by the signal where the rank had not listened yet, and with 85 where it had
    assert done.returncode in (AGAIN, 128 + signal.SIGUSR1), done.stderr
