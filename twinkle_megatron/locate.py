"""Where a loss that is NaN, infinite or unusually large comes from: the module, sample, token and rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .evaluation import Evaluation
from .groups import Groups, group_rank
from .megatron.engine import Engine
from .megatron.plan import Plan
from .megatron.randomness import same_random_numbers
from .megatron.restore import holders, restored
from .megatron.watching import Passing, every_module, hidden_states, whole_hidden


class BadModule(NamedTuple):
    """A module whose output is not finite. `place` orders modules over the stages; `ranks` are those that saw it."""

    place: float
    order: int
    name: str
    replica: int
    ranks: tuple[int, ...]


class Token(NamedTuple):
    """A token of a sample, which is a sequence, numbered as in the call; `token` is its place in the row. `value` is
    −log-prob of its label, in nats."""

    replica: int
    sample: int
    micro_batch: int
    token: int
    label: int | None
    value: float
    rank: int


@dataclass(frozen=True)
class Located:
    """What `MegatronModel.locate` found, the same on every rank. `str` of it is a report.

    Args:
        loss: of the global batch, in eval mode.
        modules: the first whose output is not finite, one for each data parallel replica that has any, in the order in
            which a micro-batch passes them.
        hidden: tokens whose hidden states are not finite behind the first such layer, `value` NaN.
        tokens: those whose log-prob is not finite, else those with the smallest, worst first.
    """

    loss: float
    modules: list[BadModule]
    hidden: list[Token]
    tokens: list[Token]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and not self.modules and all(math.isfinite(t.value) for t in self.tokens)

    def __str__(self) -> str:
        lines = [f'the loss is {self.loss:g}']
        for bad in self.modules:
            ranks = ', '.join(map(str, bad.ranks))
            lines.append(f'first output that is not finite: {bad.name}, on rank {ranks} (replica {bad.replica})')
        if self.hidden:
            lines.append('hidden states that are not finite behind it:')
            lines += [f'  {_place(token)}' for token in self.hidden]
        if not self.modules and not math.isfinite(self.loss) and all(math.isfinite(t.value) for t in self.tokens):
            lines.append('every output and every log-prob is finite: the loss itself, or one of its keywords, is not')
        if self.tokens:
            lines.append('largest losses of a token, in nats:')
            lines += [f'  {t.value:12.6g}  {_place(t)}, label {t.label}' for t in self.tokens]
        return '\n'.join(lines)


def _place(token: Token) -> str:
    return (
        f'sample {token.sample} (micro-batch {token.micro_batch} of replica {token.replica}), token {token.token}, '
        f'on rank {token.rank}'
    )


def locate(engine: Engine, plan: Plan, evaluation: Evaluation, top: int) -> Located:
    """One forward pass in eval mode with a look at every module. Collective over the layout."""
    groups = engine.groups
    first: dict[int, BadModule] = {}
    behind: list[tuple[Passing, Tensor]] = []
    order = 0

    def look(passing: Passing, hidden: Tensor) -> None:
        nonlocal order
        order += 1
        number = passing.number
        if number not in first and not bool(torch.isfinite(hidden).all()):
            first[number] = BadModule(passing.place, order, passing.name, group_rank(groups.dp), (_rank(),))

    sequence_parallel = bool(getattr(engine.config, 'sequence_parallel', False))

    def look_at_tokens(passing: Passing, hidden: Tensor) -> None:
        bad = (~torch.isfinite(hidden)).any(-1).float()
        whole = whole_hidden(passing, bad, groups, sequence_parallel) > 0
        if bool(whole.any()):
            behind.append((passing, whole))

    with same_random_numbers(), every_module(engine.runner, look), hidden_states(engine.runner, look_at_tokens):
        outcome = engine.forward(plan, evaluation)
    samples = _Samples(plan, groups)
    hidden = [
        (passing.place, samples.token(passing.number, row, column, math.nan))
        for passing, bad in behind
        for row, column in bad.nonzero()[:top].tolist()
    ]
    tokens = _worst(outcome.results, samples, evaluation, top) if groups.is_last_stage else []
    if group_rank(groups.tp) or group_rank(groups.cp):  # they have found the same
        hidden, tokens = [], []
    mine = (list(first.values()), hidden, tokens)
    modules, hidden, tokens = (
        [entry for part in parts for entry in part] for parts in zip(*groups.gather_objects(mine), strict=True)
    )
    place = min((place for place, _ in hidden), default=0)
    return Located(
        outcome.loss,
        _first_modules(modules),
        [token for at, token in hidden if at == place][:top],
        sorted(tokens, key=_worst_first)[:top],
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _first_modules(found: Iterable[BadModule]) -> list[BadModule]:
    """Of each replica the first, with all ranks that saw that module give something not finite."""
    firsts: dict[int, BadModule] = {}
    for bad in sorted(found, key=lambda bad: (bad.place, bad.order)):
        other = firsts.setdefault(bad.replica, bad)
        if other.name == bad.name and not set(bad.ranks) <= set(other.ranks):
            firsts[bad.replica] = other._replace(ranks=tuple(sorted({*other.ranks, *bad.ranks})))
    return sorted(firsts.values())


def _worst_first(token: Token) -> tuple[bool, float]:
    return (math.isfinite(token.value), -token.value if math.isfinite(token.value) else 0)


class _Samples:
    """The sequences of this replica's micro-batches, by their numbers in the call."""

    def __init__(self, plan: Plan, groups: Groups) -> None:
        self._items = [item for item in plan.items if not item.is_padding]
        self._groups = groups
        counts = [int(item.batch['sequence_tokens'].numel()) for item in self._items]
        self._before = [sum(counts[:i]) for i in range(len(counts))]
        self._order = None if plan.packed is None else plan.packed.order

    def labels(self, number: int) -> Tensor:
        """Of a micro-batch, in the caller's shape."""
        item = self._items[number]
        return restored(item, item.batch['labels'], None)

    def token(self, number: int, row: int, column: int, value: float) -> Token:
        item = self._items[number]
        sample = self._before[number] + int(restored(item, item.batch['sequence_ids'], None)[row, column])
        holder = int(holders(item, self._groups.cp)[row, column])
        return Token(
            replica=group_rank(self._groups.dp),
            sample=sample if self._order is None else self._order[sample],
            micro_batch=number,
            token=column,
            label=int(self.labels(number)[row, column]),
            value=value,
            rank=_rank() if self._groups.cp is None else dist.get_global_rank(self._groups.cp, holder),
        )


def _worst(results: list[Tensor], samples: _Samples, evaluation: Evaluation, top: int) -> list[Token]:
    """Of this replica's micro-batches, on the last stage. Every context parallel rank finds the same."""
    if evaluation.head is not None:
        return []
    found = []
    for number, logps in enumerate(results):
        trained = samples.labels(number).to(logps.device) != evaluation.ignore_index
        values = -logps.double()
        keys = torch.where(torch.isfinite(values), values, torch.inf).masked_fill(~trained, -torch.inf)
        for flat in keys.reshape(-1).argsort(descending=True, stable=True)[:top].tolist():
            row, column = divmod(flat, values.shape[1])
            if trained[row, column]:
                found.append(samples.token(number, row, column, float(values[row, column])))
    return sorted(found, key=_worst_first)[:top]
