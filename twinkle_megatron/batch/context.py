"""The context parallel split: which tokens of a row each rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..groups import all_gather_rows, group_rank, group_size, sum_over
from .micro_batches import is_per_token

BOUNDARIES = 'context_boundaries'
"""Of a context parallel slice: where the whole row is cut into sequences (`cu_seqlens`); `[0]` for one a row."""


def zigzag(length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Positions of a sequence that context parallel rank `cp_rank` holds: chunks r and 2·cp − 1 − r of 2·cp equal
    chunks."""
    if length % (2 * cp_size):
        raise ValueError(
            f'a sequence must be a multiple of 2 · cp = {2 * cp_size} tokens long to be split, got {length}'
        )
    chunk = length // (2 * cp_size)
    first, last = cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(last, last + chunk)])


def context_positions(length: int, cp_size: int, cp_rank: int, boundaries: Tensor | None = None) -> Tensor:
    """Positions of a row of `length` tokens that a context parallel rank holds, in the order in which it holds them.

    Each sequence of a packed row is split by itself, as Megatron and Transformer Engine do; `boundaries` (`cu_seqlens`
    of the row as it lies in memory) say where they are, and what follows the last one is split as one more sequence.
    """
    if cp_size == 1:
        return torch.arange(length)
    if boundaries is None:
        return zigzag(length, cp_size, cp_rank)
    ends = [*boundaries.tolist(), length]
    return torch.cat([first + zigzag(last - first, cp_size, cp_rank) for first, last in pairwise(ends)])


def split_context(
    batch: Mapping[str, Any], cp_size: int, cp_rank: int, boundaries: Tensor | None = None
) -> dict[str, Any]:
    """This context parallel rank's tokens of every tensor `[b, s]` or `[b, s, c]`, and under `BOUNDARIES` what puts
    them together again; the whole batch for cp 1."""
    if cp_size == 1:
        return dict(batch)
    shape = batch['input_ids'].shape
    at = context_positions(shape[1], cp_size, cp_rank, boundaries)
    own = {key: value[:, at.to(value.device)] if is_per_token(value, shape) else value for key, value in batch.items()}
    return own | {BOUNDARIES: torch.zeros(1, dtype=torch.int64) if boundaries is None else boundaries}


def join_context(parts: Tensor, boundaries: Tensor | None = None) -> Tensor:
    """The inverse of the split: `[cp, b, s/cp, ...]`, the ranks' parts in rank order, to `[b, s, ...]` as in input."""
    cp_size, rows, local, *rest = parts.shape
    if cp_size == 1:
        return parts[0]
    out = parts.new_empty((rows, cp_size * local, *rest))
    for rank in range(cp_size):
        out[:, context_positions(cp_size * local, cp_size, rank, boundaries).to(parts.device)] = parts[rank]
    return out


def whole_rows(values: Tensor, cp: ProcessGroup | None, boundaries: Tensor | None = None) -> Tensor:
    """Values `[b, s/cp]` of this rank's slice as whole rows `[b, s]` in input order, the same on every rank of `cp`.

    Differentiable: each rank is given the gradient that all of them have found together for its slice. One all-gather
    forward and one all-reduce of whole rows backward; nothing is kept for backward but the positions.
    """
    return _WholeRows.apply(values, cp, boundaries) if group_size(cp) > 1 else values


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cp: ProcessGroup, boundaries: Tensor | None) -> Tensor:
        whole = join_context(all_gather_rows(values, cp), boundaries)
        ctx.cp, ctx.at = cp, context_positions(whole.shape[1], group_size(cp), group_rank(cp), boundaries)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_over(grads[0].clone(), ctx.cp)[:, ctx.at.to(grads[0].device)], None, None
