"""The gradients of a linear head's hidden states, weight and bias, from those of its logits, block by block."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from .kernels.eager import accumulate_dtype
from .kernels.memory import empty

LEAST_ROWS = 256
"""Products of fewer rows are slow."""
ADDED_ROWS = 128
"""On CPU a sum of tensors of two dtypes begins with a copy of one of them, which is to stay in the cache."""


class HeadGradients:
    """Takes the gradients of blocks of logits; for each block of columns, its blocks of rows come in order.

    Args:
        rows: `[N, H]` hidden states of the rows that are multiplied.
        weight: `[V, H]` of the true columns.
        d_weight: where the gradient of `weight` goes, `[≥ V, H]`; None: it is not wanted.
        adds: add to `d_weight` instead of writing it.
        wants_rows, wants_bias: whether these gradients are wanted.
    """

    def __init__(
        self, rows: Tensor, weight: Tensor, d_weight: Tensor | None, adds: bool, wants_rows: bool, wants_bias: bool
    ) -> None:
        self._rows, self._weight, self._d_weight, self._adds = rows, weight, d_weight, adds
        self._dtype = accumulate_dtype(rows.dtype)
        self.d_rows = empty(rows.shape, self._dtype, rows.device).zero_() if wants_rows else None
        columns = weight.shape[0]
        self.d_bias = torch.zeros(columns, dtype=self._dtype, device=rows.device) if wants_bias else None
        self._term = rows.new_empty(0, rows.shape[1])
        self._added_at_once = ADDED_ROWS if rows.device.type == 'cpu' else max(1, len(rows))
        self._slice: Tensor | None = None

    def add(self, rows: slice, columns: slice, grad: Tensor) -> None:
        """`grad` `[rows, columns]`, contiguous."""
        if self.d_rows is not None:
            self._add_rows(self.d_rows[rows], grad, columns)
        if self._d_weight is not None:
            self._add_weight(self._d_weight[columns], rows, grad)
        if self.d_bias is not None:
            self.d_bias[columns] += grad.sum(0, dtype=self._dtype)

    def _add_rows(self, out: Tensor, grad: Tensor, columns: slice) -> None:
        weight = self._weight[columns]
        if out.dtype == grad.dtype:
            out.addmm_(grad, weight)
            return
        memory = self._memory_of_term(len(out), columns)
        for part, into in zip(grad.split(len(memory)), out.split(len(memory))):
            term = torch.mm(part, weight, out=memory[: len(part)])
            for some, there in zip(term.split(self._added_at_once), into.split(self._added_at_once)):
                there.add_(some)

    def _memory_of_term(self, rows: int, columns: slice) -> Tensor:
        """`[≤ rows, H]`: the slice of the weight's gradient that is written next; our own where that is too small."""
        if self._d_weight is not None and not self._adds and columns.stop - columns.start >= min(rows, LEAST_ROWS):
            return self._d_weight[columns][:rows]
        if len(self._term) < rows:
            self._term = empty((rows, self._rows.shape[1]), self._rows.dtype, self._rows.device)
        return self._term[:rows]

    def _add_weight(self, out: Tensor, rows: slice, grad: Tensor) -> None:
        """One product, if it has all rows; else the sum over the blocks of rows, in the accumulation dtype."""
        first, last = rows.start == 0, rows.stop == self._rows.shape[0]
        hidden = self._rows[rows]
        if (first and last) or out.dtype == self._dtype:
            if first and not self._adds:
                torch.mm(grad.t(), hidden, out=out)
            else:
                add_product(out, grad, hidden)
            return
        if first:
            self._slice = torch.zeros(out.shape, dtype=self._dtype, device=out.device)
        assert self._slice is not None
        add_product(self._slice, grad, hidden)
        if last:
            out.add_(self._slice) if self._adds else out.copy_(self._slice)


def add_product(out: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """`out += grad.T @ hidden`; in float32 without a rounding between by Apex's kernel, where it is installed."""
    if out.dtype == grad.dtype:
        out.addmm_(grad.t(), hidden)
        return
    fits = grad.is_cuda and grad.dtype != torch.float64 and out.dtype == torch.float32 and out.is_contiguous()
    apex = _apex() if fits else None
    if apex is not None:
        apex.wgrad_gemm_accum_fp32(hidden.contiguous(), grad.contiguous(), out)  # it knows no strides
    else:
        out.add_(torch.mm(grad.t(), hidden))


@functools.cache
def _apex() -> Any:
    """NVIDIA Apex's extension for weight gradients, or None. (What PyPI calls apex is another package.)"""
    try:
        return importlib.import_module('fused_weight_gradient_mlp_cuda')
    except ImportError:
        return None
