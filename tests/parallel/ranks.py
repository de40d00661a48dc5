"""Runs one function on several ranks: forked gloo ranks on the CPU, or one spawned NCCL rank a GPU.

    def case(x):                                    # runs on every rank, its process group is up
        ...
    results = run_ranks(case, 4, x, timeout=30)     # one value a rank, in rank order

`TWINKLE_TEST_DEVICE=cuda` selects GPUs. Ranks are forked from the process that runs the tests, which has imported
everything already, so a start takes about 0.15 s; that process must never have started OMP threads (conftest.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from twinkle_megatron.megatron import cpu

DEVICE = os.environ.get('TWINKLE_TEST_DEVICE', 'cpu')
_START = 120.0  # seconds until all ranks must be connected
_GRACE = 1.0  # seconds that the others have to report after a first failure


def device() -> torch.device:
    """Where this rank's tensors belong."""
    return torch.device('cuda', torch.cuda.current_device()) if DEVICE == 'cuda' else torch.device('cpu')


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: its value, or the type name of its error, the message and the traceback.

    `error` is 'Died' for a rank that ended without a word and 'Timeout' for one that was still running; the traceback
    of the latter says where.
    """

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ''
    traceback: str = ''
    at: float = 0.0

    def __str__(self) -> str:
        return f'rank {self.rank}: {self.error}: {self.message}\n{self.traceback}'.rstrip()


class RankFailure(RuntimeError):
    """At least one rank failed; `outcomes` holds those that did, the first cause first."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        super().__init__('\n\n'.join(map(str, outcomes)))


def run_ranks(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 60, collect_errors: bool = False) -> list:
    """Calls `fn(*args)` on `n` ranks of a fresh world and returns their values in rank order.

    On the CPU `fn` may be any callable and Megatron's CPU adapter is installed. On GPUs `fn` and `args` are pickled, so
    `fn` stands at the top of its module or is a `partial` of such a one, and the test is skipped where there are fewer
    GPUs than ranks. Returned tensors come back as copies on the CPU.

    `timeout`, in seconds, counts from when all ranks are connected. With `collect_errors` the list holds one `Outcome`
    a rank, failed or not, and nothing is raised. Otherwise the first failure, death or time-out ends all ranks and
    raises `RankFailure`. No process outlives the call.
    """
    _check_parent(n)
    context = multiprocessing.get_context('spawn' if DEVICE == 'cuda' else 'fork')
    folder = Path(tempfile.mkdtemp(prefix='ranks-'))
    pipes = [context.Pipe(duplex=False) for _ in range(n)]
    started = context.Event()
    all_started = context.Barrier(n, action=started.set)
    ranks = []
    gc.freeze()  # a collection in a rank would copy every page that it looks at
    try:
        for rank, (_, writer) in enumerate(pipes):
            inherited = [end for pipe in pipes for end in pipe if end is not writer] if DEVICE == 'cpu' else []
            work = (rank, n, folder, writer, inherited, all_started, os.getpid(), timeout, fn, args)
            process = context.Process(target=_rank_main, args=work)  # no daemon: checkpoints start processes
            process.start()
            ranks.append(process)
            writer.close()
        readers = [reader for reader, _ in pipes]
        outcomes = _collect(readers, ranks, started, folder, timeout, collect_errors)
    finally:
        _end(ranks)
        gc.unfreeze()
        for reader, _ in pipes:
            reader.close()
        shutil.rmtree(folder, ignore_errors=True)
    if collect_errors:
        return outcomes
    failed = sorted((o for o in outcomes if o.error), key=lambda o: (o.error != 'Died', o.at))
    if failed:
        raise RankFailure(failed)
    return [outcome.value for outcome in outcomes]


def _check_parent(n: int) -> None:
    if DEVICE == 'cuda':
        if torch.cuda.device_count() < n:
            pytest.skip(f'needs {n} GPUs, {torch.cuda.device_count()} found')
        return
    if torch.get_num_threads() != 1:
        raise RuntimeError(
            f'torch must use 1 thread before ranks are forked, got {torch.get_num_threads()}: OMP threads do not '
            'survive a fork; set OMP_NUM_THREADS=1 and call torch.set_num_threads(1) first, as tests/conftest.py does'
        )
    if dist.is_initialized():
        raise RuntimeError('ranks cannot be forked from a process with a process group; destroy it first')


def _collect(
    readers: list, ranks: list, started: Any, folder: Path, timeout: float, collect_errors: bool
) -> list[Outcome]:
    """One outcome a rank; without `collect_errors`, those still running a moment after a failure are left out."""
    outcomes: dict[int, Outcome] = {}
    end, begun = time.monotonic() + _START, False
    grace_end = float('inf')
    while len(outcomes) < len(ranks) and (left := min(end, grace_end) - time.monotonic()) > 0:
        missing = [rank for rank in range(len(ranks)) if rank not in outcomes]
        anything = [readers[r] for r in missing] + [ranks[r].sentinel for r in missing]
        ready = connection.wait(anything, left if begun else min(left, 0.05))
        if not begun and started.is_set():
            end, begun = time.monotonic() + timeout, True
        for rank in missing:
            if readers[rank] in ready or ranks[rank].sentinel in ready:
                outcomes[rank] = _receive(rank, readers[rank], ranks[rank])
                if outcomes[rank].error and not collect_errors:
                    grace_end = min(grace_end, time.monotonic() + _GRACE)
    if time.monotonic() >= end:
        message = f'still running after {timeout} s' if begun else f'not all ranks started within {_START} s'
        outcomes.update(_hanging([rank for rank in range(len(ranks)) if rank not in outcomes], ranks, folder, message))
    return [outcomes[rank] for rank in sorted(outcomes)]


def _receive(rank: int, reader: connection.Connection, process: Any) -> Outcome:
    """What the rank has sent, or that it died without sending."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        if reader.poll():
            return torch.load(io.BytesIO(reader.recv_bytes()), map_location='cpu', weights_only=False)
    process.join()
    code = process.exitcode
    how = f'killed by {signal.Signals(-code).name}' if code < 0 else f'exited with status {code}'
    return Outcome(rank, error='Died', message=f'{how} before it returned a value')


def _hanging(hanging: list[int], ranks: list, folder: Path, message: str) -> dict[int, Outcome]:
    """Asks the ranks that are still running where they are."""
    for rank in hanging:
        os.kill(ranks[rank].pid, signal.SIGUSR1)
    time.sleep(0.3 if hanging else 0)
    outcomes = {}
    for rank in hanging:
        stack = folder / f'{rank}.stack'
        where = stack.read_text() if stack.exists() else ''
        outcomes[rank] = Outcome(rank, None, 'Timeout', message, where, time.monotonic())
    return outcomes


def _end(ranks: list) -> None:
    """Kills what is left of every rank and of its children, and waits for it."""
    for process in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in ranks:
        process.join()
        process.close()


def _rank_main(
    rank: int,
    n: int,
    folder: Path,
    writer: connection.Connection,
    inherited: list,
    all_started: Any,
    parent: int,
    timeout: float,
    fn: Callable[..., Any],
    args: tuple,
) -> None:
    """The life of one rank. No exit handler of the parent and no destructor of gloo runs.

    Nobody calls `fn` before all ranks are connected, and one that has returned keeps its connections until the parent
    ends it: neither its start nor its end disturbs the others. One that raises ends, so that they notice.
    """
    os.setpgid(0, 0)
    _die_with(parent)
    for end in inherited:
        end.close()
    with open(folder / f'{rank}.stack', 'w') as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            _start(rank, n, folder, timeout)
            all_started.wait(_START)
            writer.send_bytes(_packed(Outcome(rank, _detached(fn(*args)))))
            sys.stdout.flush()
            while True:
                signal.pause()
        except BaseException as error:
            outcome = Outcome(rank, None, type(error).__name__, str(error), traceback.format_exc(), time.monotonic())
            writer.send_bytes(_packed(outcome))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _start(rank: int, n: int, folder: Path, timeout: float) -> None:
    """Threads, device, process group."""
    warnings.filterwarnings('ignore', category=FutureWarning, module='torch')  # names of collectives that Megatron uses
    torch.set_num_threads(1)
    backend = 'gloo'
    if DEVICE == 'cuda':
        torch.cuda.set_device(rank)
        backend = 'cpu:gloo,cuda:nccl'
    else:
        os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
        cpu.install()
    where = f'file://{folder}/rendezvous'
    dist.init_process_group(
        backend, init_method=where, rank=rank, world_size=n, timeout=timedelta(seconds=timeout + 10)
    )


def _packed(outcome: Outcome) -> bytes:
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    return buffer.getvalue()


def _detached(value: Any) -> Any:
    """`value` with its tensors cut off from their history."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_detached, value))
    return value


def _die_with(parent: int) -> None:
    """Linux ends this process as soon as `parent` is gone, however it went."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
