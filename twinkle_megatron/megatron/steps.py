"""Optimizer steps of a `MegatronModel`, whole or in halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..groups import Groups
from . import checks
from .accumulation import Accumulation
from .engine import Engine
from .optimizer import Clipped, clip_optimizer, learning_rate, step_optimizer


class Steps:
    """Clips, steps and advances the scheduler.

    Args:
        owner: has `optimizer` and `scheduler`, which may be set anew at any time.
        told: called after each step with the learning rate that it was taken at, its number from 1 and the norm of the
            gradient before clipping.
    """

    def __init__(
        self,
        owner: Any,
        engine: Engine,
        accumulation: Accumulation,
        groups: Groups,
        told: Callable[[Any, int, float | None], None],
    ) -> None:
        self._owner, self._groups = owner, groups
        self._models, self._accumulation, self._told = engine.models, accumulation, told
        self.count = 0
        self.grad_norm: float | None = None
        self._clipped: Clipped | None = None
        self._taken = False

    @property
    def _optimizer(self) -> Any:
        return self._owner.optimizer

    def clip(self, max_norm: float | None) -> float | None:
        """See `MegatronModel.clip_grad_norm`."""
        self._check('clip_grad_norm', max_norm)
        if not self._accumulation.ready():
            return None
        self._clipped = clip_optimizer(self._optimizer, self._models, self._groups, max_norm)
        return self._clipped.norm

    def step(self) -> bool:
        """See `MegatronModel.step`."""
        self._check('step', None)
        if not self._accumulation.ready():
            return False
        clipped = self._clipped or clip_optimizer(self._optimizer, self._models, self._groups, None)
        self._clipped = None
        rate = learning_rate(self._optimizer)
        self._taken = clipped.step is not None and clipped.step()
        if self._taken:
            self._tell(rate, clipped.norm)
        return self._taken

    def advance(self) -> None:
        """See `MegatronModel.lr_step`."""
        if self._taken:
            checks.step_scheduler(self._owner.scheduler)

    def whole(self, max_norm: float | None) -> float | None:
        """See `MegatronModel.clip_grad_and_step`."""
        self._check('clip_grad_and_step', max_norm)
        if not self._accumulation.ready():
            return None
        rate = learning_rate(self._optimizer)
        self._taken, norm = step_optimizer(self._optimizer, self._models, self._groups, max_norm)
        self.zero_grad()
        if not self._taken:
            return None
        self.advance()
        self._tell(rate, norm)
        return norm

    def zero_grad(self) -> None:
        """See `MegatronModel.zero_grad`."""
        self._clipped = None
        self._accumulation.reset()
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def _check(self, method: str, max_norm: float | None) -> None:
        if self._optimizer is None:
            raise ValueError(f'{method} needs an optimizer: MegatronModel(chunks, optimizer=...)')
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f'max_grad_norm must be > 0, or None for no clipping, got {max_norm!r}')

    def _tell(self, rate: Any, norm: float | None) -> None:
        self.count += 1
        self.grad_norm = norm
        self._told(rate, self.count, norm)
