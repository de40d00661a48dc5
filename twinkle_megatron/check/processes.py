"""The ranks of one run as processes of this machine, with an end to all of them when one fails or time is up."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


class Failed(Exception):
    """A rank ended with an error; the message is that of the first rank that did."""


def run_processes(what: str, options: Any, folder: Path) -> None:
    """Runs `what` ('layout', 'reference' or 'locate') on the ranks that it needs. `Failed` if one of them does, or
    after `options.timeout` seconds; nothing is left running."""
    world = 1 if what == 'reference' else options.world
    if options.device == 'cpu':
        importlib.import_module(f'{__package__}.worker')  # with Megatron: once, for all forked ranks
    context: Any = mp.get_context('fork' if options.device == 'cpu' else 'spawn')
    port = _free_port()
    common = what, options, folder, world, port, os.getpid()
    ranks = [context.Process(target=_rank, args=(rank, *common)) for rank in range(world)]
    signal.signal(signal.SIGTERM, _exit)  # the ranks end with this process
    for process in ranks:
        process.start()
    ends = time.monotonic() + options.timeout
    try:
        while any(process.is_alive() for process in ranks):
            if any(process.exitcode for process in ranks):
                time.sleep(1)  # others may be about to say what was wrong first
                break
            if time.monotonic() > ends:
                raise Failed(f'the run of the {what} took longer than {options.timeout:g} s (--timeout)')
            time.sleep(0.05)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and what Megatron has started to write files
            process.kill()
            process.join()
    errors = sorted(folder.glob('error-*.txt'), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        raise Failed(errors[0].read_text())
    broken = [(rank, process.exitcode) for rank, process in enumerate(ranks) if process.exitcode]
    if broken:
        raise Failed(f'rank {broken[0][0]} of the {what} ended with exit code {broken[0][1]} and without a message')


def _rank(rank: int, what: str, options: Any, folder: Path, world: int, port: int, parent: int) -> None:
    os.setpgid(0, 0)
    _end_with(parent)
    os.environ |= {
        'RANK': str(rank),
        'LOCAL_RANK': str(rank),
        'WORLD_SIZE': str(world),
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(port),
    }
    try:
        import torch.distributed as dist

        from ..megatron import cpu
        from . import worker

        if options.device == 'cpu':
            torch.set_num_threads(1)
            cpu.install()
        else:
            torch.cuda.set_device(rank)
        backend = 'gloo' if options.device == 'cpu' else 'nccl'
        dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout))
        getattr(worker, what)(options, folder)
        dist.destroy_process_group()
    except BaseException as error:
        text = str(error)
        if not _is_told_by_us(error):  # others need their place
            text = ''.join(traceback.format_exception(error)).rstrip()
        (folder / f'error-{rank}.txt').write_text(f'{text}' if world == 1 else f'on rank {rank}: {text}')
        sys.stdout.flush()
        os._exit(1)


def _is_told_by_us(error: BaseException) -> bool:
    """Whether it is a message of this package for whoever reads, raised here and not in the setup file."""
    raised = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and Path(raised[-1].filename).is_relative_to(Path(__file__).parents[1])


def _exit(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def _end_with(parent: int) -> None:
    """Linux ends this process when the one that started it has gone, however that ended."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(('127.0.0.1', 0))
        return int(listening.getsockname()[1])
