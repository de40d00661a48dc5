"""Random numbers that are drawn twice alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Afterwards the generators of dropout are where they were before: torch's, of the CPU and of this rank's GPU, and
    those that Megatron's tracker keeps for tensor parallel ranks."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    cpu: torch.Tensor = torch.get_rng_state()
    tracker: Any = get_cuda_rng_tracker()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    states = {name: _copied(state) for name, state in tracker.get_states().items()}
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        if states:
            tracker.set_states(states)


def _copied(state: Any) -> Any:
    """A state is a tensor, or under CUDA graphs a generator."""
    return state.clone_state() if isinstance(state, torch.Generator) else state.clone()
