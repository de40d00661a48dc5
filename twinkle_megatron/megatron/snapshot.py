"""The weights of a moment, to be computed with later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """A copy of this rank's parameters and buffers, in host memory.

    Args:
        chunks: as they go to the schedule, wrapped or bare.
        models: the same chunks, unwrapped.
    """

    def __init__(self, chunks: Sequence[Any], models: Sequence[torch.nn.Module]) -> None:
        self._chunks, self._models = list(chunks), list(models)
        with self._gathered(), torch.inference_mode(False):
            self._kept = [tensor.detach().to('cpu', copy=True) for tensor in self._tensors()]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The chunks have the weights of the snapshot, and afterwards their own again, to the bit.

        Takes the memory of one parameter more.
        """
        with self._gathered():
            self._swap()
            try:
                yield
            finally:
                self._swap()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _swap(self) -> None:
        for tensor, kept in zip(self._tensors(), self._kept, strict=True):
            present = tensor.detach().to('cpu', copy=True)
            tensor.copy_(kept)
            kept.copy_(present)

    def _tensors(self) -> Iterator[Tensor]:
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Of a distributed optimizer that gathers the weights while the forward pass runs: they are gathered first."""
        with ExitStack() as stack:
            for chunk in self._chunks:
                if getattr(chunk, 'remove_forward_pre_hook_handles', None):
                    chunk.disable_forward_pre_hook()
                    stack.callback(chunk.enable_forward_pre_hook)
            yield
