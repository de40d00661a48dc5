"""The command line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..arguments import above_0, at_least_1
from ..command_line import Parser, add_sizes
from .join import Place, Unreached, meet, place_of
from .layout import Layout
from .meeting import Stop

PROGRAM = 'python -m twinkle_megatron.doctor'
LONGEST = 24 * 3600


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """0: no line fails; 1: one does, and says how to mend it; 2: a wrong call. The same on every rank."""
    rank = environ.get('RANK', environ.get('SLURM_PROCID', '0'))
    speaks = rank == '0' or not rank.isdecimal()
    try:
        layout, place, options = parse(sys.argv[1:] if argv is None else argv, environ, speaks)
    except ValueError as error:
        if speaks:
            print(f'{PROGRAM}: error: {error}', file=sys.stderr, flush=True)
        return 2
    from .examine import examined  # torch, which takes a second

    try:
        meeting = meet(place, options.timeout)
    except Unreached as error:
        report = error.report(place)
        report.show(options.json)
        if place.rank:  # rank 0 may never hear of this one
            print(f'{PROGRAM}: rank {place.rank}: {error}', file=sys.stderr, flush=True)
        return report.exit_code
    report = examined(layout, place, meeting, options.path)
    report.show(options.json)
    meeting.part(keeps_store=place.rank == 0 and not place.agent)
    return report.exit_code


def listen() -> None:
    """Of a process that runs nothing but this: what signals do to it, and what torch says by itself."""
    os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR')  # a store that is gone would be told of in stacks of C++
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once, even within a call of C++
    signal.signal(signal.SIGTERM, lambda *_: Stop.tell())


def parse(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ, speaks: bool = True
) -> tuple[Layout, Place, argparse.Namespace]:
    """ValueError for a wrong call; prints the help, on one rank, and exits where it is asked for."""
    parser = _parser()
    if not speaks:
        parser.print_help = lambda file=None: None
    options = parser.parse_args(list(argv))
    sizes: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(Layout)}
    for name, value in sizes.items():
        if value is not None:
            at_least_1('--' + name.replace('_', '-'), value)
    above_0('--timeout', options.timeout)
    if options.timeout > LONGEST:
        raise ValueError(f'--timeout must be at most {LONGEST} s, got {options.timeout:g}')
    for path in options.path:
        if not path or '\0' in path:
            raise ValueError(f'--path must be a folder, got {path!r}')
    return Layout(**sizes), place_of(environ), options


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description='Looks, before anything is trained, at the layout, versions, packages, network and machines of a '
        'run, and says how to mend what is wrong. Start it as the training is started, by torchrun or srun; started '
        'alone, it looks at what one process can see.',
        epilog='Exit code 0: no line fails; 1: one does; 2: a wrong call. docs/doctor.md explains every line.',
        allow_abbrev=False,
    )
    add_sizes(parser)
    for name, what in (
        ('layers', 'layers of the model'),
        ('heads', 'attention heads'),
        ('kv-heads', 'heads of keys and values'),
        ('vocab-size', 'ids of the vocabulary'),
        ('hidden-size', 'width of the model'),
        ('seq-length', 'tokens of a row'),
    ):
        parser.add_argument(f'--{name}', type=int, metavar='N', help=f'{what}; left out, it is not looked at')
    parser.add_argument(
        '--path', action='append', default=[], metavar='DIR', help='a folder that will be written to; may be repeated'
    )
    parser.add_argument('--json', action='store_true', help='one JSON object in place of the table')
    parser.add_argument('--timeout', type=float, default=60, metavar='S', help='longest wait for a rank (60 s)')
    return parser
