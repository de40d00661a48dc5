"""Which kernels run where: decided once per device type and dtype, said once, never needed for correctness."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import eager

logger = logging.getLogger('twinkle_megatron')

VARIABLE = 'TWINKLE_MEGATRON_KERNELS'
CPU_TILE = 1 << 20
"""Elements of an eager tile on CPU: 4 MiB of float32, which stays in the cache."""
CUDA_TILE = 1 << 25
MIN_COMPILED = 1 << 22
"""Logits with fewer elements are swept in milliseconds anyway; they do not pay for a compile."""


@dataclass(frozen=True)
class Kernels:
    """`row_stats` and `row_grad` (see kernels/eager.py) and the largest tile they should be given; None: any."""

    name: str
    row_stats: Callable[..., list[torch.Tensor]]
    row_grad: Callable[..., None]
    max_elements: int | None


def select(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> Kernels:
    """The kernels for `rows` × `columns` logits of this dtype on this device.

    The environment variable TWINKLE_MEGATRON_KERNELS forces `eager` or `compiled`; `auto`, the default, compiles where
    a compiler is found and the logits are large.
    """
    choice = os.environ.get(VARIABLE, 'auto')
    if choice not in ('auto', 'eager', 'compiled'):
        raise ValueError(f"{VARIABLE} must be 'auto', 'eager' or 'compiled', got {choice!r}")
    large = rows > 1 and columns > 1 and (choice == 'compiled' or rows * columns >= MIN_COMPILED)
    if choice != 'eager' and large:
        kernels = _compiled(device.type, dtype)
        if kernels is not None:
            return kernels
    return Kernels('eager', eager.row_stats, eager.row_grad, CUDA_TILE if device.type == 'cuda' else CPU_TILE)


@functools.cache
def _compiled(device_type: str, dtype: torch.dtype) -> Kernels | None:
    why_not = _no_compiler(device_type)
    if why_not is None:
        logger.warning('twinkle_megatron compiles its %s kernels for %s logits: some seconds, once; later runs find them '
                       'in the compiler cache (%s=eager does without)', device_type, dtype, VARIABLE)
        started = time.perf_counter()
        try:
            kernels = _compile(device_type, dtype)
        except Exception as error:  # any failure of the compiler leaves the eager kernels, which need none
            why_not = f'torch.compile failed: {type(error).__name__}: {error}'
        else:
            logger.warning('twinkle_megatron uses compiled kernels (%.1f s)', time.perf_counter() - started)
            return kernels
    logger.warning('twinkle_megatron uses eager kernels, slower but equal in value: %s', why_not)
    return None


def _no_compiler(device_type: str) -> str | None:
    if torch._dynamo.config.disable:
        return 'TorchDynamo is disabled (TORCHDYNAMO_DISABLE)'
    if device_type == 'cpu' and not any(shutil.which(c) for c in (os.environ.get('CXX', ''), 'g++', 'clang++') if c):
        return 'no C++ compiler on PATH (install g++)'
    if device_type == 'cuda' and importlib.util.find_spec('triton') is None:
        return 'triton is not installed'
    return None


def _compile(device_type: str, dtype: torch.dtype) -> Kernels:
    from . import compiled

    # a small plain case, so that a broken compiler shows here and not in the middle of a step
    x = torch.zeros(4, 64, device=device_type, dtype=dtype)
    one = torch.ones((), device=device_type, dtype=eager.accumulate_dtype(dtype))
    row = torch.zeros(4, device=device_type, dtype=one.dtype)
    compiled.row_stats(x, one, False, False, False, True)
    compiled.row_grad(x, torch.empty_like(x), row.to(torch.int32), one, row, row, row, row, None, None)
    return Kernels('compiled', compiled.row_stats, compiled.row_grad, None)
