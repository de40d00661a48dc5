"""Gradients that can be taken, but not differentiated again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def once_only(gradients: Sequence[Tensor | None], depend_on: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients as they are; under `create_graph=True` an error for who goes on through them.

    They depend on `depend_on` in a way that has no derivative here: a gradient that looked constant would be silently
    wrong.
    """
    on = [t for t in depend_on if t is not None and t.requires_grad]
    if not torch.is_grad_enabled() or not on:
        return tuple(gradients)
    return tuple(g if g is None or g.is_sparse else _Once.apply(g, *on) for g in gradients)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, *depends_on: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            'losses and statistics of twinkle_megatron have no second derivative: backward through a gradient of theirs'
        )
