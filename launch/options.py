"""The options of the training example, checked before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

DEFAULT_NAME = 'python-reference'


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options in `argv` (None: the command line). A wrong one ends the program with a message and exit code 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _check(args)
    except ValueError as e:
        parser.error(str(e))
    stem = args.data.stem if args.data else DEFAULT_NAME
    layout = f'tp{args.tp}-pp{args.pp}' + (f'-dp{args.dp}' if args.dp > 1 else '')
    args.run = args.runs / (args.name or f'{stem}-{layout}')
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='launch/local.sh',
        description='Trains a small GPT with Megatron-Core, split over processes on this machine.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    whole, share = _number(int, 1), _number(float, 0.0)

    data = parser.add_argument_group('data')
    data.add_argument('--data', type=Path, help='JSON lines to train on; the default is Python\'s language reference')
    data.add_argument('--vocab-size', type=_number(int, 300), default=8000, help='entries of the BPE vocabulary, at most')
    data.add_argument('--seq-length', type=_number(int, 8), default=128, help='tokens of a sample, at most')

    layout = parser.add_argument_group('layout: tp * pp * dp processes')
    layout.add_argument('--tp', type=whole, default=1, help='tensor parallel size')
    layout.add_argument('--pp', type=whole, default=1, help='pipeline parallel size')
    layout.add_argument('--dp', type=whole, default=1, help='data parallel size')

    model = parser.add_argument_group('model')
    model.add_argument('--layers', type=whole, default=4)
    model.add_argument('--hidden-size', type=whole, default=128)
    model.add_argument('--heads', type=whole, default=4, help='attention heads')

    training = parser.add_argument_group('training')
    training.add_argument('--steps', type=whole, default=200, help='optimizer steps')
    training.add_argument('--micro-batch-size', type=whole, default=4, help='samples of a micro-batch')
    training.add_argument('--micro-batches', type=whole, default=4, help='micro-batches of a step, over all of dp')
    training.add_argument('--lr', type=_number(float, 0.0, above=True), default=3e-3, help='highest learning rate')
    training.add_argument('--warmup', type=share, default=0.1, help='share of the steps over which it rises')
    training.add_argument('--weight-decay', type=share, default=0.1)
    training.add_argument('--clip-grad', type=_number(float, 0.0, above=True), default=1.0, help='highest gradient norm')
    training.add_argument('--seed', type=_number(int, 0), default=1234)

    output = parser.add_argument_group('output')
    output.add_argument('--log-every', type=whole, default=10, help='steps between two lines of figures')
    output.add_argument('--eval-every', type=whole, default=50, help='steps between two held-out losses')
    output.add_argument('--runs', type=Path, default=Path('runs'), help='folder of all runs')
    output.add_argument('--name', help='folder of this run in there; made from the data and the layout if not given')
    return parser


def _number(kind: type[int] | type[float], least: float, above: bool = False) -> Callable[[str], int | float]:
    """A type for argparse: a finite number of at least (or above) `least`."""
    what = 'a whole number' if kind is int else 'a number'

    def parse_number(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not (value > least if above else value >= least) or value == float('inf'):
            raise argparse.ArgumentTypeError(f'must be {what} {"above" if above else "of at least"} {least:g}, got {text!r}')
        return value

    return parse_number


def _check(args: argparse.Namespace) -> None:
    for name, value, part, size in (
        ('--heads', args.heads, '--tp', args.tp),
        ('--hidden-size', args.hidden_size, '--heads', args.heads),
        ('--layers', args.layers, '--pp', args.pp),
        ('--micro-batches', args.micro_batches, '--dp', args.dp),
    ):
        if value % size:
            near = sorted({d for d in range(1, value + 1) if value % d == 0}, key=lambda d: (abs(d - size), d))[:2]
            raise ValueError(
                f'{name} {value} must be a multiple of {part} {size}; try {part} {" or ".join(map(str, sorted(near)))}'
            )
    if args.hidden_size // args.heads % 2:
        raise ValueError(f'--hidden-size {args.hidden_size} / --heads {args.heads} must be even, for rotary embeddings')
    if args.warmup >= 1:
        raise ValueError(f'--warmup must be a share of the steps below 1, got {args.warmup:g}')
    if args.name is not None and Path(args.name).name != args.name:
        raise ValueError(f'--name must be the name of one folder, got {args.name!r}')
