"""A linear head as a source of tiles: its logits are multiplied out block by block, and never exist as a whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..groups import all_gather_rows, reduce_scatter_rows, sum_over
from .head_gradients import HeadGradients
from .kernels.memory import empty
from .linear_head import LinearHead
from .shard import VocabShard
from .source import Fill, Tile, viewed
from .workspace import spare_elements, tile_elements


class Block(NamedTuple):
    """One product: some rows of the hidden states times some rows of the weight."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def tiles(self, x: Tensor, max_elements: int | None) -> Iterator[Tile]:
        """`x`, the block's logits, in tiles of at most `max_elements`."""
        height, width = self.shape
        step = height if max_elements is None else max(1, max_elements // width)
        for top in range(0, height, step):
            rows = slice(self.rows.start + top, self.rows.start + min(top + step, height))
            yield Tile(rows, self.columns, x[top : top + step])


class LinearSource:
    """A `LinearHead` for one sweep over its logits and the backward pass of it.

    Blocks of columns are the outer loop, so that a slice of the weight's gradient is finished before the next begins
    and only the gradient of the hidden states accumulates over all of them.

    Blocks are kept from the sweep for the backward pass where there is memory that costs nothing, the storage of the
    weight's gradient, or that the workspace allows; the others are multiplied out once more.
    """

    def __init__(self, head: LinearHead, shard: VocabShard, chunk_size: int | None = None):
        if head.local_size != shard.local_size:
            raise ValueError(
                f"weight must hold the {shard.local_size} ids [{shard.start}, {shard.stop}) of this rank's shard, one "
                f'a row, got {tuple(head.weight.shape)}; is the shard built for another layer?'
            )
        self.tensors = head.tensors
        self.shard = shard
        self.lead = head.lead(shard.size)
        self.rows = math.prod(self.lead)
        self.dtype, self.device = head.dtype, head.device
        self._order = head.order
        self._inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        self._gathers = head.sequence_parallel and shard.size > 1
        self._width = head.weight.shape[1]
        self._scale, self._main_grad = head.logit_scale, head.main_grad
        self._elements = tile_elements(self.device, self.dtype, head.max_workspace_mb)
        self._spare = spare_elements(self.device, self.dtype, head.max_workspace_mb)
        self._chunk_size = chunk_size
        self._index: Tensor | None = None
        self._kept: dict[int, Tensor] = {}
        self._d_weight: Tensor | None = None

    def without(self, ignored: Tensor) -> LinearSource:
        index = (~self.flatten(ignored.view(self.lead))).nonzero()[:, 0]
        if index.numel() < self.rows:
            self._index, self.rows = index, index.numel()
        return self

    def flatten(self, per_token: Tensor) -> Tensor:
        rows = per_token.permute(self._inverse).reshape(-1)
        return rows if self._index is None else rows[self._index]

    def unflatten(self, rows: Tensor) -> Tensor:
        if self._index is not None:
            rows = rows.new_zeros(math.prod(self.lead)).index_copy_(0, self._index, rows)
        return rows.view([self.lead[dim] for dim in self._inverse]).permute(self._order)

    def view_rows(self, x: Tensor) -> Tensor | None:
        return viewed(x, self._inverse) if self._index is None else None

    def tiles(
        self, tensors: tuple[Tensor, ...], max_elements: int | None, trained: tuple[bool, ...] = ()
    ) -> Iterator[Tile]:
        hidden, weight, *bias = tensors
        rows, blocks = self._hidden_rows(hidden), self._blocks()
        self._kept = self._rooms(blocks, trained)
        scratch = self._scratch(blocks, self._kept)
        for number, block in enumerate(blocks):
            x = self._kept.get(number)
            x = self._multiply(rows, weight, bias, block, _as_block(scratch, block) if x is None else x)
            yield from block.tiles(x, max_elements)

    def gradients(
        self,
        tensors: tuple[Tensor, ...],
        needed: tuple[bool, ...],
        fill: Fill,
        max_elements: int | None,
        reads: bool = True,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, *bias = tensors
        d_weight = self._memory_of_weight(weight, needed[1])
        d_rows, d_bias = self._add_up(tensors, needed, fill, max_elements, reads, d_weight)
        found = [self._summed(d_rows, hidden), self._gradient_of_weight(weight, d_weight, self.rows > 0)]
        return (*found, *(self._padded(d_bias) for _ in bias))

    def _add_up(
        self,
        tensors: tuple[Tensor, ...],
        needed: tuple[bool, ...],
        fill: Fill,
        max_elements: int | None,
        reads: bool,
        d_weight: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Writes `d_weight`, returns the gradients of the rows and the bias; all that it took else is free again."""
        hidden, weight, *bias = tensors
        rows, blocks = self._hidden_rows(hidden), self._blocks()
        kept, self._kept = self._kept, {}
        grads = HeadGradients(
            rows,
            weight[: self.shard.true_columns],
            d_weight,
            adds=self._main_grad is not None,
            wants_rows=needed[0],
            wants_bias=any(needed[2:]),
        )
        scratch = self._scratch(blocks, kept)
        for number, block in enumerate(blocks):
            x = kept.pop(number, None)
            if x is None:
                x = _as_block(scratch, block)
                x = self._multiply(rows, weight, bias, block, x) if reads else x
            for tile in block.tiles(x, max_elements):
                fill(tile, tile.x)
            grads.add(block.rows, block.columns, x if self._scale == 1 else x.mul_(self._scale))
        return grads.d_rows, grads.d_bias

    def _hidden_rows(self, hidden: Tensor) -> Tensor:
        """`[N, H]`, of the whole sequence; only those that are multiplied."""
        whole = all_gather_rows(hidden, self.shard.group) if self._gathers and hidden.numel() else hidden
        rows = whole.reshape(-1, self._width)
        return rows if self._index is None else rows[self._index]

    def _blocks(self) -> list[Block]:
        """Products of the size of a tile: of all rows where this leaves enough columns, else about square.

        A square block makes the most products for each byte that it reads of the hidden states and the weight.
        """
        columns = self.shard.true_columns
        if self.rows == 0 or columns == 0:
            return []
        height = min(self.rows, max(math.isqrt(self._elements), self._elements // columns))
        width = min(columns, max(1, self._elements // height), self._chunk_size or columns)
        return [
            Block(slice(top, min(top + height, self.rows)), slice(left, min(left + width, columns)))
            for left in range(0, columns, width)
            for top in range(0, self.rows, height)
        ]

    def _rooms(self, blocks: list[Block], trained: tuple[bool, ...]) -> dict[int, Tensor]:
        """Memory for the blocks that are kept, by their numbers.

        In the storage of the weight's gradient a block lies behind the slice of its own columns, and other kept blocks
        of these or earlier ones: it is used up before a slice is written to where it lies.
        """
        rooms: dict[int, Tensor] = {}
        self._d_weight = None
        if not any(trained):
            return rooms
        if trained[1] and self._main_grad is None:
            self._d_weight = _empty_weight((self.shard.local_size, self._width), self.dtype, self.device)
            storage, end = self._d_weight.view(-1), 0
            for number, block in enumerate(blocks):
                begin = max(end, block.columns.stop * self._width)
                if begin + block.size <= storage.numel():
                    rooms[number] = _as_block(storage[begin:], block)
                    end = begin + block.size
        left = self._spare
        for number, block in enumerate(blocks):
            if number not in rooms and block.size <= left:
                rooms[number] = torch.empty(block.shape, dtype=self.dtype, device=self.device)
                left -= block.size
        return rooms

    def _scratch(self, blocks: list[Block], kept: Collection[int]) -> Tensor:
        """Memory for each of the blocks that are not kept, one after the other."""
        size = max((block.size for number, block in enumerate(blocks) if number not in kept), default=0)
        return empty((size,), self.dtype, self.device)

    def _multiply(self, rows: Tensor, weight: Tensor, bias: list[Tensor], block: Block, out: Tensor) -> Tensor:
        torch.mm(rows[block.rows], weight[block.columns].t(), out=out)
        for b in bias:
            out += b[block.columns]
        return out if self._scale == 1 else out.mul_(self._scale)

    def _memory_of_weight(self, weight: Tensor, needed: bool) -> Tensor | None:
        early, self._d_weight = self._d_weight, None
        if not needed or self._main_grad is not None:
            return self._main_grad if needed else None
        return _empty_weight(weight.shape, weight.dtype, weight.device) if early is None else early

    def _gradient_of_weight(self, weight: Tensor, memory: Tensor | None, written: bool) -> Tensor | None:
        if memory is None:
            return None
        if self._main_grad is not None:
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device, layout=torch.sparse_coo)
        memory[self.shard.true_columns if written else 0 :].zero_()
        return memory

    def _padded(self, d_bias: Tensor | None) -> Tensor | None:
        if d_bias is None:
            return None
        return torch.cat([d_bias, d_bias.new_zeros(self.shard.local_size - d_bias.numel())]).to(self.dtype)

    def _summed(self, d_rows: Tensor | None, hidden: Tensor) -> Tensor | None:
        """The gradient of `hidden` from this rank's part of it."""
        if d_rows is None or hidden.numel() == 0:
            return None if d_rows is None else torch.zeros_like(hidden)
        if self._index is not None:
            d_rows = d_rows.new_zeros(math.prod(self.lead), self._width).index_copy_(0, self._index, d_rows)
        group = self.shard.group
        whole = reduce_scatter_rows(d_rows, group, overwrite=True) if self._gathers else sum_over(d_rows, group)
        whole = whole.to(hidden.dtype).view(hidden.shape)
        return whole.clone() if whole.untyped_storage().nbytes() > whole.nbytes else whole


def _empty_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """In ordinary pages: where memory is in pieces, finding huge ones for all of it takes longer than they save beside
    the products."""
    return torch.empty(shape, dtype=dtype, device=device)


def _as_block(memory: Tensor, block: Block) -> Tensor:
    return memory[: block.size].view(block.shape)
