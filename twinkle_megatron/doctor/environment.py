"""Variables of the environment that people get wrong."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .report import FAIL, OK, WARN, Line, alike, of_ranks

# may differ between hosts and ranks, and nothing is wrong
_OWN = ('IFNAME', 'IB_HCA', 'DEBUG', 'FILE', 'HOSTID', 'COMM_ID', 'NVLS', 'TOPO')


def facts(gpus: int, overlaps: bool, local_world: int | None) -> dict[str, Any]:
    """Lines of this rank, and what is compared. `gpus` that it sees; `overlaps`: whether TP or CP is there."""
    return {
        'environment': lines_of(os.environ, interfaces(), gpus, overlaps, local_world),
        'nccl': {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(('NCCL_', 'GLOO_', 'TORCH_NCCL_')) and not any(part in name for part in _OWN)
        },
    }


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def lines_of(
    environ: Mapping[str, str], there: Collection[str], gpus: int, overlaps: bool, local_world: int | None
) -> list[dict[str, str]]:
    """Each with check, status, value and fix."""
    found: list[tuple[str, str, str, str]] = []
    for name in ('NCCL_SOCKET_IFNAME', 'GLOO_SOCKET_IFNAME'):
        value = environ.get(name, '')
        if value and not matches(name, value, there):
            fix = f'name one of {", ".join(sorted(there))}, or unset it'
            found.append((name, FAIL, f'{value}: no such interface here', fix))
        elif value:
            found.append((name, OK, value, ''))
    connections = environ.get('CUDA_DEVICE_MAX_CONNECTIONS')
    if gpus and overlaps and connections != '1':
        fix = 'export CUDA_DEVICE_MAX_CONNECTIONS=1, so that TP and SP overlap as Megatron means it; not on Blackwell'
        told = 'not set' if connections is None else connections
        found.append(('CUDA_DEVICE_MAX_CONNECTIONS', WARN, told, fix))
    elif connections is not None:
        found.append(('CUDA_DEVICE_MAX_CONNECTIONS', OK, connections, ''))
    threads = environ.get('OMP_NUM_THREADS')
    if not threads and (local_world or 1) > 1:
        share = max(1, (os.cpu_count() or 1) // (local_world or 1))
        fix = f'export OMP_NUM_THREADS={share}: {local_world} processes would each start a thread for every core'
        found.append(('OMP_NUM_THREADS', WARN, 'not set', fix))
    elif threads:
        found.append(('OMP_NUM_THREADS', OK, threads, ''))
    for name, wrong, why in (
        ('CUDA_LAUNCH_BLOCKING', '1', 'no kernel overlaps with another'),
        ('NCCL_P2P_DISABLE', '1', 'GPUs of a host talk through host memory'),
        ('NCCL_IB_DISABLE', '1', 'hosts talk through TCP'),
        ('TORCH_NCCL_ASYNC_ERROR_HANDLING', '0', 'a collective that hangs hangs silently'),
    ):
        if environ.get(name) == wrong:
            found.append((name, WARN, f'{wrong}: {why}', f'unset {name}, unless it is meant'))
    return [dict(zip(('check', 'status', 'value', 'fix'), one)) for one in found]


def matches(name: str, value: str, there: Collection[str]) -> bool:
    """Whether an interface that is there fits. NCCL takes prefixes, '=' before exact names and '^' before those to
    leave out; gloo takes names, all of which must be there."""
    if name.startswith('GLOO'):
        return all(part in there for part in value.split(','))
    exact, without = '=' in value[:2], value.startswith('^')
    wanted = [part for part in value.lstrip('^=').split(',') if part]
    fits = [any(name == part if exact else name.startswith(part) for part in wanted) for name in there]
    return any(not fit for fit in fits) if without else any(fits)


def alike_lines(ranks: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    """Variables of NCCL and gloo that differ between ranks."""
    names = sorted({name for facts in ranks.values() for name in facts['nccl']})
    lines = [
        alike(name, {r: facts['nccl'].get(name) for r, facts in ranks.items()}, 'set it alike on all ranks', WARN)
        for name in names
    ]
    return [line for line in lines if line.status != OK]


def loopback(address: str) -> str | None:
    """The loopback address that a name leads to on this host, where it does."""
    if not address:
        return None
    try:
        found = address if _is_ip(address) else socket.gethostbyname(address)
    except OSError:
        return None
    return found if _is_ip(found) and ipaddress.ip_address(found).is_loopback else None


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def master_line(address: str, loops_to: str | None, several: bool, missing: Sequence[int]) -> list[Line]:
    """`loops_to`: the loopback address that it is on the host of the first rank."""
    if not address:
        return []
    if loops_to and (several or missing):
        told = (
            f'{address} is a loopback address'
            if address == loops_to
            else f'{address} leads to {loops_to}, a loopback address'
        )
        why = '' if several else f'; {of_ranks(missing)} did not come, perhaps from another host'
        fix = 'set it to a name of the first host that the others resolve to an address they reach, on every host'
        return [Line('MASTER_ADDR', FAIL if several else WARN, told + why, fix)]
    return [Line('MASTER_ADDR', OK, address)]
