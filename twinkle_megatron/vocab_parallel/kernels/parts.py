"""How the statistics of disjoint parts of a row become those of the row.

Parts are pieces of one tile, tiles, or the shards of the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

Sums = tuple[Tensor, Tensor | None, Tensor | None]
"""(max x, Σ exp(y − m), Σ exp(y − m)·(y − m)) with y = x · inv_t and m = max x · inv_t; what is not computed is
None."""


def join(parts: Sums, inv_t: Tensor, dim: int) -> Sums:
    """The sums of whole rows from those of their parts, which lie along `dim`. Exact but for rounding; NaN is kept."""
    tops, s, t = parts
    top = tops.amax(dim)
    if s is None:
        return top, None, None
    shift = tops * inv_t - torch.where(top == -torch.inf, 0, top * inv_t).unsqueeze(dim)
    weight = shift.exp()
    whole = (weight * s).sum(dim)
    if t is None:
        return top, whole, None
    # an empty part has shift -inf and sums 0
    return top, whole, torch.where(s == 0, 0, weight * (t + s * shift)).sum(dim)


def first_of(x: Tensor, top: Tensor, dim: int = -1) -> Tensor:
    """Lowest index along `dim` at which x holds the maximum `top`, or a NaN where there is one; int32."""
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    index = torch.arange(x.shape[dim], device=x.device, dtype=torch.int32).view(shape)
    hit = (x == top.unsqueeze(dim)) | x.isnan()
    return torch.where(hit, index, x.shape[dim] - 1).amin(dim)
