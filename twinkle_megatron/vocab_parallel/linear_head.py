"""Logits that are never built: hidden states and the weight of the output layer in place of their product."""

from __future__ import annotations

import copy
import math
from numbers import Real
from typing import Self

import torch
from torch import Tensor

from .workspace import check_workspace


class LinearHead:
    """The logits `(hidden @ weight.T + bias) · logit_scale`, without building them.

    Every function of this package takes one in place of logits; the values are those of the logits in the dtype of
    `hidden`, tile by tile. In place of the logits' gradient there are those of `hidden`, `weight` and `bias`, in their
    dtypes; what does not require a gradient is not computed.

    Args:
        hidden: `[..., H]`, replicated over TP; its gradient is summed over TP in float32 (float64 for float64).
        weight: `[V/tp, H]`, this rank's rows of the output layer, of the dtype of `hidden`.
        bias: `[V/tp]`.
        sequence_parallel: `hidden` `[s/tp, ..., H]` is this rank's slice of the first dim, as under Megatron's sequence
            parallelism. Logits, and so targets and results, are those of the whole `[s, ...]`.
        logit_scale: MuP's multiplier of the logits, > 0.
        max_workspace_mb: MiB for tiles of logits; no value depends on it beyond rounding. What is not needed for the
            tile at work keeps tiles from the forward to the backward pass, which then need no second product. None: a
            small part of the free memory, enough for fast products.
        main_grad: Megatron's gradient buffer `[V/tp, H]` of `weight`. The gradient is added to it, slice by slice, and
            autograd is given an empty sparse one, which adds nothing: Megatron's hooks run as ever.

    `head.transpose(0, 1)` is the same head with two leading dims of the logits exchanged. With `tp` ranks and N rows
    the working memory is the workspace and about 3 times `hidden` `[N, H]`, whatever the vocabulary is.

    Collectives, beside those of the function that takes it: one all-reduce of the gradient of `hidden`; under
    `sequence_parallel` an all-gather of `hidden` forward and backward, and one reduce-scatter of its gradient. Kept
    for backward: `hidden` (the slice), `weight`, and where `weight` wants a gradient other than `main_grad`, the
    storage of that gradient, which holds tiles of logits until then.

    ValueError for tensors that do not fit together.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        sequence_parallel: bool = False,
        logit_scale: float = 1.0,
        max_workspace_mb: float | None = None,
        main_grad: Tensor | None = None,
    ) -> None:
        _check(hidden, weight, bias, sequence_parallel, main_grad)
        check_workspace(max_workspace_mb)
        if not isinstance(logit_scale, Real) or isinstance(logit_scale, bool) or not 0 < logit_scale < math.inf:
            raise ValueError(f'logit_scale must be a finite number > 0, got {logit_scale!r}')
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.sequence_parallel = sequence_parallel
        self.logit_scale = float(logit_scale)
        self.max_workspace_mb = max_workspace_mb
        self.main_grad = main_grad
        self.order = tuple(range(hidden.dim() - 1))
        """Leading dims of the logits, as numbers of leading dims of `hidden`."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the logits are a function of: hidden, weight and, where there is one, bias."""
        return (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)

    @property
    def local_size(self) -> int:
        """Columns of this rank's logits."""
        return self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self.hidden.dtype

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.hidden.device

    @property
    def requires_grad(self) -> bool:
        """Whether any tensor wants a gradient."""
        return any(t.requires_grad for t in self.tensors)

    def lead(self, tp: int) -> tuple[int, ...]:
        """The shape of the logits without their last dim, on `tp` ranks."""
        own = list(self.hidden.shape[:-1])
        if self.sequence_parallel:
            own[0] *= tp
        return tuple(own[dim] for dim in self.order)

    def transpose(self, dim0: int, dim1: int) -> Self:
        """The same logits with two leading dims exchanged. The vocabulary stays last."""
        dims = len(self.order) + 1
        first, second = (dim + dims if dim < 0 else dim for dim in (dim0, dim1))
        if not (0 <= first < dims - 1 and 0 <= second < dims - 1):
            raise ValueError(
                f'transpose must exchange two of the {dims - 1} leading dims of the logits, got {dim0} and {dim1}'
            )
        order = list(self.order)
        order[first], order[second] = order[second], order[first]
        out = copy.copy(self)
        out.order = tuple(order)
        return out

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """A part of the same logits, as of a tensor, along a leading dim that is not split over ranks."""
        at = dim + len(self.order) + 1 if dim < 0 else dim
        if not 0 <= at < len(self.order) or (self.sequence_parallel and self.order[at] == 0):
            raise ValueError(f'narrow must be along a leading dim of the logits that no ranks share, got {dim}')
        out = copy.copy(self)
        out.hidden = self.hidden.narrow(self.order[at], start, length)
        return out

    def detach(self) -> Self:
        """The same logits without a gradient."""
        out = copy.copy(self)
        out.hidden, out.weight, out.main_grad = self.hidden.detach(), self.weight.detach(), None
        out.bias = None if self.bias is None else self.bias.detach()
        return out

    def __repr__(self) -> str:
        return f'LinearHead(hidden {tuple(self.hidden.shape)}, weight {tuple(self.weight.shape)}, {self.dtype})'


def _check(hidden: object, weight: object, bias: object, sequence_parallel: object, main_grad: object) -> None:
    for name, tensor in (('hidden', hidden), ('weight', weight), ('bias', bias), ('main_grad', main_grad)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ('hidden', 'weight')):
            raise ValueError(f'{name} must be a tensor, got {type(tensor).__name__}')
    assert isinstance(hidden, Tensor)
    assert isinstance(weight, Tensor)
    if hidden.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f'hidden must be float16, bfloat16, float32 or float64, got {hidden.dtype}')
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or weight.shape[1] == 0:
        raise ValueError(
            f'hidden must be [..., H] and weight [V/tp, H] with the same H > 0, got {tuple(hidden.shape)} and '
            f"{tuple(weight.shape)}; the output layer's weight is not transposed"
        )
    for name, tensor in (('weight', weight), ('bias', bias)):
        if isinstance(tensor, Tensor) and (tensor.dtype != hidden.dtype or tensor.device != hidden.device):
            raise ValueError(
                f'{name} must have the dtype and device of hidden, {hidden.dtype} on {hidden.device}, got '
                f'{tensor.dtype} on {tensor.device}'
            )
    if isinstance(bias, Tensor) and bias.shape != weight.shape[:1]:
        raise ValueError(f'bias must be [V/tp] = ({weight.shape[0]},), got {tuple(bias.shape)}')
    if not isinstance(sequence_parallel, bool):
        raise ValueError(f'sequence_parallel must be True or False, got {sequence_parallel!r}')
    if sequence_parallel and hidden.dim() < 2:
        raise ValueError(f'sequence_parallel needs hidden [s/tp, ..., H], got {tuple(hidden.shape)}')
    if isinstance(main_grad, Tensor):
        _check_main_grad(main_grad, weight)


def _check_main_grad(main_grad: Tensor, weight: Tensor) -> None:
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f'main_grad must be a buffer of the shape and device of weight, {tuple(weight.shape)} on {weight.device}, '
            f'got {tuple(main_grad.shape)} on {main_grad.device}'
        )
    if not main_grad.dtype.is_floating_point or main_grad.requires_grad:
        own = ', which requires a gradient' if main_grad.requires_grad else ''
        raise ValueError(f'main_grad must be a plain buffer of floats without a gradient, got {main_grad.dtype}{own}')
