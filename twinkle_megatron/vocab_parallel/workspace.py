"""How much memory the products of a linear head take at once."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger('twinkle_megatron')

_LARGEST_MB = {'cpu': 8, 'cuda': 256}
"""Of one tile of logits. Products gain nothing by larger ones, and on CPU the sweep over one wants it in the cache."""
_ALL_MB = 2.0**40
_SHARE = 64
"""A tile takes at most this part of the free memory by default."""


def check_workspace(max_workspace_mb: Any) -> None:
    """ValueError unless it is None or a number of MiB > 0."""
    if max_workspace_mb is None:
        return
    number = isinstance(max_workspace_mb, (int, float)) and not isinstance(max_workspace_mb, bool)
    if not number or not 0 < max_workspace_mb < math.inf:
        raise ValueError(f'max_workspace_mb must be a number of MiB > 0, or None, got {max_workspace_mb!r}')


def tile_elements(device: torch.device, dtype: torch.dtype, max_workspace_mb: float | None) -> int:
    """Elements of one tile of logits: what suits this kind of device, within the workspace."""
    mb = default_workspace_mb(device.type) if max_workspace_mb is None else _largest(device.type)
    return max(1, int(min(mb, max_workspace_mb or mb) * 2**20) // dtype.itemsize)


def spare_elements(device: torch.device, dtype: torch.dtype, max_workspace_mb: float | None) -> int:
    """Elements that the workspace has left beside the tile at work."""
    whole = 0 if max_workspace_mb is None else int(min(max_workspace_mb, _ALL_MB) * 2**20) // dtype.itemsize
    return max(0, whole - tile_elements(device, dtype, max_workspace_mb))


_taken: dict[str, float] = {}


def take_workspace(device_type: str, mb: float) -> None:
    """From now on the default: tiles of another size would sum in another order than those of a run that goes on."""
    _taken[device_type] = mb
    default_workspace_mb.cache_clear()


@functools.cache
def default_workspace_mb(device_type: str) -> float:
    """From the memory that is free when it is first asked for; a power of two, so that runs alike decide alike."""
    if device_type in _taken:
        return _taken[device_type]
    largest, free = _largest(device_type), free_memory(device_type)
    if free is None:
        return largest
    mb = min(largest, 2.0 ** math.floor(math.log2(max(free / _SHARE, 2**20) / 2**20)))
    if mb < largest:
        logger.warning(
            'twinkle_megatron multiplies linear heads out in tiles of %g MiB, a small part of the %.1f GiB of free '
            'memory (max_workspace_mb sets the size)',
            mb,
            free / 2**30,
        )
    return mb


def _largest(device_type: str) -> float:
    return _LARGEST_MB.get(device_type, _LARGEST_MB['cuda'])


def free_memory(device_type: str) -> int | None:
    """Bytes that this process can still have on the current device of this kind; None where that is not known."""
    if device_type == 'cuda':
        reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + reserved
    try:
        lines = Path('/proc/meminfo').read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith('MemAvailable')), None)
