"""Runs a Megatron-LM training script, unchanged, with one of this package's losses and its metrics.

    torchrun --nproc-per-node 8 -m twinkle_megatron.run --loss chunked_cross_entropy --metrics accuracy \\
        -- pretrain_gpt.py --tensor-model-parallel-size 2 ...

See `attach` for what the loss may be, and docs/megatron-lm.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .attach_options import Wanted, add_options, wanted
from .command_line import Parser
from .reporter import Reporter, patched

PROGRAM = 'python -m twinkle_megatron.run'


@dataclass(frozen=True)
class Options:
    """A command line, checked."""

    script: str
    arguments: tuple[str, ...]
    wanted: Wanted


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script of a command line as `__main__`. Returns 2, with one message, for a wrong call."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        if os.environ.get('RANK', '0') == '0':
            print(f'{PROGRAM}: error: {error}', file=sys.stderr)
        return 2
    with _started_by_itself(options):
        reporter = Reporter(lambda: options.wanted)
        with patched(reporter):
            try:
                runpy.run_path(options.script, run_name='__main__')
            except SystemExit as end:
                if end.code in (None, 0):
                    reporter.finish()
                raise
            reporter.finish()
    return 0


def parse(argv: Sequence[str]) -> Options:
    """ValueError for a wrong call; prints the help and exits where it is asked for."""
    parser = _parser()
    at = list(argv).index('--') if '--' in argv else len(argv)
    own, unknown = parser.parse_known_args(list(argv[:at]))
    if unknown and '--' in argv:
        raise ValueError(f'unrecognized arguments: {" ".join(unknown)}')
    if not argv[at + 1 :]:
        raise ValueError('the script and its own arguments have to follow after --, as in: ... -- pretrain_gpt.py ...')
    script, *arguments = argv[at + 1 :]
    if not os.path.isfile(script):
        raise ValueError(f'there is no script {script!r} in {os.getcwd()}')
    asked = wanted(own, '--')
    assert asked is not None
    return Options(script, tuple(arguments), asked)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        usage='torchrun ... -m twinkle_megatron.run [options] -- pretrain_gpt.py [its own arguments]',
        description='Runs a Megatron-LM training script, unchanged, with another loss and with metrics. The script '
        'computes its mean, its counts and its "lm loss" from the loss of each token as ever.',
        epilog='Example: torchrun --nproc-per-node 8 -m twinkle_megatron.run --loss chunked_cross_entropy '
        '--loss-arg label_smoothing=0.1 --metrics accuracy,loss -- pretrain_gpt.py --num-layers 24 ...',
        allow_abbrev=False,
    )
    add_options(parser, '--', 'cross_entropy')
    return parser


@contextlib.contextmanager
def _started_by_itself(options: Options) -> Iterator[None]:
    """`sys.argv` and `sys.path` as the script finds them when Python starts it: first of all its own folder, from which
    Megatron-LM's scripts take megatron.core."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [options.script, *options.arguments]
    if not getattr(sys.flags, 'safe_path', False):
        sys.path[0] = os.path.dirname(os.path.realpath(options.script))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


if __name__ == '__main__':
    sys.exit(main())
