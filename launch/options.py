"""The options of the training example, checked before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    layout += '' if args.head == 'auto' else f'-{args.head}'
    args.run = args.runs / (args.name or f'{stem}-{layout}')
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='launch/local.sh',
        usage='%(prog)s [OPTION ...]',
        description='Trains a small GPT with Megatron-Core, split over tp * pp * dp processes on this machine.',
        allow_abbrev=False,
    )
    size, share, positive = _number(int, 1), _number(float, 0), _number(float, 0, above=True)
    groups: dict[str, Any] = {
        'data': [
            ('data', Path, None, "JSON lines to train on; default: Python's language reference"),
            ('vocab-size', _number(int, 300), 8000, 'entries of the BPE vocabulary, at most'),
            ('seq-length', _number(int, 8), 128, 'tokens of a sample, at most; longer documents are cut'),
        ],
        'layout': [
            ('tp', size, 1, 'tensor parallel size'),
            ('pp', size, 1, 'pipeline parallel size'),
            ('dp', size, 1, 'data parallel size'),
        ],
        'model': [
            ('layers', size, 4, 'transformer layers'),
            ('hidden-size', size, 128, 'width of the model'),
            ('heads', size, 4, 'attention heads'),
            ('head', _one_of('auto', 'logits', 'linear'), 'auto', "whether logits are built: 'linear' never does"),
        ],
        'training': [
            ('steps', size, 250, 'optimizer steps'),
            ('micro-batch-size', size, 4, 'samples of a micro-batch'),
            ('micro-batches', size, 2, 'micro-batches of a step, over all of dp'),
            ('lr', positive, 2e-3, 'highest learning rate, which then falls along a cosine to a tenth'),
            ('warmup', share, 0.1, 'share of the steps over which the learning rate rises'),
            ('weight-decay', share, 0.1, "Adam's decoupled weight decay"),
            ('clip-grad', positive, 1.0, 'highest gradient norm'),
            ('seed', _number(int, 0), 1234, 'of the weights and of the order of the samples'),
        ],
        'output': [
            ('log-every', size, 10, 'steps between two lines of figures'),
            ('eval-every', size, 50, 'steps between two held-out losses'),
            ('runs', Path, Path('runs'), 'folder of all runs'),
            ('name', str, None, 'folder of this run in there; default: made from the data and the layout'),
        ],
    }
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for name, kind, default, what in options:
            about = what if default is None else f'{what} ({default})'
            metavar = {Path: 'PATH', str: 'NAME'}.get(kind, 'NAME' if isinstance(default, str) else 'N')
            group.add_argument(f'--{name}', type=kind, default=default, metavar=metavar, help=about)
    parser.add_argument('--dataset', type=Path, help=argparse.SUPPRESS)  # launch/local.sh says where the samples lie
    return parser


def _one_of(*names: str) -> Callable[[str], str]:
    """A type for argparse: one of `names`."""

    def parse_name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f'must be {", ".join(names[:-1])} or {names[-1]}, got {text!r}')
        return text

    return parse_name


def _number(kind: type[int] | type[float], least: float, above: bool = False) -> Callable[[str], int | float]:
    """A type for argparse: a finite number of at least (or above) `least`."""
    what = 'a whole number' if kind is int else 'a number'

    def parse_number(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not (value > least if above else value >= least) or value == float('inf'):
            raise argparse.ArgumentTypeError(
                f'must be {what} {"above" if above else "of at least"} {least:g}, got {text!r}'
            )
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
