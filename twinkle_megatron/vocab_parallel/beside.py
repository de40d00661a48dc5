"""The logits of a second model, beside the tiles of a first one's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..groups import all_gather_rows
from .linear_head import LinearHead
from .logits import Logits, local_size
from .shard import VocabShard
from .source import Source, positions
from .workspace import tile_elements

Read = Callable[[slice, slice], Tensor]
"""The second model's logits at some rows, in the order of the first one's, and some columns."""


class Beside:
    """Reads logits in the rows and columns of a source: views of a tensor, or products of a linear head.

    No gradient goes to them. ValueError for what are no logits, for those of another leading shape or another shard.
    """

    def __init__(self, logits: Logits, shard: VocabShard, source: Source) -> None:
        _check_kind(logits, source.device)
        lead = source.lead
        found = logits.lead(shard.size) if isinstance(logits, LinearHead) else tuple(logits.shape[:-1])
        if found != lead:
            raise ValueError(
                f'teacher must have the leading shape of the student, {lead}, got {found}; are these the same tokens?'
            )
        if local_size(logits) != shard.local_size:
            raise ValueError(
                f"teacher must hold the {shard.local_size} ids [{shard.start}, {shard.stop}) of this rank's shard, got "
                f'{local_size(logits)} columns; teacher_shard says which ids they are'
            )
        self.tensors = tuple(x.detach() for x in (logits.tensors if isinstance(logits, LinearHead) else (logits,)))
        self._head = logits.detach() if isinstance(logits, LinearHead) else None
        self._shard = shard
        if self._head is not None:
            self._head.hidden, self._head.weight, self._head.bias = (torch.empty(0),) * 3  # type: ignore[assignment]

    def largest_tile(self, source: Source) -> int | None:
        """Elements that may be read at once; None: any, for they are there already."""
        if self._head is None and source.view_rows(self.tensors[0]) is not None:
            return None
        workspace = None if self._head is None else self._head.max_workspace_mb
        return tile_elements(source.device, source.dtype, workspace)

    def reader(self, tensors: tuple[Tensor, ...], source: Source) -> Read:
        """For one sweep, or backward pass, from the tensors as autograd has kept them. A linear head whose hidden
        states are split over ranks gathers them: one collective."""
        if self._head is not None:
            return self._products(self._head, tensors, source)
        (logits,) = tensors
        rows = source.view_rows(logits)
        if rows is not None:
            return lambda at, columns: rows[at, columns]
        index = torch.unravel_index(positions(source), source.lead)
        return lambda at, columns: logits[(*(i[at] for i in index), columns)]

    def _products(self, head: LinearHead, tensors: tuple[Tensor, ...], source: Source) -> Read:
        hidden, weight, *bias = tensors
        gathers = head.sequence_parallel and self._shard.size > 1
        whole = all_gather_rows(hidden, self._shard.group) if gathers and hidden.numel() else hidden
        whole = whole.flatten(0, 1) if gathers and hidden.numel() else whole
        whole = whole.permute(*head.order, whole.dim() - 1)
        rows = source.view_rows(whole)
        if rows is None:
            rows = whole[torch.unravel_index(positions(source), source.lead)]

        def read(at: slice, columns: slice) -> Tensor:
            out = torch.mm(rows[at], weight[columns].t())
            for b in bias:
                out += b[columns]
            return out if head.logit_scale == 1 else out.mul_(head.logit_scale)

        return read


def _check_kind(logits: object, device: torch.device) -> None:
    if not isinstance(logits, (Tensor, LinearHead)):
        raise ValueError(f'teacher must be a tensor or a LinearHead, got {type(logits).__name__}')
    if logits.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f'teacher must be float16, bfloat16, float32 or float64, got {logits.dtype}')
    if logits.device != device:
        raise ValueError(f'teacher must be on the device of the student, {device}, got {logits.device}')
