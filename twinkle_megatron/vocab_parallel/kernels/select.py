"""Which kernels run where: decided once per device type, said once, never needed for correctness."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import divergence, eager

logger = logging.getLogger('twinkle_megatron')

VARIABLE = 'TWINKLE_MEGATRON_KERNELS'
CPU_TILE = 1 << 18
"""Elements of an eager tile on CPU: 1 MiB of float32, which stays in a core's own cache."""
CUDA_TILE = 1 << 25
MIN_COMPILED = 1 << 22
"""Logits with fewer elements are swept in milliseconds anyway; they do not pay for a compile."""


@dataclass(frozen=True)
class Kernels:
    """`row_stats` and `row_grad` (see kernels/eager.py), those of two distributions (kernels/divergence.py), and the
    largest tile they should be given; None: any."""

    name: str
    row_stats: Callable[..., list[torch.Tensor]]
    row_grad: Callable[..., None]
    kl_stats: Callable[..., list[torch.Tensor]]
    jsd_sums: Callable[..., list[torch.Tensor]]
    divergence_grad: Callable[..., None]
    max_elements: int | None


def select(device: torch.device, rows: int, columns: int) -> Kernels:
    """The kernels for `rows` × `columns` logits on this device.

    The environment variable TWINKLE_MEGATRON_KERNELS forces `eager` or `compiled`; `auto`, the default, compiles where
    a compiler is found and the logits are large.
    """
    choice = os.environ.get(VARIABLE, 'auto')
    if choice not in ('auto', 'eager', 'compiled'):
        raise ValueError(f"{VARIABLE} must be 'auto', 'eager' or 'compiled', got {choice!r}")
    large = rows > 1 and columns > 1 and (choice == 'compiled' or rows * columns >= MIN_COMPILED)
    if choice != 'eager' and large:
        kernels = _compiled(device.type)
        if kernels is not None:
            return kernels
    largest = CUDA_TILE if device.type == 'cuda' else CPU_TILE
    return Kernels(
        'eager', eager.row_stats, eager.row_grad, divergence.kl_stats, divergence.jsd_sums, divergence.fill, largest
    )


@functools.cache
def _compiled(device_type: str) -> Kernels | None:
    why_not = _no_compiler(device_type)
    if why_not is not None:
        logger.warning('twinkle_megatron uses eager kernels, slower but equal in value: %s', why_not)
        return None
    from . import compiled

    return Kernels(
        'compiled',
        compiled.row_stats,
        compiled.row_grad,
        compiled.kl_stats,
        compiled.jsd_sums,
        compiled.divergence_grad,
        None,
    )


def _no_compiler(device_type: str) -> str | None:
    if torch._dynamo.config.disable:
        return 'TorchDynamo is disabled (TORCHDYNAMO_DISABLE)'
    if device_type == 'cpu' and not any(shutil.which(c) for c in (os.environ.get('CXX', ''), 'g++', 'clang++') if c):
        return 'no C++ compiler on PATH (install g++)'
    if device_type == 'cuda' and importlib.util.find_spec('triton') is None:
        return 'triton is not installed'
    return None
