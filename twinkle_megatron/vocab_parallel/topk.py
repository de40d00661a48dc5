"""The k largest logits of the whole vocabulary, and the logits at given global ids."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from ..groups import all_gather_rows, sum_over
from .kernels.eager import accumulate_dtype
from .kernels.select import CPU_TILE, CUDA_TILE
from .labels import check_ids, raise_pending
from .logits import Logits, as_source
from .once import once_only
from .shard import VocabShard
from .source import Source, Tile, positions


def topk(logits: Logits, k: int, *, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """The k largest logits of each token over the whole true vocabulary and their global ids, each `[..., k]`.

    Values are raw logits in descending order, in the dtype of `logits`, differentiable; ids are int64. Equal logits
    stand in ascending order of id, and the lowest ids are taken, so the result is the same on every layout. A NaN
    counts as +inf.

    Collectives: one all-gather of 2k numbers a token over TP forward, none backward. Kept for backward: the ids, and
    the gradient is one tensor like `logits`. A `LinearHead` adds its own. ValueError unless 1 <= k <=
    `shard.vocab_size`, or for logits that are not the shard.
    """
    source = as_source(logits, shard)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= shard.vocab_size:
        raise ValueError(f'k must be an int in [1, {shard.vocab_size}], the true vocabulary size, got {k!r}')
    if source.rows == 0:  # no rank has rows, so none enters the collective
        found = torch.zeros((*source.lead, k), dtype=source.dtype, device=source.device)
        ids = torch.zeros_like(found, dtype=torch.int64)
    else:
        with torch.no_grad(), torch.autocast(source.device.type, enabled=False):
            top_values, top_ids = _best_of_ranks(all_gather_rows(_local_topk(source, k), shard.group), k)
        found, ids = top_values.view(*source.lead, k).to(source.dtype), top_ids.view(*source.lead, k)
    return _At.apply(source, ids, found, *source.tensors), ids


def gather(logits: Logits, ids: Tensor, *, shard: VocabShard) -> Tensor:
    """Raw logits at global `ids` `[..., k]` (replicated over TP): `[..., k]` in the dtype of `logits`, differentiable.

    Collectives: one all-reduce of k numbers a token over TP forward, none backward. Kept for backward: the ids. A
    `LinearHead` adds its own. ValueError for ids of another leading shape, dtype or device, or outside
    `[0, shard.vocab_size)` (on CUDA by a later call).
    """
    raise_pending()
    source = as_source(logits, shard)
    if not isinstance(ids, Tensor):
        raise ValueError(f'ids must be a tensor of global ids, got {type(ids).__name__}')
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f'ids must be int64 or int32 global ids, got {ids.dtype}')
    if ids.dim() != len(source.lead) + 1 or tuple(ids.shape[:-1]) != source.lead:
        raise ValueError(
            f'ids must have shape {(*source.lead, "k")}, the leading shape of the logits and k, got {tuple(ids.shape)}'
        )
    if ids.device != source.device:
        raise ValueError(f'ids must be on the device of the logits, {source.device}, got {ids.device}')
    check_ids(ids, shard.vocab_size)
    return _At.apply(source, ids.long(), None, *source.tensors)


class _At(torch.autograd.Function):
    """logits[..., ids] across the shards; `values` are given where they are known already."""

    @staticmethod
    def forward(ctx: Any, source: Source, ids: Tensor, values: Tensor | None, *tensors: Tensor) -> Tensor:
        column = source.shard.local_ids(ids)
        ctx.save_for_backward(column, *tensors)
        ctx.source = copy.copy(source)
        ctx.source.tensors = ()  # autograd keeps the tensors, and lets go of them: the context must not
        if values is not None:
            return values
        with torch.autocast(source.device.type, enabled=False):
            picked = _picked(source, tuple(t.detach() for t in tensors), column)
        return sum_over(picked, source.shard.group).to(source.dtype)  # one rank holds the value, the others 0: exact

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (column, *tensors), source = grad_outputs, ctx.saved_tensors, ctx.source
        with torch.no_grad():
            found = _At._gradients(source, tensors, column, grad, tuple(ctx.needs_input_grad[3:]))
        # of logits that exist the gradient is linear in `grad`; that of a head's weight depends on its hidden states
        return (None, None, None, *once_only(found, (grad, *tensors) if len(tensors) > 1 else (grad,)))

    @staticmethod
    def _gradients(
        source: Source, tensors: list[Tensor], column: Tensor, grad: Tensor, needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        own, by = _by_row(source, column), _by_row(source, grad).to(source.dtype)

        def fill(tile: Tile, out: Tensor) -> None:
            out.zero_()
            column = own[tile.rows]
            row, k = ((column >= tile.columns.start) & (column < tile.columns.stop)).nonzero(as_tuple=True)
            # scatter_add_ on CPU would copy a half precision tensor whole, twice
            at = row, column[row, k].long() - tile.columns.start
            out.index_put_(at, by[tile.rows][row, k], accumulate=True)

        with torch.autocast(source.device.type, enabled=False):
            detached = tuple(t.detach() for t in tensors)
            return source.gradients(detached, needed, fill, None, reads=False)


def _by_row(source: Source, values: Tensor) -> Tensor:
    """`[*lead, k]` as `[rows, k]`."""
    return values.reshape(math.prod(source.lead), values.shape[-1])[positions(source)]


def _picked(source: Source, tensors: tuple[Tensor, ...], column: Tensor) -> Tensor:
    """Logits `[*lead, k]` at this rank's columns, 0 where another rank holds the column."""
    own = _by_row(source, column)
    found = torch.zeros(own.shape, dtype=accumulate_dtype(source.dtype), device=source.device)
    for tile in source.tiles(tensors, None):
        tile.pick(own, found)
    return torch.empty_like(found).index_copy_(0, positions(source), found).view(column.shape)


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
    shard = source.shard
    dtype = accumulate_dtype(source.dtype)
    values = torch.full((source.rows, k), -torch.inf, dtype=dtype, device=source.device)
    ids = torch.full((source.rows, k), -1, dtype=torch.int64, device=source.device)
    tensors = tuple(t.detach() for t in source.tensors)
    for tile in source.tiles(tensors, CUDA_TILE if source.device.type == 'cuda' else CPU_TILE):
        at, first, width = tile.rows, tile.columns.start, tile.x.shape[1]
        columns = _lowest_of_best(tile.x, min(k, width))
        # what earlier columns gave stands in front: ids stay in ascending order
        before = min(k, first)
        found = torch.cat([values[at, :before], tile.x.gather(1, columns).to(dtype)], 1)
        whose = torch.cat([ids[at, :before], columns + (first + shard.start)], 1)
        held = min(k, first + width)
        best = _lowest_of_best(found, held)
        values[at, :held], ids[at, :held] = found.gather(1, best), whose.gather(1, best)
    by_row = torch.stack([values, ids.to(dtype)])
    return torch.empty_like(by_row).index_copy_(1, positions(source), by_row)


def _lowest_of_best(x: Tensor, k: int) -> Tensor:
    """Columns `[R, k]` of the k largest of each row, ascending; among equals at the threshold the lowest columns."""
    key = _ordered(x)
    threshold = key.topk(k, dim=-1).values[:, -1:]
    above, equal = key > threshold, key == threshold
    missing = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    return chosen.nonzero()[:, 1].view(x.shape[0], k)
