"""The k largest logits of the whole vocabulary, and the logits at given global ids."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..groups import all_gather_rows, group_device
from .kernels.eager import accumulate_dtype
from .kernels.select import CPU_TILE, CUDA_TILE
from .labels import check_ids, raise_pending
from .shard import VocabShard
from .source import Source, as_source, row_count


def topk(logits: Tensor, k: int, *, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """The k largest logits of each token over the whole true vocabulary and their global ids, each `[..., k]`.

    Values are raw logits in descending order, in the dtype of `logits`, differentiable; ids are int64. Equal logits
    stand in ascending order of id, and the lowest ids are taken, so the result is the same on every layout. A NaN
    counts as +inf.

    Collectives: one all-gather of 2k numbers a token over TP forward, none backward. Kept for backward: the ids, and
    the gradient is one tensor like `logits`. ValueError unless 1 <= k <= `shard.vocab_size`, or for logits that are not
    the shard.
    """
    source = as_source(logits, shard, None, False)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= shard.vocab_size:
        raise ValueError(f'k must be an int in [1, {shard.vocab_size}], the true vocabulary size, got {k!r}')
    with torch.no_grad():
        if row_count(source) == 0:  # no rank has rows, so none enters the collective
            found = logits.new_zeros(*source.lead, k)
            ids = torch.zeros_like(found, dtype=torch.int64)
        else:
            top_values, top_ids = _best_of_ranks(all_gather_rows(_local_topk(source, k), shard.group), k)
            found, ids = top_values.view(*source.lead, k).to(logits.dtype), top_ids.view(*source.lead, k)
    return _At.apply(logits, ids, shard, found), ids


def gather(logits: Tensor, ids: Tensor, *, shard: VocabShard) -> Tensor:
    """Raw logits at global `ids` `[..., k]` (replicated over TP): `[..., k]` in the dtype of `logits`, differentiable.

    Collectives: one all-reduce of k numbers a token over TP forward, none backward. Kept for backward: the ids.
    ValueError for ids of another leading shape, dtype or device, or outside `[0, shard.vocab_size)` (on CUDA by a later
    call).
    """
    raise_pending()
    source = as_source(logits, shard, None, False)
    if not isinstance(ids, Tensor):
        raise ValueError(f'ids must be a tensor of global ids, got {type(ids).__name__}')
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f'ids must be int64 or int32 global ids, got {ids.dtype}')
    if ids.dim() != logits.dim() or tuple(ids.shape[:-1]) != source.lead:
        raise ValueError(
            f'ids must have shape {(*source.lead, "k")}, the leading shape of the logits and k, got {tuple(ids.shape)}'
        )
    if ids.device != source.device:
        raise ValueError(f'ids must be on the device of the logits, {source.device}, got {ids.device}')
    check_ids(ids, shard.vocab_size)
    return _At.apply(logits, ids.long(), shard, None)


class _At(torch.autograd.Function):
    """logits[..., ids] across the shards; `values` are given where they are known already."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, shard: VocabShard, values: Tensor | None) -> Tensor:
        column = shard.local_ids(ids)
        ctx.save_for_backward(column)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        if values is not None:
            return values
        picked = torch.zeros(ids.shape, dtype=accumulate_dtype(logits.dtype), device=logits.device)
        if logits.shape[-1]:
            picked = logits.gather(-1, column.clamp_min(0).long()).to(picked.dtype)
            picked = torch.where(column >= 0, picked, 0)
        if shard.size > 1:
            there = picked.to(group_device(shard.group)).contiguous()
            dist.all_reduce(there, group=shard.group)  # one rank holds the value, the others 0: exact
            picked = there.to(picked.device)
        return picked.to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,), (column,) = grad_outputs, ctx.saved_tensors
        out = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)
        if out.numel():
            here = torch.where(column >= 0, grad, 0).to(ctx.dtype).reshape(-1)
            row = torch.arange(math.prod(ctx.shape[:-1]), device=grad.device).repeat_interleave(column.shape[-1])
            at = row, column.clamp_min(0).long().reshape(-1)
            # scatter_add_ on CPU would copy a half precision tensor whole, twice
            out.view(-1, ctx.shape[-1]).index_put_(at, here, accumulate=True)
        return out, None, None, None


def _ordered(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.inf, x)


def _best_of_ranks(ranks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """From every rank's `_local_topk`, `[tp, 2, N, k]`: the k best values and their ids, each `[N, k]`."""
    values, ids = (part.permute(1, 0, 2).flatten(1) for part in ranks.unbind(1))
    # ranks hold ascending ids, so stable sorts keep equal logits in ascending order of id; what fills up comes last
    order = (ids < 0).to(torch.uint8).sort(dim=-1, stable=True).indices
    values, ids = values.gather(1, order), ids.gather(1, order)
    best = torch.sort(_ordered(values), dim=-1, descending=True, stable=True).indices[:, :k]
    return values.gather(1, best), ids.gather(1, best).long()


def _local_topk(source: Source, k: int) -> Tensor:
    """This rank's k best and their global ids, ids ascending, `[2, N, k]`.

    A short shard is filled up with −inf at id −1.
    """
    shard, rows = source.shard, row_count(source)
    dtype = accumulate_dtype(source.dtype)
    values = torch.full((rows, k), -torch.inf, dtype=dtype, device=source.device)
    ids = torch.full((rows, k), -1, dtype=torch.int64, device=source.device)
    held = min(k, shard.true_columns)
    tensors = tuple(t.detach() for t in source.tensors)
    for tile in source.tiles(tensors, CUDA_TILE if source.device.type == 'cuda' else CPU_TILE):
        columns = _lowest_of_best(tile.x, held)
        values[tile.rows, :held] = tile.x.gather(1, columns).to(dtype)
        ids[tile.rows, :held] = columns + shard.start
    order = source.unflatten(torch.arange(rows, device=source.device)).reshape(-1)
    return torch.stack([values, ids.to(dtype)])[:, order]


def _lowest_of_best(x: Tensor, k: int) -> Tensor:
    """Columns `[R, k]` of the k largest of each row, ascending; among equals at the threshold the lowest columns."""
    key = _ordered(x)
    threshold = key.topk(k, dim=-1).values[:, -1:]
    above, equal = key > threshold, key == threshold
    missing = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    return chosen.nonzero()[:, 1].view(x.shape[0], k)
