"""What losses of embeddings and of values share."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..seen import Pooled
from ..vocab_parallel.once import once_only
from .base import Loss


class PooledLoss(Loss):
    """A loss of what a head gives in place of logits: `outputs['embeddings']` or `outputs['values']`.

    A subclass gives `contribution`, and what `MegatronModel` has to know about its labels. `reads` are 'embeddings' or
    'values': `MegatronModel` takes a head that gives the first of them by itself.
    """

    over: str | None = None
    """Of what it is a mean, a name in `Counts`: how calls weigh that are accumulated before one step. None: of what the
    head gives one of, tokens or sequences."""

    ignore_index: int | None = None
    """Label of what does not count; None: all does."""

    labelled: ClassVar[bool] = True
    """Whether a call must have labels."""

    layout: str | None = None
    """'groups': labels begin groups of sequences, which no micro-batch cuts."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def check_targets(self, targets: Tensor) -> None:
        """ValueError for labels `[n]`, `[n, c]` or `[b, s]` of a micro-batch that the loss cannot do with."""

    def contribution(self, batch: TokenBatch, seen: Pooled, targets: Tensor | None) -> Tensor:
        """This micro-batch's summand of the loss: summed over micro-batches and DP×CP ranks it is the loss of the
        global batch.

        Args:
            batch: its `labels` are marks, `ignore_index` where a token does not count.
            seen: what the head gave in `found`, `[n, D]`, `[n]` or `[b, s]`; its gradient for that is trained.
            targets: the labels, on whatever device.
        """
        raise NotImplementedError(f'{type(self).__name__} must define contribution(batch, seen, targets)')


def with_gradient(found: Tensor, value: Tensor, gradient: Tensor | None) -> Tensor:
    """The scalar `value`, whose gradient for `found` is known, of the same shape; None: there is none."""
    if gradient is None:
        return value
    # the empty sum keeps nothing of what was found, and is a way to it where a second derivative meets its error
    return _WithGradient.apply(found, found[:0].sum(), value, gradient)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: Tensor, way: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(way, gradient)
        ctx.dtype = found.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        way, gradient = ctx.saved_tensors
        found = (gradient * grads[0]).to(ctx.dtype)
        return (*once_only([found], (grads[0], way)), None, None, None)
