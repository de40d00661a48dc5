"""torchrun, with one line instead of its own traceback where the run is interrupted or one of its processes fails.

usage: python -m launch.processes [torchrun's options] -m launch.train [OPTION ...]
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> None:
    try:
        torchrun()
    except SignalException as e:
        sys.exit(128 + e.sigval)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        print(
            f'the run failed: rank {rank} ended first, {_how(failure.exitcode)}; its message is above', file=sys.stderr
        )
        sys.exit(1)


def _how(exitcode: int) -> str:
    return f'with exit code {exitcode}' if exitcode >= 0 else f'killed by signal {-exitcode}'


if __name__ == '__main__':
    main()
