"""What one rank's columns add to the statistics of whole rows, and how the ranks' parts become one.

A part is `Sums` (see kernels/parts.py) and a few more numbers per token. Parts of disjoint columns join exactly,
whether they are tiles of one rank or the shards of a tensor parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels.parts import Sums, first_of, join
from .shard import VocabShard
from .source import Source, Tile


class Wanted(NamedTuple):
    """Which statistics are computed."""

    log_prob: bool
    entropy: bool
    mean: bool
    argmax: bool
    normalizer: bool
    plain: bool


@dataclass
class LocalSums:
    """Statistics of this rank's columns, each `[rows]` in the source's order, but for `label` `[N]`; merged online over
    tiles of columns."""

    inv_t: Tensor
    top: Tensor
    s: Tensor | None
    t: Tensor | None
    total: Tensor | None
    best: Tensor | None
    target_logit: Tensor | None
    """The logit itself, not scaled."""
    plain_s: Tensor | None
    """Σ exp(x − max x), at temperature 1."""
    label: Tensor | None

    def pack(self, source: Source) -> Tensor:
        """`[k, N]`, from the source's row order to that of the leading dims."""
        found = (self.top, self.s, self.t, self.total, self.best, self.target_logit, self.plain_s)
        labels = () if self.label is None else (self.label,)
        return torch.stack([*(source.unflatten(x).reshape(-1) for x in found if x is not None), *labels])

    def fold(self, tile: Tile, found: list[Tensor]) -> None:
        """Takes in a tile's `row_stats`, and behind them its `plain_s` where that is wanted.

        Its first tile of columns overwrites, later ones are merged.
        """
        at, values = tile.rows, iter(found)
        top = next(values)
        s = None if self.s is None else next(values)
        t = None if self.t is None else next(values)
        if self.total is not None:
            self.total[at] += next(values)
        if self.best is not None:
            best = next(values) + tile.columns.start
            # a NaN wins, as in torch.argmax, and the first NaN stays
            later = (top > self.top[at]) | (top.isnan() & ~self.top[at].isnan())
            self.best[at] = best if tile.columns.start == 0 else torch.where(later, best, self.best[at])
        sums = top, s, t
        if self.plain_s is not None:
            plain = next(values)
            if tile.columns.start > 0:
                both = torch.stack((self.top[at], top)), torch.stack((self.plain_s[at], plain)), None
                plain = join(both, torch.ones_like(self.inv_t), 0)[1]
            assert plain is not None
            self.plain_s[at] = plain
        self._store(at, sums if tile.columns.start == 0 else self._merge(at, sums))

    def _merge(self, at: slice, two: Sums) -> Sums:
        """What is kept for these rows and `two`, as one."""

        def both(mine: Tensor | None, other: Tensor | None) -> Tensor | None:
            return None if mine is None or other is None else torch.stack((mine[at], other))

        return join((torch.stack((self.top[at], two[0])), both(self.s, two[1]), both(self.t, two[2])), self.inv_t, 0)

    def _store(self, at: slice, sums: Sums) -> None:
        for kept, new in zip((self.top, self.s, self.t), sums):
            if kept is not None and new is not None:
                kept[at] = new


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
    plain: Tensor | None
    """The log-prob at temperature 1."""
    bad_label: Tensor | None


def combine(ranks: Tensor, inv_t: Tensor, shard: VocabShard, wanted: Wanted) -> WholeRows:
    """`ranks[tp, k, N]`, every rank's packed statistics in rank order, of which one row is made of the parts."""
    rows = iter(ranks.unbind(1))
    tops = next(rows)
    s = next(rows) if wanted.normalizer else None
    t = next(rows) if wanted.entropy else None
    total = next(rows) if wanted.mean else None
    best = next(rows) if wanted.argmax else None
    target = next(rows).sum(0) if wanted.log_prob else None
    plain_s = next(rows) if wanted.plain else None
    bad_label = _bad_labels(next(rows)) if wanted.log_prob else None

    target_logit = None if target is None else target * inv_t
    top, s_all, t_all = join((tops, s, t), inv_t, 0)
    m = top * inv_t
    log_s = None if s_all is None else s_all.log()
    offset = None if t_all is None or s_all is None else t_all / s_all
    return WholeRows(
        m=m,
        log_s=log_s,
        offset=offset,
        log_prob=None if target_logit is None or log_s is None else (target_logit - m) - log_s,
        log_normalizer=None if log_s is None else m + log_s,
        entropy=None if offset is None or log_s is None else log_s - offset,
        mean=None if total is None else total.sum(0) / shard.vocab_size,
        plain=None if plain_s is None or target is None else _plain(tops, plain_s, target, inv_t),
        best=None if best is None else best.gather(0, first_of(tops, top, 0).long()[None])[0].long(),
        bad_label=bad_label,
    )


def _plain(tops: Tensor, plain_s: Tensor, target: Tensor, inv_t: Tensor) -> Tensor:
    top, s, _ = join((tops, plain_s, None), torch.ones_like(inv_t), 0)
    assert s is not None
    return (target - top) - s.log()


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
