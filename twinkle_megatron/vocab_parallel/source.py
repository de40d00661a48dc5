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

from .shard import VocabShard


class Tile(NamedTuple):
    """`x[rows, columns]` of the flat `[N, local_size]` logits. `columns` never reach into the padding."""

    rows: slice
    columns: slice
    x: Tensor

    def pick(self, columns: Tensor, out: Tensor) -> None:
        """Writes the logits at local `columns` `[N, k]` that lie in this tile to the same places of `out` `[N, k]`."""
        wanted = columns[self.rows]
        here = (wanted >= self.columns.start) & (wanted < self.columns.stop)
        inside = (wanted - self.columns.start).clamp(0, self.x.shape[1] - 1).long()
        out[self.rows] = torch.where(here, self.x.gather(1, inside).to(out.dtype), out[self.rows])


Fill = Callable[[Tile, Tensor], None]
"""Writes the gradient of a tile into the tensor of the same shape; the two may be one and the same object."""


class Source(Protocol):
    """N rows of logits over this rank's columns, as a function of `tensors`.

    The tensors travel through autograd; `tiles` and `gradients` receive them detached, in the same order. Rows are
    those of the flattened leading dims that `without` has left, in the source's own order; `flatten` and `unflatten`
    translate per-token tensors `[*lead]`. A source serves one sweep, and the backward passes of it.
    """

    tensors: tuple[Tensor, ...]
    shard: VocabShard
    lead: tuple[int, ...]
    rows: int
    dtype: torch.dtype
    device: torch.device

    def without(self, ignored: Tensor) -> Source:
        """This source, free to leave out the rows marked in `ignored` `[*lead]`."""
        ...

    def flatten(self, per_token: Tensor) -> Tensor:
        """`[*lead]` as `[rows]`."""
        ...

    def unflatten(self, rows: Tensor) -> Tensor:
        """`[rows]` as `[*lead]`, with 0 where a row was left out."""
        ...

    def view_rows(self, x: Tensor) -> Tensor | None:
        """`x` `[*lead, c]` as `[rows, c]`, a view in the order of this source's rows; None where it would be a copy."""
        ...

    def tiles(
        self, tensors: tuple[Tensor, ...], max_elements: int | None, trained: tuple[bool, ...] = ()
    ) -> Iterator[Tile]:
        """Tiles that cover all rows and true columns. For each row they come in ascending column order.

        `trained`: whose gradients are going to be asked for, one a tensor. A tile holds until the next one is taken.
        """
        ...

    def gradients(
        self,
        tensors: tuple[Tensor, ...],
        needed: tuple[bool, ...],
        fill: Fill,
        max_elements: int | None,
        reads: bool = True,
    ) -> tuple[Tensor | None, ...]:
        """The gradient of each needed tensor, from the tiles' gradients that `fill` writes.

        `reads` False: `fill` does not look at the logits in the tile, which may hold anything.
        """
        ...


def positions(source: Source) -> Tensor:
    """Of the source's rows among the flattened leading dims, int64 `[rows]`."""
    return source.flatten(torch.arange(math.prod(source.lead), device=source.device).view(source.lead))


def viewed(x: Tensor, order: list[int]) -> Tensor | None:
    """`x` `[*lead, c]` with its leading dims in another order, as `[rows, c]`; None where that would be a copy."""
    try:
        return x.permute(*order, -1).view(-1, x.shape[-1])
    except RuntimeError:
        return None
