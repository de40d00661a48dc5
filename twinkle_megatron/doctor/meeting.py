"""Ranks that tell each other things through the store, with an end to every wait.

No collective is used for it: a rank that hangs or is gone costs the others one wait, and the report comes all the same.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

_T = TypeVar('_T')


class StoreLost(Exception):
    """The store, which lives in rank 0 or in torchrun, does not answer any more."""


class Silent(Exception):
    """No rank told what was to be told."""


def within(seconds: float, work: Callable[[], None]) -> bool:
    """Whether `work`, which must not raise, has ended in time. It runs in a thread, which is left alone if not."""
    thread = threading.Thread(target=work, name='doctor', daemon=True)
    thread.start()
    ends = time.monotonic() + seconds
    while thread.is_alive() and not Stop.over(ends):
        thread.join(0.02)  # in short turns, so that signals are heard
    return not thread.is_alive()


class Stop:
    """Whether this process was told to stop, as torchrun and SLURM do where another rank has died. Then the report
    comes soon: the waits of the first stage end a second later, those of the next two more, and so on."""

    told_at: float | None = None
    stage = 0

    @classmethod
    def tell(cls) -> None:
        cls.told_at = cls.told_at or time.monotonic()

    @classmethod
    def over(cls, ends: float) -> bool:
        """Whether a wait until `ends` is over."""
        return time.monotonic() > (ends if cls.told_at is None else min(ends, cls.told_at + 1 + 2 * cls.stage))


class Meeting:
    """The ranks of one examination. `timeout` seconds is the longest wait for a rank."""

    def __init__(self, store: Any, rank: int, world: int, timeout: float) -> None:
        self.store, self.rank, self.world, self.timeout = store, rank, world, timeout
        self.grace = min(2.0, timeout / 10)  # by which a rank waits longer for one that waits himself
        self.present: list[int] = [rank]  # whom the roster names
        self.gone: set[int] = set()  # of them, those that a probe of this rank has waited for in vain

    def put(self, name: str, item: Any) -> None:
        """Tells `item`, of JSON, as this rank's."""
        self._ask('set', f'{name}/{self.rank}', json.dumps(item))

    def add(self, name: str) -> int:
        """How often this was called for that name, by all ranks."""
        return self._ask('add', name, 1)

    def count(self, name: str, rank: int) -> int:
        """How often `add` was called for that name with that rank."""
        return self._ask('add', f'{name}/{rank}', 0)

    def part(self, keeps_store: bool) -> None:
        """The last word. The rank that keeps the store waits a moment for those who have not read all yet."""
        try:
            self.put('left', True)
            if keeps_store:
                self.collect('left', [rank for rank in self.present if rank not in self.gone], 2 * self.grace)
        except StoreLost:
            return

    def collect(self, name: str, ranks: Collection[int], seconds: float | None = None) -> dict[int, Any]:
        """What `ranks` have told under that name; after `seconds` without those that have not."""
        keys = {f'{name}/{rank}': rank for rank in ranks}
        if not self._wait(list(keys), self.timeout if seconds is None else seconds):
            keys = {key: rank for key, rank in keys.items() if self._ask('check', [key])}
        return {rank: json.loads(self._ask('get', key)) for key, rank in keys.items()}

    def decide(self, name: str, work: Callable[[float], _T], seconds: float) -> tuple[_T, bool]:
        """What one rank found, told to all, and whether this was the one. That is the first one present; where it
        tells nothing within `seconds`, another takes over. `work` gets the seconds that it may wait for others.
        `Silent` where nobody tells anything."""
        told, leads = f'{name}/told', self.rank == min(set(self.present) - self.gone)
        for attempt in range(3):
            if not leads and self._wait([told], seconds if attempt == 0 else 2 * self.grace):
                break
            if self.add(f'{name}/attempt {attempt}') == 1:
                found = work(seconds if leads else self.grace / 2)
                if self.add(f'{name}/found') == 1:  # else another one was quicker
                    self._ask('set', told, json.dumps(found))
                    return found, True
            leads = False
        if not self._wait([told], 2 * self.grace):
            raise Silent(f'no rank has told the {name}')
        return json.loads(self._ask('get', told)), False

    def _wait(self, keys: Sequence[str], seconds: float) -> bool:
        ends, pause = time.monotonic() + seconds, 0.002
        while not self._ask('check', keys):
            if Stop.over(ends):
                return False
            time.sleep(pause)  # in Python, so that signals are heard
            pause = min(0.1, pause * 1.3)
        return True

    def _ask(self, what: str, *args: Any) -> Any:
        try:
            return getattr(self.store, what)(*args)
        except Exception as error:  # of a type that differs between versions and stores
            raise StoreLost(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
