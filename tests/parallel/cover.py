"""Which layouts and splits the invariance suite runs: all that fit on 8 ranks, and a pairwise cover of them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from invariance import EMPTY_RANK, UNEVEN, Split, even
from tiny_gpt import Layout

MOST_RANKS, FEW_RANKS = 8, 4
SPLITS = ('mb1', 'mb2', 'mb4', 'uneven', 'empty')


def cut_of(name: str, dp: int) -> Split:
    """The split of that name for so many replicas."""
    if name == 'uneven':
        return UNEVEN[dp]
    return EMPTY_RANK if name == 'empty' else even(dp, int(name[2:]))


@dataclass(frozen=True)
class Case:
    """One setting of every factor. `experts` says whether the model is a mixture of experts (with `ep` 2 it must
    be)."""

    tp: int
    pp: int
    vpp: int
    cp: int
    dp: int
    ep: int
    sp: bool
    split: str

    @property
    def layout(self) -> Layout:
        return Layout(
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            cp=self.cp,
            dp=self.dp,
            ep=self.ep,
            etp=1 if self.ep > 1 else None,
            sp=self.sp,
        )

    @property
    def cut(self) -> Split:
        return cut_of(self.split, self.dp)

    @property
    def possible(self) -> bool:
        return (
            self.layout.world <= MOST_RANKS
            and (self.vpp == 1 or self.pp > 1)
            and (not self.sp or self.tp > 1)
            and (self.ep == 1 or (self.dp == 2 and (self.sp or self.tp == 1)))  # Megatron: TP with experts needs SP
            and (self.split != 'empty' or self.dp == 2)
        )

    def __str__(self) -> str:
        return f'{self.layout}-{self.split}'

    def pairs(self) -> frozenset[tuple]:
        """Every two factors' settings in this case."""
        settings = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return frozenset(itertools.combinations(settings, 2))


EVERY = [
    case
    for values in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2), (False, True), SPLITS)
    if (case := Case(*values)).possible
]


@dataclass(frozen=True, kw_only=True)
class SequenceCase:
    """One setting of every factor for losses of sequences. `per_token` is Megatron's `calculate_per_token_loss`."""

    packed: bool
    tp: int
    pp: int
    cp: int
    dp: int
    sp: bool
    head: str
    split: str
    per_token: bool = True

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.tp, pp=self.pp, cp=self.cp, dp=self.dp, sp=self.sp)

    @property
    def cut(self) -> Split:
        return cut_of(self.split, self.dp)

    @property
    def possible(self) -> bool:
        return (
            self.layout.world <= MOST_RANKS and (not self.sp or self.tp > 1) and (self.split != 'empty' or self.dp == 2)
        )

    def __str__(self) -> str:
        packed, count = 'packed' if self.packed else 'padded', 'n' if self.per_token else 'm'
        return f'{packed}-{self.layout}-{self.head}-{self.split}-{count}'

    def pairs(self) -> frozenset[tuple]:
        """Every two factors' settings in this case."""
        return frozenset(itertools.combinations([(f.name, getattr(self, f.name)) for f in fields(self)], 2))


SEQUENCE_FACTORS: dict[str, tuple[Any, ...]] = {
    'packed': (False, True), 'tp': (1, 2), 'pp': (1, 2), 'cp': (1, 2), 'dp': (1, 2), 'sp': (False, True),
    'head': ('logits', 'linear'), 'split': ('mb1', 'mb2', 'uneven', 'empty'),
}  # fmt: skip


def settings_of(factors: dict[str, tuple[Any, ...]]) -> list[tuple[dict[str, Any], int]]:
    """Every combination, each with a number of its own, from which what changes from case to case may be taken."""
    found = [dict(zip(factors, values)) for values in itertools.product(*factors.values())]
    return [(settings, zlib.crc32(repr(tuple(settings.values())).encode()) >> 8) for settings in found]


def cover(cases: Sequence[Any]) -> list[Any]:
    """A small list in which every pair of settings that occurs together in `cases` does: greedily the case with most
    new pairs, among equals the one with the fewest ranks. A case has `pairs()` and a `layout`."""
    pairs = {case: case.pairs() for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: (len(pairs[case] & missing), -case.layout.world))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


def on_few_ranks(cases: Sequence[Any]) -> list[Any]:
    """Those that start in a moment on a small machine."""
    return [case for case in cases if case.layout.world <= FEW_RANKS]


def assert_covered(chosen: Sequence[Any], cases: Sequence[Any], impossible: set[tuple]) -> None:
    """Every pair of settings of `cases` is in one that is chosen; and `cases` have every pair of settings of two
    factors, but for the impossible ones."""
    pairs = set().union(*(case.pairs() for case in cases))
    assert set().union(*(case.pairs() for case in chosen)) == pairs
    settings = {factor: {setting for f, setting in itertools.chain(*pairs) if f == factor} for factor, _ in
                itertools.chain(*pairs)}  # fmt: skip
    for first, second in itertools.combinations(settings, 2):
        for pair in itertools.product(settings[first], settings[second]):
            named = ((first, pair[0]), (second, pair[1]))
            assert named in pairs or named[::-1] in pairs or {named, named[::-1]} & impossible, named


IMPOSSIBLE = {(('tp', 1), ('sp', True)), (('dp', 1), ('split', 'empty'))}
"""Of cases of sequences: nothing is split over one rank, and the only replica is not empty."""
