"""Log-probs at some ids, and of all the others together."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..groups import all_gather_rows
from .kernels.eager import accumulate_dtype, check_temperature, row_stats
from .kernels.parts import join
from .kernels.select import CPU_TILE, CUDA_TILE
from .labels import raise_pending
from .logits import Logits, as_source
from .once import once_only
from .shard import VocabShard
from .source import Source, Tile, positions


def log_probs_and_tail(
    logits: Logits, ids: Tensor, *, shard: VocabShard, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log p(id) at global `ids` `[..., k]`, and the log of the total probability of all other ids `[...]`, nats.

    The tail is summed over the other columns, not taken as 1 − Σ p, so that it keeps its digits where it is small; −inf
    where nothing else has a probability. float32, float64 for float64 logits; differentiable in the logits.

    Args:
        logits: `[..., shard.local_size]`, or a `LinearHead`.
        ids: int64, replicated over TP; those of one token must differ. An id outside the true vocabulary is nobody's:
            its log-prob is −inf.
        temperature: the logits are divided by it; > 0.

    Collectives: one all-gather of k + 2 numbers a token over TP forward, none backward; a `LinearHead` adds its own.
    Kept for backward: the logits, the ids and 2 numbers a token. ValueError for a wrong shape, dtype or temperature.
    """
    raise_pending()
    source = as_source(logits, shard)
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or tuple(ids.shape[:-1]) != source.lead:
        raise ValueError(f'ids must be int64 {(*source.lead, "k")}, got {getattr(ids, "dtype", type(ids).__name__)} '
                         f'{tuple(getattr(ids, "shape", ()))}')  # fmt: skip
    check_temperature(temperature, source.dtype)
    return _Tail.apply(source, ids.to(source.device), 1 / float(temperature), *source.tensors)


class _Tail(torch.autograd.Function):
    """Per-token tensors are `[*lead]`; the sweeps over tiles use the source's row order."""

    @staticmethod
    def forward(ctx: Any, source: Source, ids: Tensor, inv_t: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        k = ids.shape[-1]
        scale = torch.full((), inv_t, dtype=accumulate_dtype(source.dtype), device=source.device)
        column = source.shard.local_ids(ids).view(-1, k)[positions(source)]
        state = torch.zeros(source.rows, 2 + k, dtype=scale.dtype, device=source.device)
        state[:] = -torch.inf
        state[:, 1] = 0
        with torch.autocast(source.device.type, enabled=False):
            for tile in source.tiles(tuple(t.detach() for t in tensors), _largest(source)):
                _fold(state, tile, column, scale)
        whole = torch.stack([source.unflatten(row) for row in state.unbind(1)])
        ranks = all_gather_rows(whole, source.shard.group)
        top, s, _ = join((ranks[:, 0], ranks[:, 1], None), scale, 0)
        assert s is not None
        rest = torch.where(s > 0, top * scale + s.log(), -torch.inf)
        picked = ranks[:, 2:].amax(0) * scale  # one rank has it, the others −inf
        normalizer = torch.logsumexp(torch.cat([rest[None], picked]), 0)
        ctx.source, ctx.inv_t = copy.copy(source), inv_t
        ctx.source.tensors = ()
        ctx.save_for_backward(ids, rest, normalizer, *tensors)
        return (picked - normalizer).movedim(0, -1).contiguous(), rest - normalizer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids, rest, normalizer, *tensors = ctx.saved_tensors
        with torch.no_grad():
            found = _gradients(ctx.source, ids, rest, normalizer, ctx.inv_t, tensors, grads, ctx.needs_input_grad[3:])
        return (None, None, None, *once_only(found, (*grads, *tensors)))


def _largest(source: Source) -> int:
    return CUDA_TILE if source.device.type == 'cuda' else CPU_TILE


def _inside(tile: Tile, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the rows' columns `[R, k]` lie in this tile: row, place among the k, and column within the tile."""
    own = column[tile.rows]
    row, place = ((own >= tile.columns.start) & (own < tile.columns.stop)).nonzero(as_tuple=True)
    return row, place, own[row, place].long() - tile.columns.start


def _fold(state: Tensor, tile: Tile, column: Tensor, scale: Tensor) -> None:
    """Takes in a tile: max and Σ exp of the columns that are not asked for, and the logits of those that are."""
    x = tile.x.to(scale.dtype, copy=True)
    row, place, at = _inside(tile, column)
    mine = state[tile.rows]
    mine[row, 2 + place] = x[row, at]
    x[row, at] = -torch.inf
    found = row_stats(x, scale, False, False, False, True)
    parts = torch.stack([torch.stack([mine[:, 0], found[0]]), torch.stack([mine[:, 1], found[1]])])
    top, s, _ = join((parts[0], parts[1], None), scale, 0)
    assert s is not None
    mine[:, 0], mine[:, 1] = top, s


def _gradients(
    source: Source,
    ids: Tensor,
    rest: Tensor,
    normalizer: Tensor,
    inv_t: float,
    tensors: list[Tensor],
    grads: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    k, dtype = ids.shape[-1], rest.dtype
    own, tail = (g.to(dtype) * inv_t for g in grads)
    tail = torch.where(rest == -torch.inf, 0, tail)  # of nothing
    total = own.sum(-1) + tail
    column = source.shard.local_ids(ids).view(-1, k)[positions(source)]
    own = own.reshape(-1, k)[positions(source)]
    tail, total, rest, normalizer = (source.flatten(x) for x in (tail, total, rest, normalizer))
    rest = torch.where(rest == -torch.inf, 0, rest)
    active = (total != 0) | (tail != 0) | (own != 0).any(-1)

    def fill(tile: Tile, out: Tensor) -> None:
        at = tile.rows
        y = tile.x.to(dtype) * inv_t
        prob = (y - normalizer[at, None]).exp()
        g = tail[at, None] * (y - rest[at, None]).exp() - total[at, None] * prob
        row, place, columns = _inside(tile, column)
        g[row, columns] = own[at][row, place] - total[at][row] * prob[row, columns]
        out.copy_(torch.where(active[at, None], g, 0))

    with torch.autocast(source.device.type, enabled=False):
        return source.gradients(tuple(t.detach() for t in tensors), tuple(needed), fill, _largest(source))
