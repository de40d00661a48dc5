"""Signals on one rank end all of them at the same step; a process that waits too long says for whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_gpt import Layout, initialize

from twinkle_megatron.groups import Groups
from twinkle_megatron.survive import AGAIN, HUNG, StopSignals, Watchdog


def _told(number):
    stop = StopSignals()
    seen = []
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        seen.append(stop.agreed())
    noted = stop.noted
    stop.close()
    return seen, noted, signal.getsignal(number)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_on_one_rank_is_agreed_on_at_the_same_step(number):
    before = signal.getsignal(number)
    results = run_ranks(_told, 3, number)
    assert [seen for seen, _, _ in results] == [[False, False, True, True]] * 3
    assert [noted for _, noted, _ in results] == [None, number, None]
    assert all(after == before for _, _, after in results), 'put back'


def test_a_signal_that_comes_again_while_the_process_closes_down_changes_nothing():
    code = (
        'import atexit, os, signal, sys\nfrom twinkle_megatron.survive import AGAIN, StopSignals\n'
        'stop = StopSignals()\nos.kill(os.getpid(), signal.SIGUSR1)\nassert stop.agreed()\nstop.ignore()\n'
        'class Late:\n    def __del__(self):\n        os.kill(os.getpid(), 10)\n'
        'sys.late = Late()\nos.kill(os.getpid(), signal.SIGTERM)\nsys.exit(AGAIN)\n'
    )
    assert subprocess.run([sys.executable, '-c', code], timeout=50).returncode == AGAIN


def test_one_process_needs_no_group():
    stop = StopSignals([signal.SIGUSR1])
    assert not stop.agreed()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.agreed()
    stop.close()


def _late():
    initialize(Layout(tp=2))
    groups, found = Groups.from_megatron(), []
    with Watchdog(60, groups) as watchdog:
        watchdog.beat('step 7')
        timer = threading.Timer(0.5, lambda: found.append(watchdog.report()))
        timer.start()
        if dist.get_rank() == 1:
            time.sleep(1.5)
        dist.all_reduce(torch.zeros(1), group=groups.tp)
        dist.barrier()
        timer.join()
    return found[0]


def test_the_report_names_rank_step_and_group():
    waits, late = run_ranks(_late, 2)
    assert 'rank 0 has not gone on for 60 s in step 7' in waits
    assert 'all_reduce of the group tp, ranks [0, 1]' in waits
    assert 'test_survive.py' in waits, 'the stack'
    assert 'rank 1' in late
    assert 'it waits for no collective' in late


def test_a_process_that_hangs_ends_with_a_message():
    code = (
        'import time\nfrom twinkle_megatron.survive import Watchdog\n'
        'with Watchdog(0.3) as dog:\n    dog.beat("step 1")\n    time.sleep(60)\n'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=50)
    assert done.returncode == HUNG
    assert 'rank 0 has not gone on for 0.3 s in step 1' in done.stderr


def test_time_in_which_a_process_was_suspended_does_not_count():
    code = (
        'import time\nfrom twinkle_megatron.survive import Watchdog\n'
        'with Watchdog(2) as dog:\n    print("goes on", flush=True)\n    time.sleep(0.5)\n'
        '    print("has gone on", flush=True)\n    time.sleep(0.5)\n'
    )
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == 'goes on\n'
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == 'has gone on\n'
    assert process.returncode == 0


def test_a_watchdog_that_hears_of_steps_lets_them_go_on():
    with Watchdog(0.4) as watchdog:
        for step in range(8):
            watchdog.beat(f'step {step}')
            time.sleep(0.1)
    with pytest.raises(ValueError, match='seconds must be'):
        Watchdog(0)


def test_a_process_that_leaves_writes_what_it_has_and_runs_what_was_registered():
    code = (
        'import atexit, logging, sys\nfrom twinkle_megatron.survive import leave\n'
        'atexit.register(lambda: print("at exit"))\nprint("said", end=" ")\nleave(85)\nprint("never")\n'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (85, 'said at exit\n')
