"""Learning rate, iterations, time and speed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..arguments import reject_unknown
from ..groups import Groups
from .base import Metric, checked_keywords


class TrainMetric(Metric):
    """The state of the training itself, told by the training loop. It needs no groups and takes no collective.

    With `Groups` as `device_mesh`, as `MegatronModel.add_metric` gives them, the times are those of the slowest rank of
    the layout, so that every rank says the same; that is one small all-gather.

    Keys: `learning rate` (`learning rate(param group k)`, from 1, for several), `iters` = step // gradient accumulation
    steps, `total time elapse` since the metric was made (in minutes once an interval lasts one), and `speed` in
    iterations per second since the last `calculate`.
    """

    def __init__(self, device_mesh: Any = None, process_group: Any = None, **kwargs: Any):
        reject_unknown(kwargs, ('device_mesh', 'process_group'), type(self).__name__)
        super().__init__(device_mesh, process_group)
        self._lrs: list[Any] = []
        self._step: int = 0
        self._accumulation: int = 1
        self._start = time.perf_counter()
        self.reset()

    @checked_keywords
    def accumulate(
        self,
        inputs: Any = None,
        outputs: Any = None,
        *,
        lr: Any = None,
        step: int | None = None,
        gradient_accumulation_steps: int | None = None,
    ) -> None:
        """Takes in what is not None; `inputs` and `outputs` are not looked at.

        Args:
            lr: the learning rate, or a list of one for each parameter group.
            step: micro-steps (forward and backward passes) so far.
            gradient_accumulation_steps: micro-steps to one optimizer step, at least 1.
        """
        if lr is not None:
            self._lrs = [_snapshot(x) for x in lr] if isinstance(lr, list | tuple) else [_snapshot(lr)]
        if step is not None:
            self._step = int(step)
        if gradient_accumulation_steps is not None:
            if int(gradient_accumulation_steps) < 1:
                raise ValueError(f'gradient_accumulation_steps must be at least 1, got {gradient_accumulation_steps}')
            self._accumulation = int(gradient_accumulation_steps)

    def on_step(
        self,
        *,
        lr: Any = None,
        step: int | None = None,
        gradient_accumulation_steps: int | None = None,
        grad_norm: Any = None,
    ) -> None:
        """The same as `accumulate`."""
        self.accumulate(None, None, lr=lr, step=step, gradient_accumulation_steps=gradient_accumulation_steps)

    def calculate(self) -> dict[str, Any]:
        """The statistics for display; starts the next interval."""
        interval, values = self._values()
        elapsed = values['elapsed_seconds']
        lrs = {f'learning rate{suffix}': f'{lr:.6e}' for suffix, lr in self._by_group('(param group {})')}
        self.reset()
        return lrs | {
            'iters': int(values['iters']),
            'total time elapse': f'{elapsed:.0f} seconds' if interval < 60 else f'{elapsed / 60:.1f} minutes',
            'speed': f'{values["iters_per_second"]:.2f} iters/s',
        }

    def values(self) -> dict[str, float]:
        """`lr` (`lr_1`, `lr_2`, … for several parameter groups), `iters`, `elapsed_seconds`, `iters_per_second`."""
        return self._values()[1]

    def _values(self) -> tuple[float, dict[str, float]]:
        now = time.perf_counter()
        elapsed, interval = now - self._start, now - self._interval_start
        if isinstance(self.device_mesh, Groups):
            times = torch.tensor([elapsed, interval], dtype=torch.float64)
            elapsed, interval = self.device_mesh.gather_everyone(times).amax(0).tolist()
        iters = max(self._step - self._interval_step, 0) / self._accumulation
        return interval, {f'lr{suffix}': lr for suffix, lr in self._by_group('_{}')} | {
            'iters': float(self._step // self._accumulation),
            'elapsed_seconds': elapsed,
            'iters_per_second': iters / interval if interval > 0 else 0.0,
        }

    def reset(self) -> None:
        """Starts a new interval for the speed; the step, the learning rate and the total time go on."""
        self._interval_start, self._interval_step = time.perf_counter(), self._step

    def state_dict(self) -> dict[str, Any]:
        """Times as seconds passed: what passes between a save and a load is not counted."""
        now = time.perf_counter()
        return {
            'elapsed': now - self._start,
            'interval': now - self._interval_start,
            'interval_step': self._interval_step,
            'step': self._step,
            'accumulation': self._accumulation,
            'lrs': [float(lr) for lr in self._lrs],
        }

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        self._start, self._interval_start = now - kept['elapsed'], now - kept['interval']
        self._interval_step, self._step = kept['interval_step'], kept['step']
        self._accumulation, self._lrs = kept['accumulation'], list(kept['lrs'])

    def _by_group(self, suffix: str) -> list[tuple[str, float]]:
        if len(self._lrs) == 1:
            return [('', float(self._lrs[0]))]
        return [(suffix.format(k), float(lr)) for k, lr in enumerate(self._lrs, start=1)]


def _snapshot(lr: Any) -> Any:
    """A learning rate held in a tensor is written in place by its scheduler: keep what it is now, without a sync."""
    return lr.detach().clone() if isinstance(lr, Tensor) else float(lr)
