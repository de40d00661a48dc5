"""What one rank's columns add to the statistics of whole rows, and how the ranks' parts become one.

A part is (max m, Σ exp(y − m), Σ exp(y − m)·(y − m)) and a few more numbers per token. Parts of disjoint columns merge
exactly, whether they are tiles of one rank or the shards of a tensor parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .shard import VocabShard
from .source import Source, Tile


class Wanted(NamedTuple):
    """Which statistics are computed."""

    log_prob: bool
    entropy: bool
    mean: bool
    argmax: bool
    normalizer: bool


@dataclass
class LocalSums:
    """Statistics of this rank's columns, each `[N]`; merged online over tiles of columns."""

    m: Tensor
    s: Tensor | None
    t: Tensor | None
    total: Tensor | None
    best: Tensor | None
    target_logit: Tensor | None
    label: Tensor | None

    def pack(self, source: Source) -> Tensor:
        """`[k, N]`, from the source's row order to that of the leading dims."""
        found = (self.m, self.s, self.t, self.total, self.best, self.target_logit, self.label)
        return torch.stack([source.unflatten(x).reshape(-1) for x in found if x is not None])

    def fold(self, tile: Tile, found: list[Tensor]) -> None:
        """Takes in a tile's `row_stats`. Its first tile of columns overwrites, later ones are merged."""
        at, values = tile.rows, iter(found)
        m = next(values)
        s = None if self.s is None else next(values)
        t = None if self.t is None else next(values)
        if self.total is not None:
            self.total[at] += next(values)
        if self.best is not None:
            best = next(values) + tile.columns.start
            # a NaN wins, as in torch.argmax, and the first NaN stays
            later = (m > self.m[at]) | (m.isnan() & ~self.m[at].isnan())
            self.best[at] = best if tile.columns.start == 0 else torch.where(later, best, self.best[at])
        if tile.columns.start == 0:
            self._store(at, m, s, t)
        else:
            self._store(at, *merge((self.m[at], self.s_at(at), self.t_at(at)), (m, s, t)))

    def s_at(self, at: slice) -> Tensor | None:
        return None if self.s is None else self.s[at]

    def t_at(self, at: slice) -> Tensor | None:
        return None if self.t is None else self.t[at]

    def _store(self, at: slice, m: Tensor, s: Tensor | None, t: Tensor | None) -> None:
        self.m[at] = m
        if self.s is not None and s is not None:
            self.s[at] = s
        if self.t is not None and t is not None:
            self.t[at] = t


Sums = tuple[Tensor, Tensor | None, Tensor | None]


def merge(one: Sums, two: Sums) -> Sums:
    """(max, Σ e^(y−max), Σ e^(y−max)·(y−max)) of two disjoint sets of columns, of their union."""
    m = torch.maximum(one[0], two[0])
    safe = torch.where(m == -torch.inf, 0, m)
    s: Tensor | None = None
    t: Tensor | None = None
    for part in (one, two):
        if part[1] is None:
            continue
        shift = part[0] - safe
        weight = shift.exp()
        s_part = weight * part[1]
        if part[2] is not None:
            # an empty part has shift −inf and sums 0
            t_part = torch.where(part[1] == 0, 0, weight * (part[2] + part[1] * shift))
            t = t_part if t is None else t + t_part
        s = s_part if s is None else s + s_part
    return m, s, t


class WholeRows(NamedTuple):
    """Statistics of the whole row, the same on every rank. `offset` is E[y] − m."""

    m: Tensor
    log_s: Tensor | None
    offset: Tensor | None
    log_prob: Tensor | None
    log_normalizer: Tensor | None
    entropy: Tensor | None
    mean: Tensor | None
    best: Tensor | None
    bad_label: Tensor | None


def combine(ranks: Tensor, shard: VocabShard, wanted: Wanted) -> WholeRows:
    """`ranks[tp, k, N]`, every rank's packed statistics in rank order, of which one row is made of the parts."""
    rows = iter(ranks.unbind(1))
    m = next(rows)
    s = next(rows) if wanted.normalizer else None
    t = next(rows) if wanted.entropy else None
    total = next(rows) if wanted.mean else None
    best = next(rows) if wanted.argmax else None
    target_logit, bad_label = (next(rows).sum(0), _bad_labels(next(rows))) if wanted.log_prob else (None, None)

    sums: Sums = (m[0], None if s is None else s[0], None if t is None else t[0])
    for rank in range(1, m.shape[0]):
        sums = merge(sums, (m[rank], None if s is None else s[rank], None if t is None else t[rank]))
    top, s_all, t_all = sums
    log_s = None if s_all is None else s_all.log()
    offset = None if t_all is None or s_all is None else t_all / s_all
    return WholeRows(
        m=top,
        log_s=log_s,
        offset=offset,
        log_prob=None if target_logit is None or log_s is None else (target_logit - top) - log_s,
        log_normalizer=None if log_s is None else top + log_s,
        entropy=None if offset is None or log_s is None else log_s - offset,
        mean=None if total is None else total.sum(0) / shard.vocab_size,
        best=None if best is None else _first_best(m, best),
        bad_label=bad_label,
    )


def _first_best(m: Tensor, best: Tensor) -> Tensor:
    """Global id of the row maximum: of the first rank that reaches it, since ranks hold ascending ids."""
    reached = (m == m.amax(0)) | m.isnan()
    ranks = torch.arange(m.shape[0], device=m.device)[:, None]
    first = torch.where(reached, ranks, m.shape[0] - 1).amin(0, keepdim=True)
    return best.gather(0, first)[0].long()


def label_codes(target: Tensor, column: Tensor, ignored: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """A number per label that tells whether all ranks were given the same one: twice the id, plus 1 if it is held here.

    Ids count modulo 2^22, so that float32 holds the codes exactly.
    """
    known = (target >= 0) & (target < vocab_size)
    code = torch.where(known, target % (1 << 22), _OUTSIDE) * 2 + (column >= 0)
    return torch.where(ignored, 2 * _IGNORED, code).to(dtype)


_IGNORED, _OUTSIDE = -1, -2


def _bad_labels(codes: Tensor) -> Tensor:
    """From `codes[tp, N]`: labels that are out of range, differ among ranks, or are not held by exactly one rank."""
    held = codes.remainder(2)
    ids = codes - held
    sound = torch.where(ids[0] == 2 * _IGNORED, 0, 1) == held.sum(0)
    return ~(sound & (ids == ids[0]).all(0))
