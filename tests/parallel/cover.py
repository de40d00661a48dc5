"""Which layouts and splits the invariance suite runs: all that fit on 8 ranks, and a pairwise cover of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields

from invariance import EMPTY_RANK, UNEVEN, Split, even
from tiny_gpt import Layout

MOST_RANKS = 8
SPLITS = ('mb1', 'mb2', 'mb4', 'uneven', 'empty')


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
        if self.split == 'uneven':
            return UNEVEN[self.dp]
        return EMPTY_RANK if self.split == 'empty' else even(self.dp, int(self.split[2:]))

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

    def pairs(self) -> set[tuple]:
        """Every two factors' settings in this case."""
        settings = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return set(itertools.combinations(settings, 2))


EVERY = [
    case
    for values in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2), (False, True), SPLITS)
    if (case := Case(*values)).possible
]


def pairwise() -> list[Case]:
    """A small list in which every pair of settings that can occur together does: greedily the case with most new pairs,
    among equals the one with the fewest ranks."""
    missing = set().union(*(case.pairs() for case in EVERY))
    chosen = []
    while missing:
        best = max(EVERY, key=lambda case: (len(case.pairs() & missing), -case.layout.world))
        missing -= best.pairs()
        chosen.append(best)
    return chosen
