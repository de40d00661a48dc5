"""Ranks that fetch and load the same thing, in step."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from .groups import Groups, raise_together
from .hub import Snapshot

_T = TypeVar('_T')


class Ranks:
    """The ranks that load one thing, in step. None: all of `torch.distributed`, or this process alone.

    `what` names it, for errors. Every method that takes work or an item is collective.
    """

    def __init__(self, groups: Groups | None = None, what: str = 'code') -> None:
        if groups is None:
            world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
            groups = Groups(dp=world, dp_cp=world)
        self._groups, self._what = groups, what
        rank = dist.get_rank() if groups.size > 1 else 0
        self._me = (rank, socket.gethostname())
        self._all = sorted(self.gather(self._me))
        self.is_first = self._me == self._all[0]
        self.is_first_of_host = self._me == min(other for other in self._all if other[1] == self._me[1])

    def gather(self, item: _T) -> list[_T]:
        """The items of all of them."""
        return self._groups.gather_objects(item)

    def of_first(self, item: _T) -> _T:
        """The item of the first rank."""
        return min(self.gather((self._me[0], item)), key=lambda pair: pair[0])[1]

    def together(self, work: Callable[[], _T]) -> _T:
        """What `work` returns on this rank; where it fails on one, its error on all of them."""
        result = error = None
        try:
            result = work()
        except Exception as caught:
            if self._groups.size == 1:
                raise
            error = caught
        raise_together(self._groups, error)
        return result  # pyright: ignore[reportReturnType]

    def check_alike(self, what: str, item: Any) -> None:
        """ValueError on every rank unless all have the same item."""
        (first, theirs), *others = sorted(self.gather((self._me[0], item)), key=lambda pair: pair[0])
        for rank, other in others:
            if other != theirs:
                raise ValueError(
                    f'all ranks must load the same {self._what}, but the {what} of rank {rank} differ from those of '
                    f'rank {first}: {other} and {theirs}'
                )

    def fetched(self, get: Callable[[str | None], Snapshot], revision: str | None) -> Snapshot:
        """The snapshot of a repository that `get` fetches by its revision. The first rank finds the commit, and
        downloads; then the first rank of each other host, and then the others, find that one."""
        found: Snapshot | None = None
        for mine in (self.is_first, self.is_first_of_host, True):
            work = partial(get, revision) if mine and found is None else partial(_same, found)
            found = self.together(work)
            revision = self.of_first(found and found.commit) or revision
        assert found is not None
        self.check_alike('commits', found.commit)
        return found


def _same(item: _T) -> _T:
    return item
