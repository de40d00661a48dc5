"""What was found: lines for people, an object for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from ..leaving import leave

OK, WARN, FAIL = 'ok', 'warn', 'FAIL'


@dataclass(frozen=True)
class Line:
    """One check. `fix` is there for every line that is not ok; `ranks` are those that it is about, if not all."""

    check: str
    status: str
    value: str
    fix: str = ''
    ranks: tuple[int, ...] = ()


@dataclass
class Report:
    """All lines, equal on every rank that got them. `prints` is True on the one rank that is to show them."""

    lines: list[Line]
    world: int = 1
    hosts: list[str] = field(default_factory=list)
    layout: dict[str, int] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    prints: bool = False

    @property
    def ok(self) -> bool:
        """Whether no line fails; warnings are allowed."""
        return all(line.status != FAIL for line in self.lines)

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def to_json(self) -> str:
        """One object, on one line."""
        told = {key: value for key, value in vars(self).items() if key not in ('lines', 'prints')}
        return json.dumps({'ok': self.ok, 'lines': [asdict(line) for line in self.lines], **told})

    @classmethod
    def from_json(cls, text: str) -> Report:
        told = json.loads(text)
        del told['ok']
        lines = [Line(**{**line, 'ranks': tuple(line['ranks'])}) for line in told.pop('lines')]
        return cls(lines, **told)

    def __str__(self) -> str:
        """A table, one line a check, and under a line that is not ok its fix."""
        names = max((len(line.check) for line in self.lines), default=0)
        rows: list[str] = []
        for line in self.lines:
            rows.append(f'{line.status:<4}  {line.check:<{names}}  {line.value}'.rstrip())
            if line.fix:
                rows.append(f'{"":<{names + 8}}fix: {line.fix}')
        counts = {status: sum(line.status == status for line in self.lines) for status in (OK, WARN, FAIL)}
        rows.append(', '.join(f'{count} {status}' for status, count in counts.items() if count or status == OK))
        return '\n'.join(rows)

    def show(self, as_json: bool = False) -> None:
        """Prints on the one rank that is to print."""
        if not self.prints:
            return
        text = self.to_json() if as_json else str(self)
        encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
        try:
            print(text.encode(encoding, 'replace').decode(encoding), flush=True)
        except BrokenPipeError:  # whoever read, as `head` does, has had enough
            sys.stdout = None

    def leave(self) -> NoReturn:
        """Ends this process at once with the exit code: a collective that hangs would keep it otherwise."""
        leave(self.exit_code)


def span(ranks: Iterable[int]) -> str:
    """
    >>> span([4, 0, 1, 2, 7, 8])
    '0-2, 4, 7-8'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ', '.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)


def of_ranks(ranks: Collection[int]) -> str:
    """'rank 3', or 'ranks 0-2, 4'."""
    return f'rank{"s" if len(set(ranks)) > 1 else ""} {span(ranks)}'


def alike(check: str, values: Mapping[int, Any], fix: str, status: str = FAIL) -> Line:
    """One line for a value that has to be the same on all ranks; those that differ from most are named."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault('none' if value is None else str(value), []).append(rank)
    most, *others = sorted(by_value, key=lambda value: (-len(by_value[value]), by_value[value][0]))
    if not others:
        return Line(check, OK, most)
    told = '; '.join(f'{value} on {of_ranks(by_value[value])}' for value in (*others, most))
    return Line(check, status, told, fix, tuple(sorted(rank for other in others for rank in by_value[other])))


def size(count: float) -> str:
    """
    >>> size(3 * 2**20), size(139.5 * 2**30)
    ('3 MiB', '139.5 GiB')
    """
    for unit in ('B', 'KiB', 'MiB', 'GiB'):
        if count < 1024:
            return f'{count:.4g} {unit}'
        count /= 1024
    return f'{count:.4g} TiB'
