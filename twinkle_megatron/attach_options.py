"""What to attach, as a command line says it: options of `twinkle_megatron.run` and of patched Megatron-LM scripts."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .arguments import at_least_1, by_name
from .attach import HEADS, made_loss, made_metrics
from .groups import Groups
from .loss.build import LOSSES
from .metric.build import METRICS
from .plugin import is_address


@dataclass(frozen=True)
class Wanted:
    """What to train on and what to tell: names, as a command line has them. ValueError for one that cannot be."""

    loss: str = 'cross_entropy'
    metrics: tuple[str, ...] = ()
    init: dict[str, Any] = field(default_factory=dict)
    """The loss's own arguments."""
    vocab_size: int | None = None
    head: str = 'logits'
    every: int = 100

    def __post_init__(self) -> None:
        made_loss(self.loss, self.init)
        made_metrics(self.metrics, Groups())


def add_options(parser: Any, prefix: str, loss: str | None) -> None:
    """Adds the options, `--loss` and so on with `prefix` '--'. `loss` is the default of the first."""
    default = loss or 'none: nothing is changed'
    parser.add_argument(prefix + 'loss', default=loss, help=f'name of a mean of per-token losses (default: {default})')
    parser.add_argument(
        prefix + 'loss-arg',
        action='append',
        default=[],
        metavar='NAME=VALUE',
        help='an argument of the loss, such as label_smoothing=0.1; may be given several times',
    )
    parser.add_argument(
        prefix + 'metrics',
        default='',
        metavar='NAME,...',
        help='accuracy, loss: printed for training and for evaluation',
    )
    parser.add_argument(
        prefix + 'vocab-size',
        type=int,
        metavar='N',
        help="the tokenizer's; ids past it take no probability (default: the model's padded one, as without this)",
    )
    parser.add_argument(
        prefix + 'head', choices=HEADS, default='logits', help="'linear' never builds the logits (default: logits)"
    )
    parser.add_argument(
        prefix + 'every', type=int, default=100, metavar='N', help='iterations between two reports (default: 100)'
    )


def wanted(options: argparse.Namespace, prefix: str) -> Wanted | None:
    """What the options of `add_options` say; None where no loss is named. ValueError for what cannot be."""
    own = {
        name: getattr(options, prefix.lstrip('-').replace('-', '_') + name)
        for name in ('loss', 'loss_arg', 'metrics', 'vocab_size', 'head', 'every')
    }
    if own['loss'] is None:
        silent = [name for name in ('loss_arg', 'metrics') if own[name]]
        if silent:
            raise ValueError(
                f'{prefix}{silent[0].replace("_", "-")} needs {prefix}loss, such as {prefix}loss cross_entropy'
            )
        return None
    at_least_1(prefix + 'every', own['every'])
    if own['vocab_size'] is not None:
        at_least_1(prefix + 'vocab-size', own['vocab_size'])
    init = dict(_loss_argument(given, prefix) for given in own.pop('loss_arg'))
    metrics = tuple(name.strip() for name in own.pop('metrics').split(',') if name.strip())
    _check_name(prefix + 'loss', own['loss'], 'loss', LOSSES, lambda name: made_loss(name, {}))
    for metric in metrics:
        _check_name(prefix + 'metrics', metric, 'metric', METRICS, lambda name: made_metrics([name], Groups()))
    return Wanted(init=init, metrics=metrics, **own)


def _check_name(option: str, name: str, kind: str, classes: Mapping[str, type], make: Callable[[str], Any]) -> None:
    """ValueError for an unknown name, with those that `make` takes. One that it does not take is left to `Wanted`."""
    if is_address(name):
        return
    try:
        by_name(name, classes, kind)
    except ValueError:
        try:
            by_name(name, {known: cls for known, cls in classes.items() if _takes(make, known)}, kind)
        except ValueError as error:
            raise ValueError(f'{option}: {error}') from None


def _takes(make: Callable[[str], Any], name: str) -> bool:
    try:
        make(name)
    except (TypeError, ValueError):
        return False
    return True


def _loss_argument(given: str, prefix: str) -> tuple[str, Any]:
    name, equals, value = given.partition('=')
    if not equals or not name.isidentifier():
        raise ValueError(f'{prefix}loss-arg must be NAME=VALUE, such as label_smoothing=0.1, got {given!r}')
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
