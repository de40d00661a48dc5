"""What divides what: the sizes of a layout against the processes and the model, and the ranks of its groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..padding import padded_vocab_size
from .report import FAIL, OK, WARN, Line

Groups = dict[str, list[list[int]]]
KINDS = ('tp', 'pp', 'cp', 'dp', 'dp_cp', 'ep')


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout, and of the model where they are known. None is a size that is not checked."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    seq_length: int | None = None

    @property
    def product(self) -> int:
        return self.tp * self.pp * self.cp

    def sizes(self, world: int) -> dict[str, int]:
        """tp, pp, cp, ep, vpp, and dp where the processes can be divided so."""
        named = {name: getattr(self, name) for name in ('tp', 'pp', 'cp', 'ep', 'vpp')}
        return {**named, 'dp': world // self.product} if self.fits(world) else named

    def fits(self, world: int) -> bool:
        return world % self.product == 0 and world % (self.tp * self.ep * self.pp) == 0

    def groups(self, world: int) -> Groups:
        """The ranks of every group, in Megatron's order of ranks (tp-cp-ep-dp-pp, experts cut by the same TP)."""
        dp, experts = world // self.product, world // (self.tp * self.ep * self.pp)
        dense = {'tp': self.tp, 'cp': self.cp, 'dp': dp, 'pp': self.pp}
        return {
            **{kind: _cut(dense, (kind,)) for kind in ('tp', 'pp', 'cp', 'dp')},
            'dp_cp': _cut(dense, ('cp', 'dp')),
            'ep': _cut({'tp': self.tp, 'ep': self.ep, 'dp': experts, 'pp': self.pp}, ('ep',)),
        }

    def lines(self, world: int | None) -> list[Line]:
        """`world` is None for a process that was started alone, which says nothing of the run to come."""
        return [*self._processes(world), *self._model()]

    def _processes(self, world: int | None) -> Iterator[Line]:
        product = f'tp · pp · cp = {self.tp} · {self.pp} · {self.cp} = {self.product}'
        if world is None:
            yield Line('layout', OK, f'{product}: {self.product} processes, or a multiple of it')
        elif world % self.product:
            yield Line(
                'layout',
                FAIL,
                f'{product} does not divide the {world} process{"es" if world > 1 else ""}',
                f'start {self.product} processes or a multiple of it, for example by torchrun --nproc-per-node '
                f'{self.product}, or take sizes whose product divides {world}',
            )
        else:
            yield Line(
                'layout', OK, f'{product} on {world} process{"es" if world > 1 else ""}: dp {world // self.product}'
            )
        if self.ep > 1 and world is not None and world % self.product == 0:
            part = self.tp * self.ep * self.pp
            told = f'tp · ep · pp = {self.tp} · {self.ep} · {self.pp} = {part}'
            fix = f'take --ep of which tp · ep · pp divides {world}: {_divisors(world // (self.tp * self.pp))}'
            yield _divides('expert parallel', part, world, f'{told} divides {world} processes', fix)
        if self.vpp > 1 and self.pp == 1:
            fix = 'leave --vpp out, or take --pp 2 or more: virtual stages belong to a pipeline'
            yield Line('virtual pipeline', FAIL, f'vpp {self.vpp} with pp 1', fix)

    def _model(self) -> Iterator[Line]:
        tp, stages = self.tp, self.pp * self.vpp
        cut = f'pp · vpp = {stages}' if self.vpp > 1 else f'pp {stages}'
        if self.layers is not None:
            fix = f'take pp · vpp of {_divisors(self.layers)}, or give Megatron a pipeline_model_parallel_layout'
            yield _divides('layers', stages, self.layers, f'{cut} divides {self.layers} layers', fix)
        if self.heads is not None:
            fix = f'take --tp of {_divisors(self.heads)}'
            yield _divides('attention heads', tp, self.heads, f'tp {tp} divides {self.heads} heads', fix)
        if self.kv_heads is not None:
            yield from self._kv_heads(self.kv_heads)
        if self.hidden_size is not None:
            part, what = (self.heads, 'heads') if self.heads else (tp, 'tp')
            told = f'{what} {part} divides hidden size {self.hidden_size}'
            fix = f'take a hidden size that is a multiple of {part}, or {what} of which it is one'
            yield _divides('hidden size', part, self.hidden_size, told, fix)
        if self.vocab_size is not None:
            rows = padded_vocab_size(self.vocab_size, tp)
            told = f'{self.vocab_size} ids, padded to {rows} = {tp} · {rows // tp} (a multiple of 128 · tp)'
            yield Line('vocabulary', OK, told)
        if self.seq_length is not None:
            yield from self._sequence(self.seq_length)

    def _kv_heads(self, kv_heads: int) -> Iterator[Line]:
        if self.heads is not None and self.heads % kv_heads:
            fix = f'the model needs heads that are a multiple of its key-value heads, one of {_divisors(self.heads)}'
            yield Line('key-value heads', FAIL, f'{kv_heads} does not divide {self.heads} heads', fix)
        elif kv_heads % self.tp and self.tp % kv_heads:
            fix = f'take --tp of {_divisors(kv_heads)}, or a multiple of {kv_heads}'
            yield Line('key-value heads', FAIL, f'neither of tp {self.tp} and {kv_heads} divides the other', fix)
        elif kv_heads % self.tp:
            told = f'{kv_heads} on tp {self.tp}: each on {self.tp // kv_heads} ranks'
            fix = f'Megatron copies them; checkpoints of Hugging Face need --tp of {_divisors(kv_heads)}'
            yield Line('key-value heads', WARN, told, fix)
        else:
            yield Line('key-value heads', OK, f'tp {self.tp} divides {kv_heads}')

    def _sequence(self, length: int) -> Iterator[Line]:
        if self.cp > 1 and length % (2 * self.cp):
            fix = f'pad the sequence to {-(-length // (2 * self.cp)) * 2 * self.cp}: each rank has two slices of it'
            yield Line('sequence length', FAIL, f'2 · cp = {2 * self.cp} does not divide {length}', fix)
        elif length // self.cp % self.tp:
            part = self.cp * self.tp
            fix = f'pad the sequence to {-(-length // part) * part}, or leave sequence_parallel off'
            yield Line('sequence length', WARN, f'cp · tp = {part} does not divide {length}', fix)
        else:
            told = f'{length}: {length // self.cp} a rank, {length // self.cp // self.tp} under sequence parallelism'
            yield Line('sequence length', OK, told)


def _divides(check: str, part: int, whole: int, told: str, fix: str) -> Line:
    if whole % part:
        return Line(check, FAIL, told.replace(' divides ', ' does not divide '), fix)
    return Line(check, OK, told)


def _divisors(number: int) -> str:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return ', '.join(map(str, sorted({*small, *(number // d for d in small)})))


def _cut(sizes: dict[str, int], kept: tuple[str, ...]) -> list[list[int]]:
    """Rank groups along the dimensions `kept`; of `sizes` the first varies fastest from rank to rank."""
    places = [dict.fromkeys(sizes, 0)]
    for name, count in reversed(sizes.items()):
        places = [{**place, name: at} for place in places for at in range(count)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(at for name, at in place.items() if name not in kept), []).append(rank)
    return list(groups.values())
