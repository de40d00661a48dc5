"""The context parallel split: which tokens of a row each rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .micro_batches import is_per_token


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
    """This context parallel rank's tokens of every tensor `[b, s]` or `[b, s, c]`; the whole batch for cp 1."""
    if cp_size == 1:
        return dict(batch)
    shape = batch['input_ids'].shape
    at = context_positions(shape[1], cp_size, cp_rank, boundaries)
    return {key: value[:, at.to(value.device)] if is_per_token(value, shape) else value for key, value in batch.items()}


def join_context(parts: Tensor, boundaries: Tensor | None = None) -> Tensor:
    """The inverse of the split: `[cp, b, s/cp]`, the ranks' parts in rank order, to `[b, s]` in input order."""
    cp_size, rows, local = parts.shape
    if cp_size == 1:
        return parts[0]
    out = parts.new_empty((rows, cp_size * local))
    for rank in range(cp_size):
        out[:, context_positions(cp_size * local, cp_size, rank, boundaries).to(parts.device)] = parts[rank]
    return out
