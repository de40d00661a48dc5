"""Runs a Megatron-LM training script, unchanged, with one of this package's losses and its metrics.

    torchrun --nproc-per-node 8 -m twinkle_megatron.run --loss chunked_cross_entropy --metrics accuracy \\
        -- pretrain_gpt.py --tensor-model-parallel-size 2 ...

See `attach` for what the loss may be, and docs/megatron-lm.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .arguments import above_0
from .attach import HEADS, Attached, attach, made_loss, made_metrics
from .groups import Groups

PROGRAM = 'python -m twinkle_megatron.run'
SCHEDULES = (
    'forward_backward_no_pipelining',
    'forward_backward_pipelining_without_interleaving',
    'forward_backward_pipelining_with_interleaving',
)
"""What `get_forward_backward_func` chooses from, in megatron.core.pipeline_parallel.schedules, whoever imported it."""


@dataclass(frozen=True)
class Options:
    """A command line, checked."""

    script: str
    arguments: tuple[str, ...]
    loss: str
    init: dict[str, Any]
    metrics: tuple[str, ...]
    vocab_size: int | None
    head: str
    every: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script of a command line as `__main__`. Returns 2, with one message, for a wrong call."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        if os.environ.get('RANK', '0') == '0':
            print(f'{PROGRAM}: error: {error}', file=sys.stderr)
        return 2
    with _started_by_itself(options):
        reporter = Reporter(options)
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
    own = parser.parse_args(list(argv[:at]))
    if not argv[at + 1 :]:
        raise ValueError('the script and its own arguments have to follow after --, as in: ... -- pretrain_gpt.py ...')
    script, *arguments = argv[at + 1 :]
    if not os.path.isfile(script):
        raise ValueError(f'there is no script {script!r} in {os.getcwd()}')
    above_0('--every', own.every)
    if own.vocab_size is not None:
        above_0('--vocab-size', own.vocab_size)
    init = dict(map(_loss_argument, own.loss_arg))
    metrics = tuple(name.strip() for name in own.metrics.split(',') if name.strip())
    made_loss(own.loss, init)
    made_metrics(metrics, Groups())
    return Options(script, tuple(arguments), own.loss, init, metrics, own.vocab_size, own.head, own.every)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        usage='torchrun ... -m twinkle_megatron.run [options] -- pretrain_gpt.py [its own arguments]',
        description='Runs a Megatron-LM training script, unchanged, with another loss and with metrics. The script '
        'computes its mean, its counts and its "lm loss" from the loss of each token as ever.',
        epilog='Example: torchrun --nproc-per-node 8 -m twinkle_megatron.run --loss chunked_cross_entropy '
        '--loss-arg label_smoothing=0.1 --metrics accuracy,loss -- pretrain_gpt.py --num-layers 24 ...',
        allow_abbrev=False,
    )
    parser.add_argument('--loss', default='cross_entropy', help='name of a mean of per-token losses (%(default)s)')
    parser.add_argument(
        '--loss-arg',
        action='append',
        default=[],
        metavar='NAME=VALUE',
        help='an argument of the loss, such as label_smoothing=0.1; may be given several times',
    )
    parser.add_argument(
        '--metrics', default='', metavar='NAME,...', help='accuracy, loss: printed for training and for evaluation'
    )
    parser.add_argument(
        '--vocab-size',
        type=int,
        metavar='N',
        help="the tokenizer's; ids past it take no probability (default: the model's padded one, as without this)",
    )
    parser.add_argument(
        '--head', choices=HEADS, default='logits', help="'linear' never builds the logits (%(default)s)"
    )
    parser.add_argument(
        '--every', type=int, default=100, metavar='N', help='iterations between two reports (%(default)s)'
    )
    return parser


def _loss_argument(given: str) -> tuple[str, Any]:
    name, equals, value = given.partition('=')
    if not equals or not name.isidentifier():
        raise ValueError(f'--loss-arg must be NAME=VALUE, such as label_smoothing=0.1, got {given!r}')
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


class Reporter:
    """Attaches to every model before its first forward, and prints the metrics.

    An iteration is one call of a schedule with gradients. Where Megatron-LM's `megatron.training` is in use, iterations
    have its numbers, and the figures go to its TensorBoard writer as `twinkle/NAME` and `twinkle/NAME validation`.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._attached: Attached | None = None
        self._done = 0
        self._open = {True: False, False: False}
        """Whether there is something to tell of training, of evaluation."""

    def around(self, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        """One call of a schedule."""
        training = not call.get('forward_only', False)
        self._attach(call['model'])
        if training:
            self._report(False)
        result = schedule(**call)
        self._open[training] = True
        if training:
            self._done = _own_number() or self._done + 1
            assert self._attached is not None
            self._attached.on_step(step=self._done, gradient_accumulation_steps=1)
            if self._done % self._options.every == 0:
                self._report(True)
        return result

    def finish(self) -> None:
        """Tells what has not been told, if the groups are still there."""
        import torch.distributed as dist

        if dist.is_initialized():
            self._report(True)
            self._report(False)

    def _attach(self, models: Any) -> None:
        own = self._options
        for model in models if isinstance(models, (list, tuple)) else [models]:
            self._attached = attach(model, own.loss, own.metrics, vocab_size=own.vocab_size, head=own.head, **own.init)

    def _report(self, training: bool) -> None:
        """Collective."""
        if not self._open[training] or self._attached is None:
            return
        self._open[training] = False
        values = self._attached.values(training)
        shown = self._attached.calculate(training)
        if shown and self._attached.owns_output:
            what = 'iteration' if training else 'evaluation at iteration'
            figures = ' '.join(f'{name} {value}' for name, value in shown.items())
            print(f'twinkle: {what} {self._done} {figures}', flush=True)
        writer = _training_globals('get_tensorboard_writer')
        if writer is not None:
            for name, value in values.items():
                writer.add_scalar(f'twinkle/{name}' + ('' if training else ' validation'), value, self._done)


def _own_number() -> int | None:
    """The number of the iteration that runs, where Megatron-LM's training loop counts them."""
    current = getattr(_training_globals('get_args'), 'curr_iteration', None)
    return None if current is None else int(current) + 1


def _training_globals(getter: str) -> Any:
    """What a function of megatron.training.global_vars returns; None where it is not in use, or not yet."""
    get = getattr(sys.modules.get('megatron.training.global_vars'), getter, None)
    try:
        return None if get is None else get()
    except AssertionError:  # not initialised
        return None


@contextlib.contextmanager
def patched(reporter: Reporter) -> Iterator[None]:
    """While open, Megatron's schedules run through the reporter."""
    schedules: Any = importlib.import_module('megatron.core.pipeline_parallel.schedules')
    before = {name: getattr(schedules, name) for name in SCHEDULES}
    for name, schedule in before.items():
        setattr(schedules, name, _reported(reporter, schedule))
    try:
        yield
    finally:
        for name, schedule in before.items():
            setattr(schedules, name, schedule)


def _reported(reporter: Reporter, schedule: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(schedule)

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        return reporter.around(schedule, dict(signature.bind(*args, **kwargs).arguments))

    return run


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
