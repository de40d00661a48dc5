"""From what the ranks have told to the lines of the report."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from . import environment, machine, packages
from .join import Place
from .layout import KINDS, Layout
from .meeting import Meeting, Stop
from .report import FAIL, OK, WARN, Line, Report, alike, of_ranks, size, span


def judged(
    layout: Layout,
    place: Place,
    meeting: Meeting,
    ranks: Mapping[int, Mapping[str, Any]],
    silent: Sequence[int] = (),
    seats: Collection[int] = (),
) -> Report:
    """`ranks` are the facts of those that have told them, `silent` those that came and have not; `seats` the ranks that
    several processes came as."""
    world = meeting.world
    hosts: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        hosts.setdefault(ranks[rank]['host'], []).append(rank)
    lines = [*layout.lines(None if place.alone else world), *_processes(place, meeting, ranks, hosts, silent, seats)]
    groups = _groups(ranks)
    if ranks:
        never = [rank for rank in range(world) if rank not in meeting.present]
        first = ranks[min(ranks)]
        elsewhere = never if place.local_world != world else ()  # else all were to be on this host
        sizes = alike(
            'sizes', {rank: facts['sizes'] for rank, facts in ranks.items()}, 'give all ranks the same options'
        )
        lines += [sizes] if sizes.status != OK else []
        lines += environment.master_line(place.address, first['master_loops_to'], len(hosts) > 1, elsewhere)
        lines += packages.version_lines(ranks)
        lines += packages.package_lines(ranks)
        lines += _group_lines(groups) or [_no_groups(place, layout, world)]
        lines += _slow_groups(groups)
        lines += _clock(ranks, hosts)
        lines += machine.machine_lines(ranks)
        lines += [*machine.host_lines(ranks, 'environment'), *environment.alike_lines(ranks)]
    told = [{key: value for key, value in ranks[rank].items() if key != 'groups'} for rank in sorted(ranks)]
    return Report(lines, world, list(hosts), layout.sizes(world), groups, told)


def _processes(
    place: Place,
    meeting: Meeting,
    ranks: Mapping[int, Mapping[str, Any]],
    hosts: Mapping[str, list[int]],
    silent: Sequence[int],
    seats: Collection[int],
) -> list[Line]:
    if place.alone:
        return [Line('processes', OK, 'this one alone, so nothing between processes was looked at')]
    lines: list[Line] = []
    never = [rank for rank in range(meeting.world) if rank not in meeting.present]
    if never:
        told = f'{of_ranks(never)} of {meeting.world} did not come within {meeting.timeout:g} s'
        fix = 'look at their logs: did they start, with the same MASTER_ADDR and MASTER_PORT? is there a firewall?'
        lines.append(Line('processes', FAIL, told, fix, tuple(never)))
    if silent:
        told = f'{of_ranks(silent)} came, and answered no more'
        fix = 'look at their logs: were they killed, for want of memory, or do they hang? py-spy dump --pid shows where'
        lines.append(Line('processes', FAIL, told, fix, tuple(silent)))
    if seats:
        told = f'{of_ranks(seats)} came more than once'
        fix = 'another job uses the same MASTER_ADDR and MASTER_PORT: take another port'
        lines.append(Line('processes', FAIL, told, fix, tuple(seats)))
    if Stop.told_at is not None:
        fix = 'did another process end, so that torchrun or SLURM stopped the rest? its log says why'
        lines.append(Line('processes', FAIL, 'told to stop (SIGTERM) before the end', fix))
    lines = lines or [Line('processes', OK, f'all {meeting.world} came')]
    if not ranks:
        return lines
    told = ', '.join(f'{host} ({of_ranks(there)})' for host, there in hosts.items())
    uneven = len({len(there) for there in hosts.values()}) > 1
    fix = 'hosts have different numbers of processes: is that meant?' if uneven else ''
    lines.append(Line('hosts', WARN if uneven else OK, told, fix))
    having = [rank for rank in ranks if ranks[rank]['gpu']]
    if having and len(having) < len(ranks):
        without = [rank for rank in ranks if rank not in having]
        fix = 'look at nvidia-smi and CUDA_VISIBLE_DEVICES there, and at whether torch is built for CUDA'
        lines.append(Line('GPUs', FAIL, f'{of_ranks(without)} see none, others do', fix, tuple(without)))
    return lines


def _no_groups(place: Place, layout: Layout, world: int) -> Line:
    if world == 1:
        return Line('all-reduce', OK, 'not run: one process')
    return Line('all-reduce', OK, 'not run: the layout does not fit the processes, or differs between them')


def _groups(ranks: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each group with what its ranks found: kinds, ranks, and bytes, ms, gb_per_s or error."""
    members: dict[tuple[str, tuple[int, ...]], dict[int, Mapping[str, Any]]] = {}
    for rank, facts in ranks.items():
        for told in facts['groups']:
            members.setdefault((' = '.join(told['kinds']), tuple(told['ranks'])), {})[rank] = told
    order = {kind: at for at, kind in enumerate(KINDS)}
    found: list[dict[str, Any]] = []
    for (kinds, named), by in sorted(members.items(), key=lambda one: (order[one[0][0].split(' ')[0]], one[0][1])):
        group: dict[str, Any] = {'kinds': kinds.split(' = '), 'ranks': list(named), 'error': _error(by, named)}
        timed = [told['ms'] for told in by.values() if 'ms' in told]
        if timed and not group['error']:
            count = max(told.get('bytes', 0) for told in by.values())
            group |= {'bytes': count, 'ms': max(timed), 'gb_per_s': count / max(timed) / 1e6}
        found.append(group)
    return found


def _error(by: Mapping[int, Mapping[str, Any]], ranks: tuple[int, ...]) -> str | None:
    """What went wrong in one group, the likeliest cause first."""
    errors = {rank: told for rank, told in by.items() if 'error' in told}
    kinds = {kind: [r for r, told in errors.items() if told['error'] == kind] for kind in _ERRORS}
    if kinds['sum']:
        return '; '.join(f'wrong sum on rank {rank}: {errors[rank]["about"]}' for rank in kinds['sum'][:4])
    if kinds['absent']:
        absent = sorted({rank for r in kinds['absent'] for rank in errors[r]['about']})
        return f'{of_ranks(absent)} did not enter'
    if kinds['timeout'] or kinds['raised']:
        stages: dict[str, list[int]] = {}
        for rank in (*kinds['timeout'], *kinds['raised']):
            stages.setdefault(errors[rank]['stage'], []).append(rank)
        told = ', '.join(f'{of_ranks(there)} {stage}' for stage, there in stages.items())
        through = [rank for rank in by if rank not in errors]
        told += f', {of_ranks(through)} through' if through else ''
        silent = [rank for rank in ranks if rank not in by]
        told += f', {of_ranks(silent)} silent' if silent else ''
        said = sorted({errors[rank]['about'] for rank in kinds['raised']})
        return f'no end: {told}' + (f' ({said[0][:200]})' if said else '')
    if kinds['skipped']:
        return f'not run: a rank of it was stuck in {errors[kinds["skipped"][0]]["about"]}'
    return None


_ERRORS = ('sum', 'absent', 'timeout', 'raised', 'skipped')


def _name(group: Mapping[str, Any]) -> str:
    return f'all-reduce {" = ".join(group["kinds"])}'


def _group_lines(groups: list[dict[str, Any]]) -> list[Line]:
    """One for the groups of a kind that are well, and one for each other."""
    lines: list[Line] = []
    for name in dict.fromkeys(map(_name, groups)):
        those = [group for group in groups if _name(group) == name]
        well = sorted((group for group in those if not group['error']), key=lambda group: group['ms'])
        if well:
            best, worst = well[0], well[-1]
            told = f'{size(worst["bytes"])} in {worst["ms"]:.3g} ms, {worst["gb_per_s"]:.3g} GB/s, ranks {_few(worst)}'
            if len(well) > 1:
                told = f'{len(well)} groups, the slowest {told}, the quickest in {best["ms"]:.3g} ms'
            lines.append(Line(name, OK, told))
        lines += [_failed(group) for group in those if group['error']]
    return lines


def _few(group: Mapping[str, Any]) -> str:
    """The ranks of a group; of many, those in the middle are left out."""
    ranks = group['ranks']
    return span(ranks) if len(ranks) < 9 else f'{span(ranks[:4])}, ..., {span(ranks[-2:])}'


def _failed(group: Mapping[str, Any]) -> Line:
    error = group['error']
    if 'wrong sum' in error:
        fix = 'a GPU, its memory or a link is broken: leave that host out, run dcgmi diag -r 3 there'
    elif error.startswith('not run'):
        fix = 'mend the group that is named, and run this again'
    else:
        fix = (
            'look at the ranks that are named: log, firewall, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; '
            'NCCL_DEBUG=INFO tells more'
        )
    return Line(_name(group), FAIL, f'ranks {span(group["ranks"])}: {error}', fix, tuple(group['ranks']))


def _slow_groups(groups: list[dict[str, Any]]) -> list[Line]:
    """A group that takes more than twice as long as the middle one of its kind."""
    lines: list[Line] = []
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        if 'ms' in group:
            by_kind.setdefault(_name(group), []).append(group)
    for name, those in by_kind.items():
        middle = statistics.median(group['ms'] for group in those)
        for group in those:
            if group['ms'] > 2 * middle and group['ms'] > middle + 1:
                told = (
                    f'ranks {span(group["ranks"])} take {group["ms"]:.3g} ms, the others of this kind {middle:.3g} ms'
                )
                fix = 'look at the links and the load of their hosts; does the group lie within one host, as others do?'
                lines.append(Line(f'{name}, slow', WARN, told, fix, tuple(group['ranks'])))
    return lines


def _clock(ranks: Mapping[int, Mapping[str, Any]], hosts: Mapping[str, list[int]]) -> list[Line]:
    if len(hosts) < 2:
        return []
    told = next((facts['clock'] for _, facts in sorted(ranks.items()) if facts['clock']), None)
    if told is None or 'error' in told:
        return [
            Line('clocks', WARN, 'not compared: a host did not answer', 'mend what fails above, and run this again')
        ]
    furthest = max(range(len(told['ranks'])), key=lambda at: abs(told['offsets'][at]))
    rank, off, unsure = told['ranks'][furthest], told['offsets'][furthest], told['uncertain'][furthest]
    host = ranks[rank]['host'] if rank in ranks else f'rank {rank}'
    value = f'{host} is {abs(off):.3g} s {"ahead of" if off > 0 else "behind"} {next(iter(hosts))} (± {unsure:.1g} s)'
    if abs(off) - unsure > 1:
        fix = 'start chrony or ntpd on both: times in logs and files, and certificates, depend on it'
        return [Line('clocks', FAIL if abs(off) > 60 else WARN, value, fix, (rank,))]
    return [Line('clocks', OK, value)]
