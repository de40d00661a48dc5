"""Large memory: gradients of the size of the logits, tiles, sums over all rows."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

LARGE = 1 << 22
"""Bytes from which on a CPU tensor is asked for in huge pages."""


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`. On Linux a large CPU tensor lies in huge pages, where the kernel grants them.

    Such memory goes back to the system when it is freed, so every step touches it for the first time, and in pages of
    4 KiB this takes longer than computing the gradient.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != 'cpu' or size < LARGE or not hasattr(mmap, 'MADV_HUGEPAGE'):
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system built without huge pages: ordinary ones do as well
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
