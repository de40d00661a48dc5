"""Several forward-backward calls before one step: the exact mean over all their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .schedule import Runner


class Accumulation:
    """Keeps what each call weighs, so that the gradient is that of the mean over all calls since the last step.

    A call whose loss is a mean of n tokens or sequences adds w · (gradient of its mean), w = n / n_first; finalising
    reduces over ranks and divides by Σ w. Under Megatron's `calculate_per_token_loss` w is multiplied by the first
    call's tokens, the scale that Megatron gives its auxiliary losses. What is
    reduced must not be reduced again: a call after a finalised one sets the gradients aside until its own
    finalisation, at the cost of one more gradient buffer. Calls with `finalize=False` do without.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._forget()

    def reset(self) -> None:
        """Zeroes the gradients and forgets the calls."""
        self._forget()
        self._runner.zero_gradients()

    @contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Around one call: after an exception nothing is accumulated any more, of earlier calls neither."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    @contextmanager
    def adding(self, tokens: float, items: float, over: str, sync: bool) -> Iterator[float]:
        """Around the schedule of one call, whose loss is a mean of `items`, which are tokens or sequences or the like:
        yields the scale of its gradient. ValueError where an earlier call was a mean over something else."""
        if self._over not in (None, over):
            raise ValueError(
                f'calls before one step must be means over the same, got {self._over} first and {over} now: no weight '
                'of theirs would be right; step in between, or add the losses up in one loss of your own'
            )
        self._over = over
        self._reopen()
        first = self._first or (tokens if self._runner.per_token else 1.0, items)
        weight = items * (first[0] / first[1])
        yield weight
        self._first = first
        self._weight += weight
        if sync:
            self._close()

    @property
    def holds_gradients(self) -> bool:
        """Whether there were calls since the last step."""
        return self._weight > 0

    def ready(self) -> bool:
        """Finalises what calls left unfinalised; False if there is nothing to step on. Collective over the layout."""
        if self._weight == 0:
            return False
        if not self._finalized:
            self._runner.finalize(started=False)
            self._close()
        return True

    def _forget(self) -> None:
        self._first: tuple[float, float] | None = None
        self._weight = 0.0
        self._over: str | None = None
        self._finalized = False
        self._aside: list[Tensor] = []
        self._aside_weight = 0.0

    def _reopen(self) -> None:
        """Turns the finalised mean back into a sum that more calls can be added to."""
        if not self._finalized:
            return
        if self._runner.reduces:
            self._aside = [buffer.clone() for buffer in self._runner.gradient_buffers()]
            self._aside_weight = self._weight
            self._runner.zero_gradients()
        else:
            self._runner.scale_gradients(self._weight)
        self._finalized = False

    def _close(self) -> None:
        if self._aside:
            for buffer, before in zip(self._runner.gradient_buffers(), self._aside):
                buffer.add_(before, alpha=self._aside_weight)
            self._aside = []
        if self._weight != 1:
            self._runner.scale_gradients(1 / self._weight)
        self._finalized = True
