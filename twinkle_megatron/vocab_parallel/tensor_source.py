"""Logits that exist, as a source of tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from .kernels.memory import empty
from .shard import VocabShard
from .source import Fill, Tile, viewed


class TensorSource:
    """Logits `[..., local_size]` that exist, in any memory layout; nothing is copied whole.

    `chunk_size` bounds the columns of a tile for kernels that need temporaries of its size (`max_elements` not None);
    the others gain nothing by it. With `reuse_storage` the gradient is written into the logits' own
    storage.
    """

    def __init__(self, logits: Tensor, shard: VocabShard, chunk_size: int | None = None, reuse_storage: bool = False):
        shard.check_logits(logits.shape, logits.dtype)
        if reuse_storage and logits.numel() > 0 and 0 in logits.stride():
            raise ValueError('reuse_storage needs logits with a storage of their own, got an expanded tensor')
        self.tensors = (logits,)
        self.shard = shard
        self.lead = tuple(logits.shape[:-1])
        self.rows = math.prod(self.lead)
        self.dtype, self.device = logits.dtype, logits.device
        self._chunk_size, self._reuse = chunk_size, reuse_storage
        # rows in memory order: a transposed view is then walked, and its gradient laid out, as it lies
        self._order = sorted(range(logits.dim() - 1), key=lambda dim: -logits.stride(dim))
        self._inverse = sorted(range(len(self._order)), key=self._order.__getitem__)

    def without(self, ignored: Tensor) -> TensorSource:
        return self  # leaving rows out would cost a copy and save little

    def flatten(self, per_token: Tensor) -> Tensor:
        return per_token.permute(self._order).reshape(-1)

    def unflatten(self, rows: Tensor) -> Tensor:
        return rows.view([self.lead[dim] for dim in self._order]).permute(self._inverse)

    def view_rows(self, x: Tensor) -> Tensor | None:
        return viewed(x, self._order)

    def tiles(
        self, tensors: tuple[Tensor, ...], max_elements: int | None, trained: tuple[bool, ...] = ()
    ) -> Iterator[Tile]:
        first, chunk_size = 0, None if max_elements is None else self._chunk_size
        for block in _row_blocks(self._in_memory_order(tensors[0])):
            for rows, columns in _tile_grid(block.shape[0], self.shard.true_columns, chunk_size, max_elements):
                yield Tile(slice(first + rows.start, first + rows.stop), columns, block[rows, columns])
            first += block.shape[0]

    def gradients(
        self,
        tensors: tuple[Tensor, ...],
        needed: tuple[bool, ...],
        fill: Fill,
        max_elements: int | None,
        reads: bool = True,
    ) -> tuple[Tensor | None, ...]:
        logits = self._in_memory_order(tensors[0])
        if self._reuse:
            for tile in self.tiles(tensors, max_elements):
                fill(tile, tile.x)
            logits[..., self.shard.true_columns :].zero_()
            return (tensors[0],)
        grad = empty(logits.shape, logits.dtype, logits.device)
        flat = grad.view(-1, self.shard.local_size) if grad.numel() else grad.view(0, 0)
        for tile in self.tiles(tensors, max_elements):
            fill(tile, flat[tile.rows, tile.columns])
        grad[..., self.shard.true_columns :].zero_()
        return (grad.permute(*self._inverse, -1),)

    def _in_memory_order(self, logits: Tensor) -> Tensor:
        return logits.permute(*self._order, -1)


def _row_blocks(x: Tensor) -> list[Tensor]:
    """2-D views that cover the rows of `x[..., V]` in order; as few as its strides allow."""
    if x.numel() == 0:
        return []
    try:
        return [x.view(-1, x.shape[-1])]
    except RuntimeError:  # two leading dims cannot be merged, as in logits[:, :-1]
        return [block for part in x.unbind(0) for block in _row_blocks(part)]


def _tile_grid(
    rows: int, columns: int, chunk_size: int | None, max_elements: int | None
) -> Iterator[tuple[slice, slice]]:
    if columns == 0:
        return
    width = min(columns, chunk_size or columns)
    height = rows if max_elements is None else min(rows, max(1, max_elements // width))
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield slice(top, min(top + height, rows)), slice(left, min(left + width, columns))
