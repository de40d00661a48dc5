"""The mean loss and the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Metric, checked_keywords
from .features import Features, micro_batches, token_count
from .state import MAXIMUM, SUM, as_scalar


class LossMetric(Metric):
    """The loss per token over micro-batches and ranks, Σ w·loss / Σ w, and the last gradient norm.

    With `loss_reduction='sum'` each loss is a sum: Σ loss / Σ tokens, where the tokens are `outputs['num_tokens']`, or
    are counted from the labels. A `num_tokens` of 0 says that this loss is a finished mean. With 'mean' each loss
    weighs the tokens of its labels, so the result is the mean over all tokens however unequal the micro-batches and
    ranks are; without labels it weighs 1. Do not mix the two: a loss without labels then weighs as much as a single
    token. A loss over 0 tokens weighs nothing, even if it is NaN; over more tokens NaN shows.

    Keys: `loss` ('0.0000' without tokens), and `grad_norm` (the largest over the ranks) once one above 0 was given.
    """

    fields = {'loss': SUM, 'tokens': SUM, 'grad_norm': MAXIMUM}  # noqa: RUF012

    @checked_keywords
    def accumulate(
        self, inputs: Any = None, outputs: Any = None, *, loss_reduction: str = 'mean', grad_norm: Any = None
    ) -> None:
        """Takes in `outputs['loss']`, one number, of one micro-batch or of each of a list. No host sync.

        Args:
            inputs: `labels` and optionally `completion_mask`, which say how many tokens the loss stands for.
            outputs: `loss`, optionally `num_tokens`; without `loss` only the gradient norm is taken.
            loss_reduction: 'mean' or 'sum', what `loss` is over its tokens.
            grad_norm: gradient norm of the last step; the last one given is shown.
        """
        if loss_reduction not in ('mean', 'sum'):
            raise ValueError(
                f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}; sum per-token losses and pass 'sum'"
            )
        for features, output in micro_batches(inputs, outputs):
            if output.get('loss') is not None:
                self._add(features, output, loss_reduction)
        self.on_step(grad_norm=grad_norm)

    def on_step(
        self,
        *,
        lr: Any = None,
        step: int | None = None,
        gradient_accumulation_steps: int | None = None,
        grad_norm: Any = None,
    ) -> None:
        """Takes in the gradient norm."""
        if grad_norm is not None:
            self.state.put(grad_norm=grad_norm)

    def figures(self, totals: Mapping[str, float]) -> dict[str, float]:
        """`loss` (nats per token for cross entropy) and, where there is one, `grad_norm`."""
        tokens, grad_norm = totals['tokens'], totals['grad_norm']
        figures = {'loss': totals['loss'] / tokens if tokens > 0 else 0.0}
        if grad_norm > 0 or math.isnan(grad_norm):
            figures['grad_norm'] = grad_norm
        return figures

    def display(self, totals: Mapping[str, float]) -> dict[str, Any]:
        """`loss` with 4 decimals, `grad_norm` with 6."""
        decimals = {'loss': 4, 'grad_norm': 6}
        return {name: f'{value:.{decimals[name]}f}' for name, value in self.figures(totals).items()}

    def _add(self, features: list[Features], output: Features, loss_reduction: str) -> None:
        labelled = token_count(features)
        count = output.get('num_tokens') if loss_reduction == 'sum' else 0
        count = labelled if count is None else count
        if count is None:
            raise ValueError("loss_reduction='sum' needs num_tokens in outputs, or labels in inputs to count them from")
        device = _device(output['loss'], count, labelled)
        loss = as_scalar(output['loss'], 'loss', device)
        tokens = as_scalar(count, 'num_tokens', device)
        weight = as_scalar(1 if labelled is None else labelled, 'labels', device)
        is_sum = tokens > 0
        tokens = torch.where(is_sum, tokens, weight)
        total = torch.where(is_sum, loss, loss * weight)
        self.state.fold(loss=torch.where(tokens > 0, total, 0.0), tokens=tokens)


def _device(*values: Any) -> torch.device:
    """The accelerator that one of the values lies on, else the CPU."""
    devices = [value.device for value in values if isinstance(value, Tensor)]
    return next((device for device in devices if device.type != 'cpu'), torch.device('cpu'))
