"""What a rank has found for its tokens of a micro-batch, as the caller gave that micro-batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..batch import join_context
from ..groups import all_gather_rows, group_size
from .item import Item


def restored(item: Item, local: Tensor, cp: ProcessGroup | None) -> Tensor:
    """Values `[b, s/cp, ...]` of this rank's tokens as whole sequences in input order, `[b, s, ...]` in the shape in
    which the caller gave the micro-batch; 0 where there was no token. One all-gather over `cp`; not differentiable."""
    return _placed(item, join_context(all_gather_rows(local, cp), _boundaries(item)))


def holders(item: Item, cp: ProcessGroup | None) -> Tensor:
    """Which rank of `cp` holds each token of the micro-batch, `[b, s]` in the shape of the caller's, int64 on CPU."""
    rows, length = item.batch['input_ids'].shape
    size = group_size(cp)
    parts = torch.arange(size).view(size, 1, 1).expand(size, rows, length // size)
    return _placed(item, join_context(parts, _boundaries(item)))


def _boundaries(item: Item) -> Tensor | None:
    return None if item.packing is None else item.packing.boundaries


def _placed(item: Item, whole: Tensor) -> Tensor:
    """Of whole rows as they went to the model: tokens that had to move are put back where they came from."""
    if item.columns is not None:
        columns = item.columns.to(whole.device)
        at = columns.view(*columns.shape, *[1] * (whole.dim() - 2)).expand(*columns.shape, *whole.shape[2:])
        moved = whole[: len(columns)].gather(1, at)
        missing = item.shape[1] - moved.shape[1]
        whole = F.pad(moved, (*[0] * 2 * (whole.dim() - 2), 0, missing)) if missing > 0 else moved
    return whole[: item.shape[0], : item.shape[1]]
