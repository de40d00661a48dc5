"""One examination, from the first word to the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from . import environment, machine, packages
from .join import Place, Unreached, meet_again, place_in_world
from .layout import Layout
from .meeting import Meeting, Silent, Stop, StoreLost
from .network import LONGEST, Network
from .report import FAIL, Line, Report, of_ranks
from .verdict import judged


def check(layout: Layout | None = None, *, paths: Sequence[str] = (), timeout: float = 60) -> Report:
    """What `python -m twinkle_megatron.doctor` finds, in processes that `torch.distributed` has joined already, or in
    this process alone.

    Collective over the world, by its store: every rank calls it with the same arguments, before Megatron's groups are
    made or after. Equal on every rank; `prints` is True on one. It makes process groups of its own; a collective that
    hangs keeps its thread, so end the process by `report.leave()` where `report.ok` is False. Nothing hangs: the call
    takes two or three times `timeout` seconds at most.
    """
    place = place_in_world()
    try:
        meeting = meet_again(timeout)
    except Unreached as error:
        return error.report(place)
    return examined(layout or Layout(), place, meeting, paths)


def require(layout: Layout | None = None, *, paths: Sequence[str] = (), timeout: float = 60) -> Report:
    """The same for a launch: one rank prints the table, and where a line fails every rank ends with exit code 1."""
    report = check(layout, paths=paths, timeout=timeout)
    report.show()
    if not report.ok:
        report.leave()
    return report


def examined(layout: Layout, place: Place, meeting: Meeting, paths: Sequence[str]) -> Report:
    """The report, equal on every rank that is alive."""
    facts: dict[str, Any] = {}
    try:
        return _examined(layout, place, meeting, paths, facts)
    except StoreLost as error:
        fix = 'look at the log of rank 0: it has ended, or its host cannot be reached any more'
        line = Line('processes', FAIL, f'the store of the run, in rank 0 or torchrun, is gone: {error}', fix, (0,))
    except Silent as error:
        fix = 'look at the logs of the other ranks'
        line = Line('processes', FAIL, f'{error}: {of_ranks([meeting.rank])} has waited in vain', fix)
    report = judged(layout, place, meeting, {meeting.rank: facts} if 'groups' in facts else {})
    report.lines.insert(0, line)
    present = meeting.present if len(meeting.present) > 1 else list(range(meeting.world))
    alive = [rank for rank in present if rank not in meeting.gone and (rank > 0 or place.agent)]
    report.prints = meeting.rank == min(alive, default=0)
    return report


def _examined(layout: Layout, place: Place, meeting: Meeting, paths: Sequence[str], facts: dict[str, Any]) -> Report:
    import torch

    Stop.stage = 0
    sizes = ', '.join(f'{name} {value}' for name, value in vars(layout).items() if value is not None)
    host = machine.hostname()
    mine = {'host': host, 'gpu': torch.cuda.is_available(), 'sizes': sizes}
    meeting.put('hello', mine)

    def roster(seconds: float) -> list[Any]:
        return sorted(meeting.collect('hello', range(meeting.world), min(seconds, meeting.timeout)).items())

    told, _ = meeting.decide('roster', roster, meeting.timeout + meeting.grace)
    hello = dict(told)
    late = hello.setdefault(meeting.rank, mine) is mine
    meeting.present = sorted(hello)
    here = [rank for rank in meeting.present if hello[rank]['host'] == host]
    first_of: dict[str, int] = {}
    for rank in meeting.present:
        first_of.setdefault(hello[rank]['host'], rank)
    firsts = list(first_of.values())
    local_rank = None if place.alone else here.index(meeting.rank) if place.local_rank is None else place.local_rank
    local_world = place.local_world or len(here)

    facts |= {'rank': meeting.rank, 'host': host, 'local_rank': local_rank, 'versions': packages.versions()}
    facts |= machine.facts(paths, meeting.world, local_rank)
    facts |= environment.facts(len(facts['gpus']), layout.tp * layout.cp > 1, local_world)
    facts['master_loops_to'] = environment.loopback(place.address)
    facts |= {'gpu': mine['gpu'], 'sizes': sizes}

    device = 'cuda' if all(about['gpu'] for about in hello.values()) else 'cpu'
    network = Network(meeting, device, machine.gpu_of(local_rank))
    network.stuck = 'its start, which was late' if late else ''
    alike = all(about['sizes'] == sizes for about in hello.values())
    facts['groups'] = network.groups(layout.groups(meeting.world)) if alike and layout.fits(meeting.world) else []
    facts['clock'] = network.clock(firsts)
    meeting.put('network', sorted(meeting.gone))
    looks = meeting.rank in firsts and Stop.told_at is None
    facts['packages'] = packages.packages(meeting.timeout) if looks else None
    meeting.put('facts', facts)

    def verdict(seconds: float) -> str:
        gone = _finished(meeting, min(seconds, meeting.timeout + LONGEST * meeting.grace))
        left = [rank for rank in meeting.present if rank not in gone]
        ranks = meeting.collect('facts', left, min(seconds, meeting.timeout + meeting.grace))
        seats = {rank: count for rank in meeting.present if (count := meeting.count('seat', rank)) > 1}
        silent = [rank for rank in meeting.present if rank not in ranks]
        return judged(layout, place, meeting, ranks, silent, seats).to_json()

    leads = meeting.rank == min(set(meeting.present) - meeting.gone)
    Stop.stage = 1 if leads else 2
    text, prints = meeting.decide('verdict', verdict, 2 * meeting.timeout + (LONGEST + 2) * meeting.grace)
    report = Report.from_json(text)
    report.prints = prints
    return report


def _finished(meeting: Meeting, seconds: float) -> set[int]:
    """Waits until all ranks have gone through their probes; returns those that others have waited for in vain and that
    have not told anything themselves."""
    ends, pending, gone = time.monotonic() + seconds, set(meeting.present), set(meeting.gone)
    while pending and not Stop.over(ends):
        came = meeting.collect('network', pending, meeting.grace / 2)
        pending -= set(came)
        gone.update(rank for named in came.values() for rank in named)
        if pending <= gone:
            break
    return pending
