"""Timed all-reduces on the groups of the layout, and the clocks of the hosts, each in a thread that may hang."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from .layout import KINDS, Groups
from .meeting import Meeting, within

BYTES = {'cpu': 4 * 2**20, 'cuda': 64 * 2**20}
ROUNDS = 5
CLOCK_ROUNDS = 10
LONGEST = len(KINDS) + 2  # in graces, beyond the timeout: what a rank waits for others in all its probes


class Network:
    """The probes of one rank. After the first that hangs or lacks a rank, it takes part in no other, and says so, so
    that all of them take hardly longer than one timeout."""

    def __init__(self, meeting: Meeting, device: str, gpu: int) -> None:
        self.meeting, self.device, self.gpu = meeting, device, gpu
        self.stuck = ''  # in which probe
        self._begun = 0

    def groups(self, groups: Groups) -> list[dict[str, Any]]:
        """One result for each group of several ranks that this rank is in; a group of two kinds is timed once."""
        found: dict[tuple[tuple[int, ...], ...], dict[str, Any]] = {}
        for kind, lists in groups.items():
            key = tuple(map(tuple, lists))
            if len(lists[0]) == 1:
                continue
            if key in found:
                found[key]['kinds'].append(kind)
                continue
            mine = next(ranks for ranks in lists if self.meeting.rank in ranks)
            told = self._probe(f'group {kind} {mine[0]}', mine, self.device, self._all_reduces)
            found[key] = {'kinds': [kind], 'ranks': mine, **told}
        return list(found.values())

    def clock(self, ranks: Sequence[int]) -> dict[str, Any] | None:
        """Offsets of the clocks of `ranks`, one a host, from the first of them, in seconds; None on another rank."""
        if self.meeting.rank not in ranks or len(ranks) == 1:
            return None
        return {'ranks': list(ranks), **self._probe('clock', ranks, 'cpu', self._clocks)}

    def _probe(
        self, name: str, ranks: Sequence[int], device: str, work: Callable[..., dict[str, Any]]
    ) -> dict[str, Any]:
        """What `work` finds, or `{'error', 'stage'}`."""
        meeting = self.meeting
        self._begun += 1
        meeting.put(f'{name}/ready', self.stuck)
        absent = [rank for rank in ranks if rank not in meeting.present]
        if absent or self.stuck:
            return {'error': 'absent' if absent else 'skipped', 'about': absent or self.stuck}
        ready = meeting.collect(f'{name}/ready', ranks, meeting.timeout + meeting.grace * self._begun)
        absent = [rank for rank in ranks if rank not in ready]
        if absent:
            self.stuck = name
            meeting.gone.update(absent)
            return {'error': 'absent', 'about': absent}
        skipping = {rank: stuck for rank, stuck in ready.items() if stuck}
        if skipping:
            return {'error': 'skipped', 'about': next(iter(skipping.values()))}
        return self._run(name, ranks, device, work)

    def _run(self, name: str, ranks: Sequence[int], device: str, work: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        told: dict[str, Any] = {}
        stage = ['connecting']

        def run() -> None:
            try:
                group = _group(self.meeting, name, ranks, device, self.gpu)
                told.update(work(group, len(ranks), list(ranks).index(self.meeting.rank), device, stage))
                _end(group, device)
            except Exception as error:
                first = str(error).splitlines()[0] if str(error) else type(error).__name__
                told.update(error='raised', about=re.sub(r'^\[\S+:\d+\] ', '', first))

        if not within(self.meeting.timeout, run):
            self.stuck = name
            return {'error': 'timeout', 'about': '', 'stage': stage[0]}
        if told.get('error') == 'raised':
            self.stuck = name
        return {**told, 'stage': stage[0]} if 'error' in told else dict(told)

    def _all_reduces(self, group: Any, size: int, index: int, device: str, stage: list[str]) -> dict[str, Any]:
        """Milliseconds of an all-reduce, the median of some; the sum of the first, of whole numbers, is compared."""
        import torch

        count = BYTES[device] // 8
        pattern = torch.arange(count, device=device) % 1009 + 1
        values = pattern * (index + 1)
        stage[0] = 'in the first all-reduce'
        all_reduce(group, values, self.meeting.timeout)
        stage[0] = 'comparing the sum'
        expected = pattern * (size * (size + 1) // 2)
        wrong = (values != expected).nonzero()
        told: dict[str, Any] = {'bytes': 8 * count}
        if len(wrong):
            at = int(wrong[0])
            told['error'] = 'sum'
            told['about'] = f'{int(values[at])} in place of {int(expected[at])}, {len(wrong)} of {count} sums are wrong'
        stage[0] = 'in a timed all-reduce'
        times: list[float] = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            all_reduce(group, values, self.meeting.timeout)
            times.append((time.perf_counter() - begun) * 1e3)
        told['ms'] = statistics.median(times)
        return told

    def _clocks(self, group: Any, size: int, index: int, device: str, stage: list[str]) -> dict[str, Any]:
        """Each round, everybody tells when it began, and notes when it has heard from all. What has been heard was
        told before, which bounds the offset of two clocks from both sides, as a round trip does."""
        import torch

        began = torch.zeros(CLOCK_ROUNDS, size, dtype=torch.float64)
        ended = torch.zeros(CLOCK_ROUNDS, dtype=torch.float64)
        stage[0] = 'comparing clocks'
        for number in range(-2, CLOCK_ROUNDS):  # two to warm up
            mine = torch.tensor([clock()], dtype=torch.float64)
            heard = _gather(group, mine, size, self.meeting.timeout)
            if number >= 0:
                ended[number] = clock()
                began[number] = heard.flatten()
        all_ended = _gather(group, ended, size, self.meeting.timeout)
        lower = (began - all_ended[0][:, None]).amax(0)  # the first one heard it after it was told
        upper = (all_ended.T - began[:, :1]).amin(0)
        return {
            'offsets': ((lower + upper) / 2).tolist(),
            'uncertain': ((upper - lower).clamp(min=0) / 2).tolist(),
        }


def clock() -> float:
    """Seconds, of this host's clock."""
    return time.time()


def all_reduce(group: Any, values: Any, seconds: float) -> None:
    """Sums in place, and waits for it."""
    work = group.allreduce([values])
    if values.is_cuda:
        import torch

        work.wait()
        torch.cuda.synchronize()
    else:
        work.wait(timedelta(seconds=seconds))


def _gather(group: Any, mine: Any, size: int, seconds: float) -> Any:
    import torch

    parts = [torch.empty_like(mine) for _ in range(size)]
    group.allgather([parts], [mine]).wait(timedelta(seconds=seconds))
    return torch.stack(parts)


def _group(meeting: Meeting, name: str, ranks: Sequence[int], device: str, gpu: int) -> Any:
    """A process group of its own, which nothing but this probe uses, so that one that hangs harms no other."""
    import torch
    import torch.distributed as dist

    store: Any = meeting.store
    with contextlib.suppress(Exception):  # else this thread would lock the store while it waits; old torch cannot
        store = store.clone()
    store = dist.PrefixStore(f'groups/{name}', store)  # pyright: ignore[reportPrivateImportUsage]
    index = list(ranks).index(meeting.rank)
    if device == 'cpu':
        return dist.ProcessGroupGloo(store, index, len(ranks), timedelta(seconds=meeting.timeout))
    torch.cuda.set_device(gpu)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # at its end NCCL's watchdog ends the process, and with it the report
    return dist.ProcessGroupNCCL(store, index, len(ranks), options)


def _end(group: Any, device: str) -> None:
    """Gives back the memory on the GPU. That this fails is not a fault of what was measured."""
    if device == 'cuda':
        with contextlib.suppress(Exception):
            (getattr(group, 'shutdown', None) or group._shutdown)()
