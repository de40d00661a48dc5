"""What this host and this process have: memory, disk, shared memory, open files."""

from __future__ import annotations

import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .report import FAIL, OK, WARN, Line, of_ranks, size

GIB = 2**30


def hostname() -> str:
    return socket.gethostname()


def facts(paths: Sequence[str], world: int, local_rank: int | None) -> dict[str, Any]:
    """Of this process, in bytes; lines about one host say what is wrong there."""
    import psutil

    memory = psutil.virtual_memory()
    try:
        device = {'gpus': gpus(local_rank), 'compute_ms': compute_ms(local_rank)}
        broken = []
    except Exception as error:  # CUDA raises what it likes
        device = {'gpus': [], 'compute_ms': None}
        told = f'cannot be used: {str(error).splitlines()[0]}'
        broken = _named('GPU', (FAIL, told, 'look at nvidia-smi and dmesg there; leave the host out'))
    return {
        'memory': {'free': memory.available, 'total': memory.total},
        **device,
        'lines': [
            *broken,
            *_named('open files', open_files(world)),
            *_named('/dev/shm', shared_memory()),
            *(line for path in paths for line in _named(f'disk {path}', disk(path))),
        ],
    }


def _named(check: str, told: tuple[str, str, str]) -> list[dict[str, str]]:
    return [{'check': check, 'status': told[0], 'value': told[1], 'fix': told[2]}]


def gpus(local_rank: int | None) -> list[dict[str, Any]]:
    """The GPU of this rank, or all of them where it has none of its own."""
    import torch

    if not torch.cuda.is_available():
        return []
    mine = range(torch.cuda.device_count()) if local_rank is None else [gpu_of(local_rank)]
    found: list[dict[str, Any]] = []
    for index in mine:
        free, total = torch.cuda.mem_get_info(index)
        about = torch.cuda.get_device_properties(index)
        uuid = str(getattr(about, 'uuid', ''))
        found.append({'index': index, 'name': about.name, 'uuid': uuid, 'free': free, 'total': total})
    return found


def gpu_of(local_rank: int | None) -> int:
    """The number of the GPU that is this rank's. Where SLURM shows each task its own one only, that is 0."""
    import torch

    return (local_rank or 0) % max(1, torch.cuda.device_count())


def compute_ms(local_rank: int | None) -> float:
    """Milliseconds of one product of matrices on this rank's device, the best of some."""
    import torch

    cuda = torch.cuda.is_available()
    device = torch.device('cuda', gpu_of(local_rank)) if cuda else torch.device('cpu')
    matrix = torch.ones(4096 if cuda else 384, 4096 if cuda else 384, device=device)
    times: list[float] = []
    for _ in range(7):
        if cuda:
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        torch.mm(matrix, matrix)
        if cuda:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begun) * 1e3)
    return min(times)


def open_files(world: int) -> tuple[str, str, str]:
    """Status, value, fix."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return OK, 'no limit', ''
    upper = 'none' if hard == resource.RLIM_INFINITY else str(hard)
    fix = f'ulimit -n 65536 before the start (the hard limit is {upper}); in a container --ulimit nofile=65536'
    if soft < 256 + 4 * world:  # sockets to every rank, in each of some groups
        return FAIL, f'limit {soft}, too few for {world} processes', fix
    return (OK, f'limit {soft}', '') if soft >= 4096 else (WARN, f'limit {soft}, few for many workers', fix)


def shared_memory(path: str = '/dev/shm') -> tuple[str, str, str]:
    """Status, value, fix."""
    fix = 'start the container with --shm-size=16g or --ipc=host; NCCL and the workers of data loaders use it'
    try:
        found = os.statvfs(path)
    except OSError as error:
        return WARN, f'not there: {error.strerror}', fix
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    told = f'{size(free)} free of {size(total)}'
    if free < 32 * 2**20:
        return FAIL, told, fix
    return (OK, told, '') if free >= GIB else (WARN, told, fix)


def disk(path: str) -> tuple[str, str, str]:
    """Status, value, fix of a folder to write to, or of the nearest one above it that is there."""
    wanted = Path(path).absolute()
    there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    missing = '' if there == wanted else f'does not exist, would be made in {there}; '
    if not there.is_dir():
        return FAIL, f'{there} is a file', 'give a folder to --path'
    try:
        with tempfile.TemporaryFile(dir=there) as file:  # access rights do not tell of a file system mounted read-only
            file.write(b'\0' * 4096)
            file.flush()
        found = os.statvfs(there)
    except OSError as error:
        fix = 'mount it for writing, change its owner, or take another folder'
        return FAIL, f'{missing}cannot be written to: {error.strerror}', fix
    free = found.f_bavail * found.f_frsize
    told = f'{missing}{size(free)} free'
    fix = 'remove what is old there, or take another folder: a checkpoint with optimizer takes 14 to 18 bytes a weight'
    if free < GIB:
        return FAIL, told, fix
    if free < 20 * GIB:
        return WARN, told, fix
    return (WARN, told, f'is the name right? mkdir -p {path}') if missing else (OK, told, '')


def machine_lines(ranks: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    """Over all ranks: the host and the GPU with least free, the slowest ranks, and what was wrong on a host."""
    return [_memory(ranks), *_gpu_memory(ranks), *_slow(ranks), *host_lines(ranks, 'lines')]


def _memory(ranks: Mapping[int, Mapping[str, Any]]) -> Line:
    rank = min(ranks, key=lambda r: ranks[r]['memory']['free'])
    free, total = ranks[rank]['memory']['free'], ranks[rank]['memory']['total']
    told = f'{size(free)} free of {size(total)} on {ranks[rank]["host"]}'
    fix = (
        'end other programs there, or take a host with more: weights and optimizer pass through it when they are loaded'
    )
    status = FAIL if free < GIB else WARN if free < 4 * GIB or free < 0.1 * total else OK
    return Line('host memory', status, told, '' if status == OK else fix, () if status == OK else (rank,))


def _gpu_memory(ranks: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    having = [(gpu['free'] / gpu['total'], rank, gpu) for rank, facts in ranks.items() for gpu in facts['gpus']]
    if not having:
        return [Line('GPU memory', OK, 'no GPU')]
    share, rank, gpu = min(having, key=lambda one: one[:2])
    told = f'{size(gpu["free"])} free of {size(gpu["total"])} on GPU {gpu["index"]} of {ranks[rank]["host"]}'
    fix = 'nvidia-smi lists the programs that hold the rest: end them, or take another GPU'
    status = FAIL if gpu['free'] < GIB else WARN if share < 0.9 else OK
    found = [Line('GPU memory', status, told, '' if status == OK else fix, () if status == OK else (rank,))]
    held: dict[tuple[str, str], list[int]] = {}
    for _, other, of in having:
        held.setdefault((ranks[other]['host'], of['uuid'] or str(of['index'])), []).append(other)
    for (host, uuid), by in held.items():
        if len(by) > 1:
            fix = 'start as many processes a host as it has GPUs; look at CUDA_VISIBLE_DEVICES and --gpus-per-task'
            found.append(
                Line('GPU of a rank', FAIL, f'{of_ranks(by)} have the same one on {host}: {uuid}', fix, tuple(by))
            )
    names = {gpu['name'] for _, _, gpu in having}
    if len(names) > 1:
        fix = 'the slowest sets the pace of all: take hosts of one kind'
        found.append(Line('GPU kinds', WARN, ', '.join(sorted(names)), fix))
    return found


def _slow(ranks: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    times = {rank: facts['compute_ms'] for rank, facts in ranks.items() if facts['compute_ms'] is not None}
    if not times:
        return []
    middle = statistics.median(times.values())
    slow = [rank for rank in sorted(times) if times[rank] > 2 * middle and times[rank] > middle + 0.5]
    told = f'a product of matrices takes {middle:.3g} ms'
    if not slow:
        return [Line('slow ranks', OK, f'none: {told}')]
    named = ', '.join(f'rank {rank} on {ranks[rank]["host"]} {times[rank]:.3g} ms' for rank in slow[:8])
    fix = 'look for other programs, a lower clock or heat there (nvidia-smi -q -d PERFORMANCE); leave the host out'
    return [Line('slow ranks', WARN, f'{told}, but {of_ranks(slow)}: {named}', fix, tuple(slow))]


def host_lines(ranks: Mapping[int, Mapping[str, Any]], key: str) -> list[Line]:
    """The lines that ranks have told of themselves under `key`: one a check where all is well, else those that are
    not, each with its ranks."""
    by_check: dict[str, dict[tuple[str, str], list[int]]] = {}
    values: dict[tuple[str, str, str], str] = {}
    for rank in sorted(ranks):
        for told in ranks[rank][key]:
            said = told['status'], told['fix']
            by_check.setdefault(told['check'], {}).setdefault(said, []).append(rank)
            values.setdefault((told['check'], *said), told['value'])
    found: list[Line] = []
    for check, said in by_check.items():
        bad = {one: by for one, by in said.items() if one[0] != OK}
        for (status, fix), by in (bad or said).items():
            where = '' if not bad or len(by) == len(ranks) else f' ({of_ranks(by)} on {_hosts(ranks, by)})'
            found.append(Line(check, status, values[check, status, fix] + where, fix, tuple(by) if bad else ()))
    return found


def _hosts(ranks: Mapping[int, Mapping[str, Any]], of: Sequence[int]) -> str:
    return ', '.join(sorted({ranks[rank]['host'] for rank in of}))
