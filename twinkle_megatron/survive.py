"""To end a training in good order when it is told to, and to say where it hangs.

    stop = StopSignals()                          # early: SIGTERM and SIGUSR1 are only noted from here on
    with Watchdog(seconds=600, groups=model.groups) as watchdog:
        for step in range(start, steps):
            watchdog.beat(f'step {step}')
            model.forward_backward(inputs=...)
            model.clip_grad_and_step()
            if stop.agreed():                     # the same on every rank
                model.save(folder, state=..., keep=2)
                leave(AGAIN)

`launch/train.py` does this; see docs/slurm.md.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from . import leaving
from .arguments import above_0
from .groups import Groups, group_device

AGAIN = 85
"""Exit code of a process that has saved and wants to be started again."""
HUNG = 86
"""Exit code of a process that waited too long."""


def leave(code: int = 0) -> NoReturn:
    """Ends this process with that exit code, at once: what was registered for its exit runs, logs and output are
    written, but Python is not taken apart.

    While it is, a thread of gloo that is still there can abort the process, which then ends by SIGABRT (134) although
    all was done. It is seldom, but a job that meant to come back would not.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    leaving.leave(code)


class StopSignals:
    """Notes signals that ask for an end, on whatever rank they arrive.

    Args:
        signals: what to note; their handlers are replaced until `close`. Only the main thread may make one of these.
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self._noted: list[int] = []
        self._before = {number: signal.signal(number, self._note) for number in signals}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)

    @property
    def noted(self) -> signal.Signals | None:
        """The first that has come to this process."""
        return signal.Signals(self._noted[0]) if self._noted else None

    def agreed(self) -> bool:
        """Whether any rank has been told to end, the same on every rank. One all-reduce of one number over the world.

        A signal that comes while the ranks ask counts the next time, on all of them.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return bool(self._noted)
        told = torch.tensor([float(bool(self._noted))], device=group_device(dist.group.WORLD))
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told.item())

    def ignore(self) -> None:
        """From now on these signals do nothing. Called before the process ends: while Python closes down it puts the
        default handlers back, and a signal that comes once more would end it with another exit code."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Puts the earlier handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


class Watchdog:
    """Ends this process when nothing has happened for too long, and says what it was waiting for.

    A collective that another rank never enters waits without a word: gloo for half an hour, NCCL until its own watchdog
    ends the process. This one writes to stderr which rank, at which `beat`, in which group, and the stack of the main
    thread, and ends the process with exit code 86, so that whoever started the ranks ends the others too.

    Args:
        seconds: longest time between two beats: of a step, an evaluation, or a save.
        groups: by which the group is named.
    """

    def __init__(self, seconds: float, groups: Groups | None = None) -> None:
        self._seconds, self._groups = above_0('seconds', seconds), groups
        self._beat, self._what = time.monotonic(), 'start'
        self._over = threading.Event()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._watch, name='twinkle-watchdog', daemon=True)

    def __enter__(self) -> Watchdog:
        self.beat(self._what)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()

    def beat(self, what: str) -> None:
        """Says that this process goes on, with `what`."""
        self._beat, self._what = time.monotonic(), what

    def _watch(self) -> None:
        every, beat, waited, last = min(self._seconds / 10, 1.0), self._beat, 0.0, time.monotonic()
        while not self._over.wait(every):
            now = time.monotonic()
            # A process that was suspended, as by scontrol suspend, has not waited meanwhile.
            waited = min(now - last, 2 * every) + (waited if beat == self._beat else 0.0)
            beat, last = self._beat, now
            if waited > self._seconds:
                print(self.report(), file=sys.stderr, flush=True)
                os._exit(HUNG)

    def report(self) -> str:
        """What this process is doing, for whoever looks for the rank that is missing."""
        frame = sys._current_frames().get(self._main or 0)
        stack = [] if frame is None else traceback.format_stack(frame)
        rank = dist.get_rank() if dist.is_initialized() else 0
        waits = _waits_for(frame, self._groups)
        return (
            f'rank {rank} has not gone on for {self._seconds:g} s in {self._what}: it waits {waits}. Look for a rank '
            'that says something else, or nothing.\n' + ''.join(stack)
        )


def _waits_for(frame: FrameType | None, groups: Groups | None) -> str:
    """In which collective of which group the innermost frame is that has a group."""
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, dist.ProcessGroup):
                ranks = dist.get_process_group_ranks(value)
                return f'in {frame.f_code.co_name} of the group {_name_of(value, groups)}, ranks {ranks}'
        if frame.f_globals.get('__name__') == 'torch.distributed.distributed_c10d' and 'group' in frame.f_locals:
            return f'in {frame.f_code.co_name} of all ranks'
        frame = frame.f_back
    return 'for no collective'


def _name_of(group: dist.ProcessGroup, groups: Groups | None) -> str:
    names = ('tp', 'cp', 'pp', 'dp', 'dp_cp')
    return next((name for name in names if groups is not None and getattr(groups, name) is group), group.group_name)
