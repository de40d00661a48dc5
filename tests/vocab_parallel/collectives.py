"""Counts what is called in torch.distributed."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch.distributed as dist

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
