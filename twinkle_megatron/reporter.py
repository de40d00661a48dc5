"""Megatron's schedules with one of this package's losses and its metrics, in a script that knows nothing of them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .attach import Attached, attach
from .attach_options import Wanted

SCHEDULES = (
    'forward_backward_no_pipelining',
    'forward_backward_pipelining_without_interleaving',
    'forward_backward_pipelining_with_interleaving',
)
"""What `get_forward_backward_func` chooses from, in megatron.core.pipeline_parallel.schedules, whoever imported it."""


class Reporter:
    """Attaches to every model before its first forward, and prints the metrics.

    An iteration is one call of a schedule with gradients. Where Megatron-LM's `megatron.training` is in use, iterations
    have its numbers, each of its evaluations is told apart, and the figures go to its TensorBoard writer as
    `twinkle/NAME` and `twinkle/NAME validation`.
    """

    def __init__(self, asked: Callable[[], Wanted | None]) -> None:
        """`asked` is called at the first schedule; where it gives None nothing is changed, nor told."""
        self._asked = asked
        self._wanted: Wanted | None = None
        self._started = False
        self._attached: Attached | None = None
        self._done = 0
        self._undo = contextlib.ExitStack()
        self._open = {True: False, False: False}
        """Whether there is something to tell of training, of evaluation."""

    def around(self, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        """One call of a schedule."""
        if not self._started:
            self._started, self._wanted = True, self._asked()
            if self._wanted is not None:
                self._tell_evaluations_apart()
        if self._wanted is None:
            return schedule(**call)
        training = not call.get('forward_only', False)
        self._attach(call['model'], self._wanted)
        if training:
            self._report(False)
        result = schedule(**call)
        self._open[training] = True
        if training:
            self._done = _own_number() or self._done + 1
            assert self._attached is not None
            self._attached.on_step(step=self._done, gradient_accumulation_steps=1)
            if self._done % self._wanted.every == 0:
                self._report(True)
        return result

    def finish(self) -> None:
        """Tells what has not been told, if the groups are still there."""
        import torch.distributed as dist

        if dist.is_initialized():
            self._report(True)
            self._report(False)

    def _tell_evaluations_apart(self) -> None:
        """Megatron-LM evaluates on several sets in a row. The first evaluation may be running already."""
        training: Any = sys.modules.get('megatron.training.training')
        evaluate = getattr(training, 'evaluate', None)
        if evaluate is None:
            return

        @functools.wraps(evaluate)
        def told(*args: Any, **kwargs: Any) -> Any:
            self._report(False)
            result = evaluate(*args, **kwargs)
            self._report(False)
            return result

        training.evaluate = told
        self._undo.callback(setattr, training, 'evaluate', evaluate)

    def close(self) -> None:
        """Puts back what was changed in `megatron.training`."""
        self._undo.close()

    def _attach(self, models: Any, own: Wanted) -> None:
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
        reporter.close()
        for name, schedule in before.items():
            setattr(schedules, name, schedule)


def _reported(reporter: Reporter, schedule: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(schedule)

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        return reporter.around(schedule, dict(signature.bind(*args, **kwargs).arguments))

    return run
