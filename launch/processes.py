"""torchrun, with one line instead of its own traceback where the run is interrupted or one of its processes fails.

SIGTERM and SIGUSR1 go to the processes of this machine, which finish their step, save and end with exit code 85; so
does this one then. torchrun by itself would end them after half a minute.

usage: python -m launch.processes [torchrun's options] -m launch.train [OPTION ...]
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as torchrun

from twinkle_megatron.survive import AGAIN

FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
_HANDLES = '--signals-to-handle'


def main() -> None:
    if _HANDLES in get_args_parser().format_help():
        sys.argv[1:1] = [f'{_HANDLES}=SIGINT,SIGHUP,SIGQUIT']  # the others are handled here
    for number in FORWARDED:
        signal.signal(number, _forward)
    try:
        _run()
    finally:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)  # one more while Python closes down would be the end, not the code


def _run() -> None:
    try:
        torchrun()
    except SignalException as e:
        sys.exit(128 + e.sigval)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        if failure.exitcode == AGAIN:
            sys.exit(AGAIN)
        print(
            f'the run failed: rank {rank} ended first, {_how(failure.exitcode)}; its message is above', file=sys.stderr
        )
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


def _forward(number: int, frame: FrameType | None) -> None:
    children = psutil.Process().children()
    if not children:  # nobody is there yet to be told
        later = threading.Timer(1.0, os.kill, (os.getpid(), number))
        later.daemon = True
        later.start()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def _how(exitcode: int) -> str:
    return f'with exit code {exitcode}' if exitcode >= 0 else f'killed by signal {-exitcode}'


if __name__ == '__main__':
    main()
