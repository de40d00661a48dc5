"""How far a student's distribution is from a teacher's, on vocabulary shards: generalised Jensen-Shannon divergence."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..groups import all_gather_rows, sum_over
from .beside import Beside
from .kernels import Kernels, select
from .kernels.divergence import FORWARD, MIXED, REVERSE, Rows, join_stats
from .kernels.eager import accumulate_dtype, check_temperature
from .labels import raise_pending
from .logits import Logits, as_source
from .once import once_only
from .shard import VocabShard
from .source import Source, Tile


def generalized_jsd(
    student: Logits,
    teacher: Logits,
    *,
    shard: VocabShard,
    beta: float,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    normalize: bool = False,
    teacher_shard: VocabShard | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """The generalised Jensen-Shannon divergence of each token `[...]`, nats (Agarwal et al., arXiv 2306.13649).

    With S and T the distributions of student and teacher, logits divided by the temperature, and M = beta·T + (1 −
    beta)·S:

        0 < beta < 1:   beta·KL(T‖M) + (1 − beta)·KL(S‖M)
        beta 0:         KL(T‖S)
        beta 1:         KL(S‖T)

    which is the convention of TRL and Twinkle. The first line tends to 0 at both ends: there it is about beta·KL(T‖S),
    and (1 − beta)·KL(S‖T).

    Args:
        student: `[..., shard.local_size]`, this rank's columns, or a `LinearHead`; float16, bfloat16, float32 or
            float64.
        teacher: the same for the teacher, of the same tokens; its dtype may differ. It gets no gradient.
        shard: which ids the student's columns are, and the tensor parallel group.
        beta: weight of the teacher in the mixture, in [0, 1].
        temperature: both logits are divided by it; > 0.
        mask: bool `[...]`, False where a token does not count: its value is 0 and its gradient exactly 0, whatever the
            logits hold there. None: all count.
        normalize: divide by beta·(1 − beta) where 0 < beta < 1, so that the ends are no longer apart.
        teacher_shard: which ids the teacher's columns are, where its vocabulary is another one. Only ids that both have
            are compared, each distribution renormalised over them. Its columns have to be cut where the student's are:
            `recut` cuts a weight anew.
        chunk_size: tokens handled at once, at most, where that takes memory; values do not depend on it.

    Returns:
        float32 (float64 for a float64 student), bitwise the same on all TP ranks. Upstream gradients must be equal on
        all TP ranks.

    Never negative beyond rounding, exactly 0 for equal logits. −inf logits take no probability: for 0 < beta < 1 the
    value is finite, at the ends +inf where the divergence is.

    Collectives: an all-gather of 5 numbers a token over TP and, for 0 < beta < 1, an all-reduce of 2; none backward. A
    `LinearHead` adds its own, and `teacher_shard` an all-gather of 4 numbers a rank.
    Kept for backward: the logits of both, and 5 numbers a token (each normaliser as two, which keeps the digits of
    large logits); the gradient has the dtype of the student's logits.

    Raises ValueError: wrong shape, dtype, beta, temperature or shard, before any collective; shards of student and
    teacher that are cut in different places, on every rank.
    """
    raise_pending()
    if not isinstance(beta, Real) or not 0 <= beta <= 1:
        raise ValueError(f'beta must be a number in [0, 1], got {beta!r}')
    if teacher_shard is not None:
        shard, teacher_shard = common_shards(shard, teacher_shard)
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f'chunk_size must be an int >= 1 (tokens handled at once), got {chunk_size!r}')
    source = as_source(student, shard)
    beside = Beside(teacher, teacher_shard or shard, source)
    check_temperature(temperature, source.dtype)
    _check_mask(mask, source.lead)
    ignored = None if mask is None else ~mask.to(source.device)
    cap = beside.largest_tile(source)
    if chunk_size is not None:
        cap = _smaller(cap, chunk_size * max(1, shard.true_columns))
    if cap is not None and isinstance(student, Tensor):
        source = as_source(student, shard, max(1, cap // max(1, source.rows)))  # products of few rows are slow
    trained = tuple(torch.is_grad_enabled() and t.requires_grad for t in source.tensors)
    request = _Request(source, beside, shard, float(beta), 1 / float(temperature), ignored, trained, cap)
    value = _Divergence.apply(request, *source.tensors, *beside.tensors)
    return value / (beta * (1 - beta)) if normalize and 0 < beta < 1 else value


def _check_mask(mask: object, lead: tuple[int, ...]) -> None:
    if mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool and tuple(mask.shape) == lead):
        return
    found = f'{mask.dtype} {tuple(mask.shape)}' if isinstance(mask, Tensor) else type(mask).__name__
    raise ValueError(f'mask must be bool {lead}, the leading shape of the logits, got {found}')


class _Request(NamedTuple):
    source: Source
    beside: Beside
    shard: VocabShard
    beta: float
    inv_t: float
    ignored: Tensor | None  # [*lead]
    trained: tuple[bool, ...]
    """Which of the student's tensors get a gradient."""
    cap: int | None
    """Elements of the largest tile that may be read of the teacher."""

    @property
    def owned(self) -> int:
        """How many of the tensors are the student's."""
        return len(self.trained)

    @property
    def kind(self) -> str:
        return {0.0: FORWARD, 1.0: REVERSE}.get(self.beta, MIXED)

    def bare(self) -> _Request:
        """Without tensors, which autograd keeps."""
        source, beside = copy.copy(self.source), copy.copy(self.beside)
        source.tensors, beside.tensors = (), ()
        return self._replace(source=source, beside=beside, ignored=None)


class _Divergence(torch.autograd.Function):
    """Per-token tensors are `[*lead]`; only the sweeps over tiles use the student's row order."""

    @staticmethod
    def forward(ctx: Any, request: _Request, *tensors: Tensor) -> Tensor:
        source = request.source if request.ignored is None else request.source.without(request.ignored)
        request = request._replace(source=source)
        both = tuple(t.detach() for t in tensors)
        dtype = accumulate_dtype(source.dtype)
        inv_t = torch.full((), request.inv_t, dtype=dtype, device=source.device)
        kernels = select(source.device, source.rows, request.shard.true_columns)
        with torch.autocast(source.device.type, enabled=False):
            if math.prod(source.lead) == 0:
                value, kept = inv_t.new_zeros(source.lead), [inv_t.new_zeros(source.lead)] * 5
            elif request.kind == MIXED:
                value, kept = _mixed(request, both, kernels, inv_t)
            else:
                value, kept = _one_sided(request, both, kernels, inv_t)
        if request.ignored is not None:
            value = value.masked_fill(request.ignored, 0)
        ctx.request = request.bare()
        ctx.save_for_backward(request.ignored, *kept, *tensors)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ignored, *saved = ctx.saved_tensors
        kept, tensors = saved[:5], saved[5:]
        count = ctx.request.owned
        with torch.no_grad():
            needed = tuple(ctx.needs_input_grad[1 : 1 + count])
            found = _gradients(ctx.request, ignored, kept, tuple(t.detach() for t in tensors), grads[0], needed)
        return (None, *once_only(found, (grads[0], *tensors)), *(None for _ in tensors[count:]))


def _mixed(request: _Request, both: tuple[Tensor, ...], kernels: Kernels, inv_t: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The divergence, and (m, log_s) of student and teacher and KL(S‖M)."""
    source, beta = request.source, request.beta
    parts = _Parts(source, inv_t)
    for tile, t in _tiles(request, both, kernels):
        parts.fold(tile, kernels.kl_stats(tile.x, t, inv_t, crossed=False))
    *kept, _ = parts.whole(request.shard)
    rows = _rows(source, kept, inv_t, beta)
    sums = torch.zeros(2, source.rows, dtype=inv_t.dtype, device=source.device)
    for tile, t in _tiles(request, both, kernels, request.trained):
        sums[:, tile.rows] += torch.stack(kernels.jsd_sums(tile.x, t, rows.at(tile.rows)))
    whole = sum_over(torch.stack([source.unflatten(row) for row in sums]), request.shard.group)
    return beta * whole[0] + (1 - beta) * whole[1], [*kept, whole[1]]


def _one_sided(
    request: _Request, both: tuple[Tensor, ...], kernels: Kernels, inv_t: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """KL(P‖Q), P the teacher for `FORWARD`, else the student; and (m, log_s) of student and teacher and the value."""
    forward = request.kind == FORWARD
    parts = _Parts(request.source, inv_t)
    for tile, t in _tiles(request, both, kernels, request.trained):
        p, q = (t, tile.x) if forward else (tile.x, t)
        parts.fold(tile, kernels.kl_stats(p, q, inv_t))
    m_p, log_s_p, m_q, log_s_q, mean = parts.whole(request.shard)
    value = mean - (log_s_p - log_s_q)
    value = torch.where(value.isnan() & (mean == torch.inf), torch.inf, value)
    kept = [m_q, log_s_q, m_p, log_s_p] if forward else [m_p, log_s_p, m_q, log_s_q]
    return value, [*kept, value.clone()]  # the caller may change the value in place


class _Parts:
    """Online sums of two distributions over tiles of columns: what `kl_stats` finds in each."""

    def __init__(self, source: Source, inv_t: Tensor) -> None:
        self._state = torch.zeros(5, source.rows, dtype=inv_t.dtype, device=source.device)
        self._state[:4:2] = -torch.inf
        self._source, self._inv_t = source, inv_t

    def fold(self, tile: Tile, found: Sequence[Tensor]) -> None:
        new = torch.stack(list(found))
        if tile.columns.start > 0:
            new = join_stats(torch.stack([self._state[:, tile.rows], new]), self._inv_t)
        self._state[:, tile.rows] = new

    def whole(self, shard: VocabShard) -> list[Tensor]:
        """Over all ranks `[*lead]`: m and log Σ exp(y − m) of each, and the mean under the first of (y − m) − (y' − m')
        with the other's y'. One all-gather."""
        mine = torch.stack([self._source.unflatten(row) for row in self._state])
        top_p, s_p, top_q, s_q, crossed = join_stats(all_gather_rows(mine, shard.group), self._inv_t)
        return [top_p * self._inv_t, s_p.log(), top_q * self._inv_t, s_q.log(), crossed / s_p]


def _tiles(request: _Request, both: tuple[Tensor, ...], kernels: Kernels, trained: tuple[bool, ...] = ()) -> Any:
    """Tiles of the student, each with the teacher's logits."""
    source, count = request.source, request.owned
    read = request.beside.reader(both[count:], source)
    for tile in source.tiles(both[:count], _smaller(kernels.max_elements, request.cap), trained):
        yield tile, read(tile.rows, tile.columns)


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((size for size in (one, other) if size is not None), default=None)


def _rows(source: Source, kept: Sequence[Tensor], inv_t: Tensor, beta: float) -> Rows:
    """The kernels' numbers, in the source's row order."""
    m_x, log_s_x, m_t, log_s_t = (source.flatten(row) for row in kept[:4])
    least = math.log(min(beta, 1 - beta)) if 0 < beta < 1 else 0.0  # here, since float32 may round 1 - beta to 1
    weight, log_least = 1 - (1 - torch.full_like(m_x, beta)), torch.full_like(m_x, least)
    return Rows(inv_t.expand_as(m_x), weight, log_least, m_x, log_s_x, m_t, log_s_t)


def _gradients(
    request: _Request,
    ignored: Tensor | None,
    kept: Sequence[Tensor],
    both: tuple[Tensor, ...],
    grad: Tensor,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Of the student's tensors."""
    source, count = request.source, request.owned
    kernels = select(source.device, source.rows, request.shard.true_columns)
    inv_t = torch.full((), request.inv_t, dtype=kept[0].dtype, device=source.device)
    scale = grad.to(inv_t.dtype) * inv_t * (1 - request.beta if request.kind == MIXED else 1.0)
    scale = source.flatten(scale if ignored is None else scale.masked_fill(ignored, 0))
    rows, k = _rows(source, kept, inv_t, request.beta), source.flatten(kept[4])
    with torch.autocast(source.device.type, enabled=False):
        read = request.beside.reader(both[count:], source)

        def fill(tile: Tile, out: Tensor) -> None:
            at = tile.rows
            kernels.divergence_grad(tile.x, read(at, tile.columns), out, rows.at(at), scale[at], k[at], request.kind)

        return source.gradients(both[:count], needed, fill, _smaller(kernels.max_elements, request.cap))


def common_shards(shard: VocabShard, other: VocabShard) -> tuple[VocabShard, VocabShard]:
    """Both shards restricted to the ids that both vocabularies have, where they are cut in the same places.

    ValueError on every rank where they are not. Collective over the group: whether they are, no rank can tell alone.
    """
    common = min(shard.vocab_size, other.vocab_size)
    mine, theirs = replace(shard, vocab_size=common), replace(other, vocab_size=common)
    cuts = _cuts(mine, theirs)
    if cuts[0] != cuts[1]:
        raise ValueError(
            f'teacher_shard must be cut where shard is, but the ranks hold the ids {cuts[1]} of the teacher and '
            f'{cuts[0]} of the student (of {common} that both have); cut the weight of a LinearHead anew with '
            'recut(weight, teacher_shard, shard), or give teacher logits of a layer that is padded like the student'
        )
    return mine, theirs


def same_cuts(shard: VocabShard, other: VocabShard) -> bool:
    """Whether the ids that both vocabularies have are cut in the same places. Collective over the group."""
    common = min(shard.vocab_size, other.vocab_size)
    mine, theirs = _cuts(replace(shard, vocab_size=common), replace(other, vocab_size=common))
    return mine == theirs


def _cuts(mine: VocabShard, theirs: VocabShard) -> tuple[list[str], list[str]]:
    """On every rank, of each shard the ranges of all ranks that hold true ids."""
    row = [end for one in (mine, theirs) for end in (one.start, one.start + one.true_columns)]
    table = all_gather_rows(torch.tensor(row), mine.group).tolist()
    return tuple(  # type: ignore[return-value]
        [f'[{r[i]}, {r[i + 1]})' if r[i] < r[i + 1] else 'none' for r in table] for i in (0, 2)
    )


def recut(rows: Tensor, held: VocabShard, wanted: VocabShard) -> Tensor:
    """Rows of a weight `[held.local_size, ...]` (or of a bias) cut for another shard, `[wanted.local_size, ...]`.

    For a teacher whose output layer is padded differently: its ids are dealt to the ranks as the student's are. Ids
    that nobody holds are zeros. Not differentiable. Collective over `held.group`: one broadcast a rank, of its rows.
    """
    if held.size != wanted.size:
        raise ValueError(f'recut must be within one group, got {held.size} and {wanted.size} ranks')
    if len(rows) != held.local_size:
        raise ValueError(f'rows must be the {held.local_size} that held says, got {len(rows)}')
    ranges = all_gather_rows(torch.tensor([held.start, held.stop]), held.group).tolist()
    out = rows.new_zeros(wanted.local_size, *rows.shape[1:])
    for rank, (start, stop) in enumerate(ranges):
        part = _from_rank(rows, rank, stop - start, held)
        first, last = max(start, wanted.start), min(stop, wanted.stop)
        if first < last:
            out[first - wanted.start : last - wanted.start] = part[first - start : last - start]
    return out


def _from_rank(rows: Tensor, rank: int, count: int, held: VocabShard) -> Tensor:
    """The rows of one rank of the group, on all of them."""
    from ..groups import group_device, group_rank

    if held.size == 1:
        return rows
    mine = group_rank(held.group) == rank
    device = group_device(held.group)
    part = rows.detach().to(device).contiguous() if mine else rows.new_empty(count, *rows.shape[1:], device=device)
    group = held.group
    assert group is not None
    torch.distributed.broadcast(part, src=torch.distributed.get_global_rank(group, rank), group=group)
    return part.to(rows.device)
