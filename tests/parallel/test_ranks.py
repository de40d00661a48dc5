"""The launcher itself: what a rank returns, raises, or fails to do comes back in time, and no process stays behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import ranks
import torch
import torch.distributed as dist
from gradients import Part, compare
from ranks import RankFailure, run_ranks

pytestmark = pytest.mark.skipif(
    ranks.DEVICE == 'cuda', reason='the cases are closures, which spawned ranks cannot take'
)


def test_values_come_back_in_rank_order():
    def case(offset):
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        return {'total': total + offset, 'rank': dist.get_rank()}

    results = run_ranks(case, 4, 10)
    assert [r['rank'] for r in results] == [0, 1, 2, 3]
    assert all(r['total'].item() == 16 for r in results)


def test_a_large_result_arrives():
    assert run_ranks(lambda: torch.zeros(4_000_000), 2)[1].numel() == 4_000_000


def test_a_raising_rank_is_named_with_its_traceback_before_the_ranks_it_broke():
    def case():
        if dist.get_rank() == 1:
            raise KeyError('the cause')
        dist.barrier()

    with pytest.raises(RankFailure, match=r"(?s)^rank 1: KeyError: 'the cause'.*raise KeyError") as failure:
        run_ranks(case, 3)
    assert failure.value.outcomes[0].rank == 1


@pytest.mark.parametrize(
    ('end', 'how'),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 'killed by SIGKILL'),
        (lambda: os._exit(7), 'exited with status 7'),
        (lambda: sys.exit(3), 'SystemExit: 3'),
    ],
    ids=['kill', '_exit', 'exit'],
)
def test_a_rank_that_ends_is_reported_at_once(end, how):
    def case():
        if dist.get_rank() == 2:
            end()
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankFailure, match=f'^rank 2: .*{how}'):
        run_ranks(case, 3)
    assert time.monotonic() - start < 30


def test_a_hanging_rank_is_ended_in_time_and_says_where_it_was():
    def forgotten_collective():
        dist.barrier()

    def case():
        if dist.get_rank() == 0:
            forgotten_collective()

    start = time.monotonic()
    with pytest.raises(RankFailure, match=r'(?s)^rank 0: Timeout: still running after 1 s.*in forgotten_collective'):
        run_ranks(case, 2, timeout=1)
    assert time.monotonic() - start < 30


def test_every_rank_outcome_can_be_asked_for():
    def case():
        rank = dist.get_rank()
        if rank == 0:
            return 'fine'
        if rank == 1:
            raise ValueError('labels must be ids')
        if rank == 2:
            os._exit(1)
        return time.sleep(60)

    outcomes = run_ranks(case, 4, timeout=2, collect_errors=True)
    assert [o.error for o in outcomes] == [None, 'ValueError', 'Died', 'Timeout']
    assert outcomes[0].value == 'fine'
    assert outcomes[1].message == 'labels must be ids'


def test_a_result_that_cannot_be_sent_is_an_error_of_that_rank():
    with pytest.raises(RankFailure, match=r'rank 0: .*pickle'):
        run_ranks(lambda: lambda: None, 1)


def test_a_tensor_result_is_a_copy_without_history():
    (result,) = run_ranks(lambda: (torch.ones(2, requires_grad=True) * 2,), 1)[0]
    assert not result.requires_grad
    assert result.tolist() == [2, 2]


def test_no_process_outlives_the_call_not_even_a_child_of_a_rank(tmp_path):
    def case():
        child = subprocess.Popen(['sleep', '300'])
        (tmp_path / str(dist.get_rank())).write_text(f'{os.getpid()} {child.pid}')
        dist.barrier()
        if dist.get_rank() == 0:
            raise RuntimeError('stop')
        time.sleep(60)

    with pytest.raises(RankFailure):
        run_ranks(case, 2)
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    assert _gone(pids)


def test_ranks_end_with_the_process_that_forked_them(tmp_path):
    script = f"""
        import os, time, pathlib, torch
        torch.set_num_threads(1)
        from ranks import run_ranks
        def case():
            (pathlib.Path({str(tmp_path)!r}) / str(os.getpid())).touch()
            time.sleep(300)
        run_ranks(case, 2, timeout=300)
    """
    path = os.pathsep.join(str(p) for p in (Path(ranks.__file__).parent, Path(ranks.__file__).parents[2]))
    parent = subprocess.Popen([sys.executable, '-c', textwrap.dedent(script)], env={**os.environ, 'PYTHONPATH': path})
    deadline = time.monotonic() + 60
    while len(pids := [int(file.name) for file in tmp_path.iterdir()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert len(pids) == 2
    assert _gone(pids)


def _gone(pids):
    """Whether all have ended within a few seconds; one that waits for init to collect it has ended."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_parent_with_threads_is_refused(monkeypatch):
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 4)
    with pytest.raises(RuntimeError, match='1 thread before ranks are forked, got 4'):
        run_ranks(lambda: None, 1)


def test_too_few_gpus_skip_the_test(monkeypatch):
    monkeypatch.setattr(ranks, 'DEVICE', 'cuda')
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    with pytest.raises(pytest.skip.Exception, match='needs 2 GPUs, 1 found'):
        run_ranks(print, 2)


WHOLE = {'w': Part(torch.arange(6.0).view(3, 2))}


def test_comparison_covers_every_row_and_ignores_vocabulary_padding():
    halves = [{'w': Part(torch.tensor([[0.0, 1], [2, 3]]), 0, 0)}, {'w': Part(torch.tensor([[4.0, 6], [9, 9]]), 0, 2)}]
    worst = compare(halves, WHOLE)
    assert (worst.rank, worst.name) == (1, 'w')
    assert worst.error == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ('parts', 'message'),
    [
        ([{'w': Part(torch.zeros(2, 2), 0, 0)}], r"no rank holds all of: \['w'\]"),
        ([{}], r"no rank holds all of: \['w'\]"),
        ([{'w': WHOLE['w'], 'v': WHOLE['w']}], r"rank 0 has parameters that the reference lacks: \['v'\]"),
        ([{'w': Part(torch.full((3, 2), float('nan')))}], 'rank 0: w is not finite'),
    ],
    ids=['rows', 'parameter', 'unknown', 'nan'],
)
def test_comparison_fails_on_what_is_missing_or_not_finite(parts, message):
    with pytest.raises(AssertionError, match=message):
        compare(parts, WHOLE)
