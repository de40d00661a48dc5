"""Where rows of logits come from. A source hands out tiles (some rows × some columns) and takes back their gradients.

The operations of this package never see "the logits", only tiles, so that a tensor and a linear head which never
builds its logits serve all of them alike. To add a source, implement `Source`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .kernels.memory import empty_gradient
from .shard import VocabShard


class Tile(NamedTuple):
    """`x[rows, columns]` of the flat `[N, local_size]` logits. `columns` never reach into the padding."""

    rows: slice
    columns: slice
    x: Tensor


Fill = Callable[[Tile, Tensor], None]
"""Writes the gradient of a tile into the tensor of the same shape; the two may be one and the same object."""


class Source(Protocol):
    """N rows of logits over this rank's columns, as a function of `tensors`.

    The tensors travel through autograd; `tiles` and `gradients` receive them detached, in the same order. Rows are the
    flattened leading dims in the source's own order: `flatten` and `unflatten` translate per-token tensors.
    """

    tensors: tuple[Tensor, ...]
    shard: VocabShard
    lead: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def flatten(self, per_token: Tensor) -> Tensor: ...

    def unflatten(self, rows: Tensor) -> Tensor: ...

    def tiles(self, tensors: tuple[Tensor, ...], max_elements: int | None) -> Iterator[Tile]:
        """Tiles that cover all rows and true columns. For each row they come in ascending column order."""
        ...

    def gradients(self, tensors: tuple[Tensor, ...], fill: Fill, max_elements: int | None) -> tuple[Tensor | None, ...]:
        """The gradient of each tensor, from the tiles' gradients that `fill` writes."""
        ...


class TensorSource:
    """Logits `[..., local_size]` that exist, in any memory layout; nothing is copied whole.

    `chunk_size` bounds the columns of a tile for kernels that need temporaries of its size (`max_elements` not None);
    the others gain nothing by it. With `reuse_storage` the gradient is written into the logits' own
    storage.
    """

    def __init__(self, logits: Tensor, shard: VocabShard, chunk_size: int | None = None, reuse_storage: bool = False):
        shard.check_logits(logits.shape, logits.dtype)
        if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise ValueError(f'chunk_size must be an int >= 1 (vocabulary entries handled at once), got {chunk_size!r}')
        if reuse_storage and logits.numel() > 0 and 0 in logits.stride():
            raise ValueError('reuse_storage needs logits with a storage of their own, got an expanded tensor')
        self.tensors = (logits,)
        self.shard = shard
        self.lead = tuple(logits.shape[:-1])
        self.dtype, self.device = logits.dtype, logits.device
        self._chunk_size, self._reuse = chunk_size, reuse_storage
        # rows in memory order: a transposed view is then walked, and its gradient laid out, as it lies
        self._order = sorted(range(logits.dim() - 1), key=lambda dim: -logits.stride(dim))
        self._inverse = sorted(range(len(self._order)), key=self._order.__getitem__)

    def flatten(self, per_token: Tensor) -> Tensor:
        return per_token.permute(self._order).reshape(-1)

    def unflatten(self, rows: Tensor) -> Tensor:
        return rows.view([self.lead[dim] for dim in self._order]).permute(self._inverse)

    def tiles(self, tensors: tuple[Tensor, ...], max_elements: int | None) -> Iterator[Tile]:
        first, chunk_size = 0, None if max_elements is None else self._chunk_size
        for block in _row_blocks(self._in_memory_order(tensors[0])):
            for rows, columns in _tile_grid(block.shape[0], self.shard.true_columns, chunk_size, max_elements):
                yield Tile(slice(first + rows.start, first + rows.stop), columns, block[rows, columns])
            first += block.shape[0]

    def gradients(self, tensors: tuple[Tensor, ...], fill: Fill, max_elements: int | None) -> tuple[Tensor | None, ...]:
        logits = self._in_memory_order(tensors[0])
        if self._reuse:
            for tile in self.tiles(tensors, max_elements):
                fill(tile, tile.x)
            logits[..., self.shard.true_columns :].zero_()
            return (tensors[0],)
        grad = empty_gradient(logits.shape, logits.dtype, logits.device)
        flat = grad.view(-1, self.shard.local_size) if grad.numel() else grad.view(0, 0)
        for tile in self.tiles(tensors, max_elements):
            fill(tile, flat[tile.rows, tile.columns])
        grad[..., self.shard.true_columns :].zero_()
        return (grad.permute(*self._inverse, -1),)

    def _in_memory_order(self, logits: Tensor) -> Tensor:
        return logits.permute(*self._order, -1)


def as_source(logits: Tensor | Source, shard: VocabShard, chunk_size: int | None, reuse_storage: bool) -> Source:
    """`logits` as a source of tiles: a tensor is wrapped, a source is checked to be of this shard."""
    if not isinstance(shard, VocabShard):
        raise ValueError(
            f'shard must be a VocabShard, got {type(shard).__name__}; VocabShard.from_group(local_size, group) '
            'makes one'
        )
    if isinstance(logits, Tensor):
        return TensorSource(logits, shard, chunk_size, reuse_storage)
    raise ValueError(f'logits must be a tensor [..., {shard.local_size}], got {type(logits).__name__}')


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


def row_count(source: Source) -> int:
    """N, the rows of the flat view."""
    return math.prod(source.lead)
