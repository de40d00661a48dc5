"""Two records beside each other: the first tensor that differs, in the order in which a step computes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gradients import Difference

DEFAULT = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF = 0.05
SMALL = 1e-3
"""A gradient smaller than this beside the largest one is rounding: it is compared with so much of that one."""


class Pair(NamedTuple):
    """A tensor of both runs. `difference` is relative to the largest value in one process; `tells` says where."""

    kind: str
    name: str
    difference: float
    tells: str


@dataclass(frozen=True)
class Report:
    """What was compared; `str` of it is for people."""

    pairs: list[Pair]
    unequal: list[str]
    tolerance: float
    losses: tuple[float, float]

    @property
    def first(self) -> Pair | None:
        """The first that differs; a difference of NaN is one."""
        return next((pair for pair in self.pairs if not pair.difference <= self.tolerance), None)

    @property
    def same(self) -> bool:
        return self.first is None and not self.unequal

    def __str__(self) -> str:
        lines = []
        for kind in dict.fromkeys(pair.kind for pair in self.pairs):
            found = [pair for pair in self.pairs if pair.kind == kind]
            agree = sum(pair.difference <= self.tolerance for pair in found)
            largest = max(pair.difference for pair in found)
            lines.append(f'  {kind:14} {agree} of {len(found)} agree, largest relative difference {largest:.1e}')
        lines.append(f'  {"loss":14} {self.losses[0]:.9g} here, {self.losses[1]:.9g} in one process')
        if not any(map(math.isfinite, self.losses)):
            lines.append('the loss is not finite, neither here nor in one process; --locate says where it comes from')
        if self.unequal:
            lines.append(f'weights that must be alike are not: {self.unequal[0]}, and {len(self.unequal) - 1} more')
        if self.first is not None:
            lines.append(f'the first that differs: {self.first.name}: {self.first.tells}')
        lines.append(f'{"the same numbers" if self.same else "DIFFERENT"}, tolerance {self.tolerance:g}')
        return '\n'.join(lines)


def compared(folder: Path, tolerance: float | None) -> Report:
    """Of what the processes have left in `folder`."""
    alone = torch.load(folder / 'reference.pt', weights_only=False)
    ranks = [torch.load(path, weights_only=False) for path in sorted(folder.glob('layout-*.pt'))]
    tolerance = DEFAULT.get(alone['dtype'], HALF) if tolerance is None else tolerance
    pairs = [
        *_hidden(ranks, alone),
        *_results(ranks, alone),
        _number('loss', 'loss', ranks[0]['loss'], alone['loss']),
        *(_number('metrics', key, value, alone['metrics'].get(key)) for key, value in ranks[0]['metrics'].items()),
        *_gradients(alone['gradients']),
    ]
    unequal = list(dict.fromkeys(name for rank in ranks for name in rank['unequal']))
    return Report(pairs, unequal, tolerance, (ranks[0]['loss'], alone['loss']))


def _first_of(ranks: list[dict[str, Any]]) -> dict[int, int]:
    """In one process, the number of the first micro-batch of each replica."""
    counts = {rank['replica']: rank['micro_batches'] for rank in ranks}
    return {replica: sum(counts[earlier] for earlier in range(replica)) for replica in counts}


def _hidden(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> Iterator[Pair]:
    first = _first_of(ranks)
    found = [
        (place, rank['replica'], number, name, rank['stage'], whole)
        for rank in ranks
        for (number, place, name), whole in rank['hidden'].items()
    ]
    for place, replica, number, name, stage, whole in sorted(found, key=lambda entry: entry[:3]):
        other = alone['hidden'].get((first[replica] + number, place, name))
        if other is not None:
            where = f'{name} (pipeline stage {stage}, replica {replica}, micro-batch {number})'
            yield _tensors('hidden states', where, whole, other)


def _results(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> Iterator[Pair]:
    first = _first_of(ranks)
    found = [
        (rank['replica'], number, key, value)
        for rank in ranks
        for key, values in rank['results'].items()
        for number, value in enumerate(values)
    ]
    for replica, number, key, value in sorted(found, key=lambda entry: entry[:3]):
        other = alone['results'][key][first[replica] + number]
        yield _tensors(key, f'{key} (replica {replica}, micro-batch {number})', value, other)


def _tensors(kind: str, name: str, here: Tensor, alone: Tensor) -> Pair:
    if here.shape != alone.shape:
        return Pair(kind, name, math.inf, f'shape {tuple(here.shape)} here, {tuple(alone.shape)} in one process')
    if not here.numel():
        return Pair(kind, name, 0.0, '')
    here, alone = here.double(), alone.double()
    wrong = torch.where((here == alone) | (here.isnan() & alone.isnan()), 0, (here - alone).abs())
    wrong = wrong.nan_to_num(nan=torch.inf)
    at = tuple(int(i) for i in torch.unravel_index(wrong.argmax(), wrong.shape))
    relative = _relative(float(wrong.max()), float(alone.abs().nan_to_num(nan=0, posinf=0).max()))
    place = 'row {}, token {}' if len(at) > 1 else 'number {}'
    tells = f'{here[at]:.9g} here, {alone[at]:.9g} in one process, at {place.format(*at)}, where it differs most'
    return Pair(kind, name, relative, tells)


def _number(kind: str, name: str, here: float, alone: float | None) -> Pair:
    if alone is None:
        return Pair(kind, name, math.inf, 'not there in one process')
    same = here == alone or (math.isnan(here) and math.isnan(alone))
    relative = 0.0 if same else _relative(abs(here - alone), abs(alone))
    return Pair(kind, name, relative, f'{here:.9g} here, {alone:.9g} in one process')


def _gradients(found: list[Difference]) -> Iterator[Pair]:
    largest = max((one.scale for one in found), default=0.0)
    for one in found:
        tells = f'{one.here:.9g} here, {one.alone:.9g} in one process, at {list(one.at)}, where it differs most'
        relative = _relative(one.largest, max(one.scale, SMALL * largest))
        yield Pair('gradients', f'gradient of {one.name}', relative, tells)


def _relative(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf
