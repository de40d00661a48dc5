"""Which process this is, as torchrun or SLURM says, and the store in which all of them meet."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .meeting import Meeting, Stop, within
from .report import FAIL, Line, Report

SEAT = 'seat'  # how many processes came as a rank


class Unreached(Exception):
    """This process cannot meet the others."""

    def __init__(self, value: str, fix: str) -> None:
        super().__init__(f'{value}; {fix}')
        self.line = Line('processes', FAIL, value, fix)

    def report(self, place: Place) -> Report:
        """Of nothing else. Rank 0 prints it."""
        return Report([self.line], place.world, prints=place.rank == 0)


@dataclass(frozen=True)
class Place:
    """Rank and address of this process. `source` is 'alone', 'torchrun' (or whoever sets RANK) or 'SLURM'."""

    rank: int = 0
    world: int = 1
    local_rank: int | None = None
    local_world: int | None = None
    address: str = ''
    port: int = 0
    source: str = 'alone'
    restart: str = '0'
    agent: bool = False

    @property
    def alone(self) -> bool:
        return self.source == 'alone'


def place_of(environ: Mapping[str, str]) -> Place:
    """From RANK, WORLD_SIZE and MASTER_*; where RANK is not there, from the variables of a step of SLURM. ValueError
    where they are incomplete. The script of a batch job is no step: there, a process is alone."""
    if 'RANK' in environ:
        names, source = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'), 'torchrun'
    elif 'SLURM_STEP_NUM_TASKS' in environ and 'SLURM_PROCID' in environ:
        names, source = ('SLURM_PROCID', 'SLURM_STEP_NUM_TASKS', 'SLURM_LOCALID', ''), 'SLURM'
    else:
        return Place()
    rank, world, local, local_world = (_number(environ, name) for name in names)
    if rank is None or world is None:
        raise ValueError(f'{names[0]} is set, but {names[1]} is not; start by torchrun or srun, or unset {names[0]}')
    if not 0 <= rank < world:
        raise ValueError(f'{names[0]} must be from 0 to {names[1]} - 1 = {world - 1}, got {rank}')
    if local_world is None and environ.get('SLURM_STEP_NUM_NODES') == '1':
        local_world = world
    address, port = environ.get('MASTER_ADDR', ''), _number(environ, 'MASTER_PORT')
    if world > 1 and not (address and port):
        lacks = ' and '.join(n for n, v in (('MASTER_ADDR', address), ('MASTER_PORT', port)) if not v)
        raise ValueError(
            f'{world} processes need {lacks}; under srun: '
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) '
            'MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))'
        )
    if port is not None and not 0 < port < 65536:
        raise ValueError(f'MASTER_PORT must be from 1 to 65535, got {port}')
    restart, agent = environ.get('TORCHELASTIC_RESTART_COUNT', '0'), environ.get('TORCHELASTIC_USE_AGENT_STORE')
    return Place(rank, world, local, local_world, address, port or 0, source, restart, agent == 'True')


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, '')
    if text and not text.isdecimal():
        raise ValueError(f'{name} must be a whole number, got {text!r}')
    return int(text) if text else None


def meet(place: Place, timeout: float) -> Meeting:
    """Reaches the store of the run, which rank 0 or torchrun keeps. `Unreached` where that cannot be."""
    import torch.distributed as dist

    if place.world == 1:
        return Meeting(dist.HashStore(), 0, 1, timeout)  # pyright: ignore[reportPrivateImportUsage]
    where = f'MASTER_ADDR:MASTER_PORT {place.address}:{place.port}'
    serves = place.rank == 0 and not place.agent
    refused = _knock(place, timeout, resolves_only=serves)
    if refused is not None:
        fix = 'is rank 0 there, on that host? does the name lead to the same host from here, not to a loopback address?'
        raise Unreached(f'cannot reach {where} within {timeout:g} s: {refused}', fix)
    found: list[Any] = []

    def reach() -> None:
        try:
            seconds = timedelta(seconds=timeout)
            found.append(
                dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                    place.address, place.port, is_master=serves, timeout=seconds, wait_for_workers=False
                )
            )
        except Exception as error:  # of a type that differs between versions
            found.append(str(error).splitlines()[0])

    within(timeout + 1, reach)
    if not found or isinstance(found[0], str):
        told = found[0] if found else f'no answer within {timeout:g} s'
        fix = 'is the port taken, by another job on this host? take another. Or is MASTER_ADDR not the host of rank 0?'
        raise Unreached(f'cannot {"listen on" if serves else "join"} {where}: {told}', fix)
    return seated(found[0], f'doctor/{place.restart}', place.rank, place.world, timeout)


def _knock(place: Place, seconds: float, resolves_only: bool) -> Exception | None:
    """Waits until the store listens; what was wrong at last if it does not. A client of the store would wait for it,
    too, but in longer and longer turns, and with many words on stderr."""
    ends = time.monotonic() + seconds
    while True:
        try:
            if resolves_only:
                socket.getaddrinfo(place.address, place.port)
            else:
                socket.create_connection((place.address, place.port), timeout=max(0.1, min(2, seconds))).close()
            return None
        except (OSError, UnicodeError) as error:
            if Stop.over(ends):
                return error
        time.sleep(0.05)


_calls = 0


def meet_again(timeout: float) -> Meeting:
    """The same in processes that `torch.distributed` has joined already, or in one that it has not."""
    import torch.distributed as dist

    global _calls
    if not dist.is_available() or not dist.is_initialized():
        return meet(Place(), timeout)
    _calls += 1
    store = dist.distributed_c10d._get_default_store()  # there is no public way to the store that exists already
    return seated(store, f'doctor/call {_calls}', dist.get_rank(), dist.get_world_size(), timeout)


def place_in_world() -> Place:
    """The place of a process that `torch.distributed` has joined."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return Place()
    local, local_world = (_number(os.environ, name) for name in ('LOCAL_RANK', 'LOCAL_WORLD_SIZE'))
    if local is None and 'RANK' not in os.environ:
        local = _number(os.environ, 'SLURM_LOCALID')
    address = os.environ.get('MASTER_ADDR', '')
    return Place(dist.get_rank(), dist.get_world_size(), local, local_world, address, source='torch.distributed')


def seated(store: Any, prefix: str, rank: int, world: int, timeout: float) -> Meeting:
    import torch.distributed as dist

    meeting = Meeting(dist.PrefixStore(prefix, store), rank, world, timeout)  # pyright: ignore[reportPrivateImportUsage]
    if meeting.add(f'{SEAT}/{rank}') > 1:
        raise Unreached(
            f'rank {rank} is taken by another process of the same MASTER_ADDR and MASTER_PORT',
            'does another job use them? take another MASTER_PORT',
        )
    return meeting
