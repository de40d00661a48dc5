"""The options of the training example, checked before anything is started."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch import weights

DEFAULT_NAME = 'python-reference'
CROSS_ENTROPY = 'cross-entropy'
POLICY_LOSSES = ('grpo', 'gspo', 'sapo', 'cispo', 'bnpo', 'dr-grpo')
SIZES = {'layers': 4, 'hidden_size': 128, 'heads': 4}
TEXT_ONLY = {'vocab_size': 8000, 'eval_every': 50}
POLICY_ONLY = {
    'clip_range': 0.2,
    'clip_range_high': None,
    'beta': 0.0,
    'entropy_coef': 0.0,
    'advantages': 'group',
    'packed': False,
}
STEPS, POLICY_EPOCHS = 250, 2
RATE, POLICY_RATE = 2e-3, 5e-4
Option = tuple[str, Any, Any, str]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options in `argv` (None: the command line). A wrong one ends the program with a message and exit code 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _complete(args)
        _check(args)
    except ValueError as e:
        parser.error(str(e))
    stem = args.data.stem if args.data else DEFAULT_NAME
    layout = f'tp{args.tp}-pp{args.pp}' + (f'-dp{args.dp}' if args.dp > 1 else '')
    layout += '' if args.head == 'auto' else f'-{args.head}'
    layout = f'{args.loss}-{layout}' if is_policy(args) else layout
    args.run = args.runs / (args.name or f'{stem}-{layout}')
    return args


def is_policy(args: argparse.Namespace) -> bool:
    """Whether the loss is one of rollouts, and not of text."""
    return args.loss != CROSS_ENTROPY


def steps_of(args: argparse.Namespace, samples: int) -> int:
    """Optimizer steps over that many samples."""
    if args.steps is not None:
        return args.steps
    return math.ceil(args.epochs * samples / (args.micro_batches * args.micro_batch_size))


def _options() -> dict[str, list[Option]]:
    size, share, positive = _number(int, 1), _number(float, 0), _number(float, 0, above=True)
    not_negative = _number(float, 0)
    return {
        'data': [
            ('data', Path, None, "JSON lines to train on: text (default: Python's language reference) or rollouts"),
            ('vocab-size', _number(int, 300), TEXT_ONLY['vocab_size'], 'entries of the BPE vocabulary, at most'),
            ('seq-length', _number(int, 8), 128, 'tokens of a sample, at most; longer documents are cut'),
        ],
        'layout': [
            ('tp', size, 1, 'tensor parallel size'),
            ('pp', size, 1, 'pipeline parallel size'),
            ('dp', size, 1, 'data parallel size'),
        ],
        'model': [
            ('init-weights', Path, None, 'weights to start from; they bring the sizes of the model and its tokenizer'),
            ('layers', size, SIZES['layers'], 'transformer layers'),
            ('hidden-size', size, SIZES['hidden_size'], 'width of the model'),
            ('heads', size, SIZES['heads'], 'attention heads'),
            ('head', _one_of('auto', 'logits', 'linear'), 'auto', "whether logits are built: 'linear' never does"),
        ],
        'training': [
            ('loss', _one_of(CROSS_ENTROPY, *POLICY_LOSSES), CROSS_ENTROPY, 'cross-entropy trains on text, the others'
             f' on rollouts: {", ".join(POLICY_LOSSES)}'),
            ('steps', size, f'{STEPS}; of rollouts as --epochs says', 'optimizer steps'),
            ('epochs', size, f'{POLICY_EPOCHS} of rollouts', 'times to go over the data, in place of --steps'),
            ('micro-batch-size', size, 4, 'samples of a micro-batch'),
            ('micro-batches', size, 2, 'micro-batches of a step, over all of dp'),
            ('lr', positive, f'{RATE:g}; of rollouts {POLICY_RATE:g}', 'highest learning rate, which then falls along'
             ' a cosine to a tenth'),
            ('warmup', share, 0.1, 'share of the steps over which the learning rate rises'),
            ('weight-decay', share, 0.1, "Adam's decoupled weight decay"),
            ('clip-grad', positive, 1.0, 'highest gradient norm'),
            ('seed', _number(int, 0), 1234, 'of the weights and of the order of the samples'),
        ],
        'losses of rollouts (docs/rollouts.md tells what the file must hold)': [
            ('clip-range', not_negative, POLICY_ONLY['clip_range'], 'how far from 1 a ratio still counts'),
            ('clip-range-high', not_negative, 'that of --clip-range', 'the same, above 1'),
            ('beta', not_negative, POLICY_ONLY['beta'], 'weight of the KL divergence to the weights of the start'),
            ('entropy-coef', not_negative, POLICY_ONLY['entropy_coef'], 'weight of the entropy'),
            ('advantages', _one_of('group', 'batch', 'none'), POLICY_ONLY['advantages'], 'whose standard deviation'
             ' divides the rewards less the mean of their group: group, batch or none'),
            ('packed', bool, None, 'a micro-batch is one packed row, without padding'),
        ],
        'output': [
            ('log-every', size, 10, 'steps between two lines of figures'),
            ('eval-every', size, TEXT_ONLY['eval_every'], 'steps between two held-out losses'),
            ('save-weights', Path, None, 'file that the weights are written to at the end'),
            ('runs', Path, Path('runs'), 'folder of all runs'),
            ('name', str, None, 'folder of this run in there; default: made from the data and the layout'),
        ],
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='launch/local.sh',
        usage='%(prog)s [OPTION ...]',
        description='Trains a small GPT with Megatron-Core, split over tp * pp * dp processes on this machine.',
        allow_abbrev=False,
    )
    later = {*SIZES, *TEXT_ONLY, *POLICY_ONLY, 'steps', 'epochs', 'lr'}  # what they are depends on others
    for title, options in _options().items():
        group = parser.add_argument_group(title)
        for name, kind, default, what in options:
            if kind is bool:
                group.add_argument(f'--{name}', action='store_true', default=None, help=what)
                continue
            about = what if default is None else f'{what} ({default})'
            metavar = {Path: 'PATH', str: 'NAME'}.get(kind, 'NAME' if getattr(kind, 'names', False) else 'N')
            stands = None if name.replace('-', '_') in later else default
            group.add_argument(f'--{name}', type=kind, default=stands, metavar=metavar, help=about)
    parser.add_argument('--dataset', type=Path, help=argparse.SUPPRESS)  # launch/local.sh says where the samples lie
    return parser


def _one_of(*names: str) -> Callable[[str], str]:
    """A type for argparse: one of `names`."""

    def parse_name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f'must be {", ".join(names[:-1])} or {names[-1]}, got {text!r}')
        return text

    parse_name.names = names  # type: ignore[attr-defined]
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


def _complete(args: argparse.Namespace) -> None:
    """Gives every option that was left out the default that suits the loss and the weights."""
    policy = is_policy(args)
    kind = 'text, with --loss cross-entropy' if policy else f'rollouts, with --loss {", ".join(POLICY_LOSSES)}'
    unused = TEXT_ONLY if policy else POLICY_ONLY
    for name in unused:
        if getattr(args, name) is not None:
            raise ValueError(f'{_flag(name)} is for {kind}, got --loss {args.loss}')
    if policy and args.data is None:
        raise ValueError(
            f'--loss {args.loss} needs --data FILE, the rollouts; docs/rollouts.md tells what it must hold'
        )
    if policy and args.init_weights is None:
        raise ValueError(f'--loss {args.loss} needs --init-weights FILE, the policy that sampled the rollouts')
    if args.steps is not None and args.epochs is not None:
        raise ValueError('--steps and --epochs say the same; give one of them')
    if args.steps is None and args.epochs is None:
        args.steps, args.epochs = (None, POLICY_EPOCHS) if policy else (STEPS, None)
    args.lr = args.lr or (POLICY_RATE if policy else RATE)
    if args.vocab_size is not None and args.init_weights is not None:
        raise ValueError('--vocab-size is for a new tokenizer, and --init-weights brings its own')
    _fill(args, POLICY_ONLY if policy else TEXT_ONLY)
    _fill_sizes(args)


def _fill_sizes(args: argparse.Namespace) -> None:
    if args.init_weights is None:
        _fill(args, SIZES)
        return
    about = weights.read_about(args.init_weights)
    for name in SIZES:
        given, there = getattr(args, name), getattr(about, name)
        if given not in (None, there):
            raise ValueError(f'{_flag(name)} must be that of {args.init_weights}, {there}, got {given}')
        setattr(args, name, there)


def _fill(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def _flag(name: str) -> str:
    return '--' + name.replace('_', '-')


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
