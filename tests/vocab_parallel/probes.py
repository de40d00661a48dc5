"""Watches what a call does: collectives in torch.distributed, new tensors, memory."""

import contextlib
import ctypes
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = (
    'all_gather', 'all_gather_into_tensor', 'all_gather_object', 'all_reduce', 'all_to_all', 'all_to_all_single',
    'barrier', 'broadcast', 'broadcast_object_list', 'gather', 'irecv', 'isend', 'recv', 'reduce', 'reduce_scatter',
    'reduce_scatter_tensor', 'scatter', 'send',
)  # fmt: skip


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """The calls inside the block, by name."""
    calls: Counter = Counter()

    def counting(name: str):
        original = getattr(dist, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.setattr(dist, name, counting(name))
        yield calls


class NewTensors(TorchDispatchMode):
    """Bytes of each new tensor that operations return, largest first, in `sizes`; views are not new."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if _is_dense(t)}
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if _is_dense(t) and t.untyped_storage().data_ptr() not in known:
                self.sizes.append(t.numel() * t.element_size())
        self.sizes.sort(reverse=True)
        return out


def _is_dense(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided


def needs_peak(test: Any) -> Any:
    """For a test of `peak_memory`: it runs where the kernel tells the peak, apart from the others, whose heap would
    show in it, and in a process that gives memory back at once (the fixture `memory_given_back`)."""
    told = os.access('/proc/self/clear_refs', os.W_OK)
    for mark in (
        pytest.mark.skipif(not told, reason='the kernel tells no peak'),
        pytest.mark.usefixtures('memory_given_back'),
        pytest.mark.alone,
    ):
        test = mark(test)
    return test


def peak_memory(step: Callable[[], object]) -> int:
    """Bytes that a second call of `step` needs beyond what the process has, at the most; the first one loads what is
    loaded once: kernels, libraries, buffers. For a test that `needs_peak`."""
    step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what it freed into the heap is not there to be used again
    with open('/proc/self/clear_refs', 'w') as file:
        file.write('5')  # the high-water mark starts at what is resident now
    before = _status('VmRSS')
    step()
    return _status('VmHWM') - before


def _status(name: str) -> int:
    with open('/proc/self/status') as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ':'))
