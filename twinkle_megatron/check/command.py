"""The command line: starts the processes of the layout, then one process, and compares what they have found."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..arguments import above_0, at_least_1
from ..command_line import SIZES, Parser, add_sizes
from .compare import compared
from .processes import Failed, run_processes

PROGRAM = 'python -m twinkle_megatron.check'


@dataclass(frozen=True)
class Options:
    """A command line, checked. `sizes` are those that `build` gets."""

    setup: Path
    sizes: dict[str, int]
    dp: int
    device: str
    tolerance: float | None
    timeout: float
    top: int

    @property
    def world(self) -> int:
        return self.sizes['tp'] * self.sizes['pp'] * self.sizes['cp'] * self.dp

    def __str__(self) -> str:
        return ' x '.join(f'{name.upper()} {size}' for name, size in {**self.sizes, 'dp': self.dp}.items() if size > 1)


def main(argv: Sequence[str] | None = None) -> int:
    """0: the same numbers; 1: a difference, or with `--locate` something that is not finite; 2: a wrong call, or a run
    that failed. One message says what."""
    try:
        options, locates = parse(sys.argv[1:] if argv is None else argv)
        with tempfile.TemporaryDirectory(prefix='twinkle-check-') as folder:
            if locates:
                run_processes('locate', options, Path(folder))
                located = torch.load(Path(folder) / 'located.pt', weights_only=False)
                print(located, flush=True)
                return 0 if located.finite else 1
            run_processes('layout', options, Path(folder))
            run_processes('reference', options, Path(folder))
            report = compared(Path(folder), options.tolerance)
    except (ValueError, Failed) as error:
        print(f'{PROGRAM}: error: {error}', file=sys.stderr, flush=True)
        return 2
    print(f'{options.setup.name}: {str(options) or "one process"} beside one process')
    print(report, flush=True)
    return 0 if report.same else 1


def parse(argv: Sequence[str]) -> tuple[Options, bool]:
    """ValueError for a wrong call; prints the help and exits where it is asked for."""
    own = _parser().parse_args(list(argv))
    for name in (*SIZES, 'dp', 'top'):
        at_least_1(f'--{name}', getattr(own, name))
    above_0('--timeout', own.timeout)
    if own.tolerance is not None:
        above_0('--tolerance', own.tolerance)
    setup = Path(own.setup)
    if not setup.is_file():
        raise ValueError(f'there is no file {own.setup!r} in {Path.cwd()}; it has to define build(...) and batch(...)')
    sizes = {name: getattr(own, name) for name in SIZES}
    if own.vpp > 1 and own.pp == 1:
        raise ValueError(f'--vpp {own.vpp} needs a pipeline: add --pp 2 or more, or leave --vpp out')
    among = own.cp * own.dp
    if among % own.ep:
        few = own.ep // math.gcd(own.ep, own.cp)
        raise ValueError(f'--ep {own.ep} must divide cp x dp = {among}: take --dp {few} or a multiple, or another --ep')
    options = Options(setup, sizes, own.dp, own.device, own.tolerance, own.timeout, own.top)
    gpus = torch.cuda.device_count()
    if own.device == 'cuda' and options.world > gpus:
        raise ValueError(f'the layout has {options.world} ranks, but there are {gpus} GPUs; --device cpu needs none')
    return options, own.locate


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description='Runs forward and backward of your model on your batch in a layout and in one process, with the '
        'same weights, and reports the first tensor that differs. All processes run on this machine.',
        epilog='SETUP.py defines build(tp, pp, cp, vpp, ep), which returns a MegatronModel with its loss, and '
        'batch(dp_rank, dp_size), which returns the inputs of a replica, or (inputs, keywords), as for '
        'forward_backward. docs/check.md has an example. Exit code 0: the same numbers; 1: a difference, or with '
        '--locate something that is not finite; 2: a wrong call, or a run that failed.',
        allow_abbrev=False,
    )
    parser.add_argument('setup', metavar='SETUP.py')
    add_sizes(parser)
    parser.add_argument('--dp', type=int, default=1, metavar='N', help='data parallel replicas (1)')
    parser.add_argument(
        '--tolerance',
        type=float,
        metavar='X',
        help='largest difference, relative to the largest value of a tensor (1e-9 in float64, 1e-4 in float32, 0.05 in '
        'half precision)',
    )
    parser.add_argument(
        '--locate',
        action='store_true',
        help='run the layout only, and say where a loss that is not finite or large comes from',
    )
    parser.add_argument('--top', type=int, default=5, metavar='N', help='tokens that --locate shows (5)')
    cuda = torch.cuda.is_available()
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cuda' if cuda else 'cpu', help='(%(default)s)')
    parser.add_argument('--timeout', type=float, default=600, metavar='SECONDS', help='of each run (600)')
    return parser
