"""A file for each rank, with what its libraries log, warn of and fail with."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from twinkle_megatron.survive import AGAIN

FORM = '%(asctime)s %(levelname)s %(name)s: %(message)s'


def start(folder: Path, rank: int, world: int) -> Path:
    """From now on everything logged, warned of or raised unhandled in this process goes to `folder/rank-N.log`, too,
    behind what earlier parts of the run have left there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f'rank-{rank:0{len(str(world - 1))}}.log'
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(FORM))
    handler.setLevel(logging.INFO)
    logging.getLogger().addHandler(handler)
    logger = logging.getLogger('launch')
    logger.setLevel(logging.INFO)
    logger.propagate = False  # what this package says is on the console already
    logger.addHandler(handler)
    logger.info('rank %d of %d: %s', rank, world, ' '.join(sys.argv))
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logger.error('ended by an error', exc_info=(kind, error, trace))
        shown(kind, error, trace)

    sys.excepthook = hook
    return path


@contextmanager
def end_told(run: Path) -> Iterator[None]:
    """How the run has ended, in one line: in the log of each rank, and by the first rank in `run/ends.log`."""
    began, how = time.monotonic(), 'ended'
    try:
        yield
        how = 'finished'
    except SystemExit as end:
        how = 'stopped, to go on with --resume auto' if end.code == AGAIN else f'ended: {end.code}'
        raise
    except BaseException as error:
        how = f'failed: {type(error).__name__}: {error}'.splitlines()[0]
        raise
    finally:
        line = f'{how}, {time.monotonic() - began:.0f} s after the start'
        note(line)
        if int(os.environ.get('RANK', '0')) == 0:
            # a full disk must not change how the run ends
            with contextlib.suppress(OSError), (run / 'ends.log').open('a') as file:
                file.write(f'{time.strftime("%Y-%m-%d %H:%M:%S")} {line}\n')


def note(message: str) -> None:
    """A line in the file of this rank."""
    logging.getLogger('launch').info(message)
