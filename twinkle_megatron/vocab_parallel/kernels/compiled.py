"""The row kernels through torch.compile: one pass over memory each, no temporaries of the size of the tile."""

from __future__ import annotations

import torch
from torch import Tensor

from .eager import LOWEST, accumulate_dtype


def _row_stats(x: Tensor, inv_t: Tensor, entropy: bool, mean: bool, argmax: bool, normalizer: bool) -> list[Tensor]:
    y = x.to(accumulate_dtype(x.dtype)) * inv_t
    m = y.amax(-1)
    out = [m]
    if normalizer:
        d = y - torch.where(m == -torch.inf, 0, m)[:, None]
        if entropy:
            d = d.clamp_min(LOWEST)
            e = d.exp()
            out += [e.sum(-1), (e * d).sum(-1)]
        else:
            out.append(d.exp().sum(-1))
    if mean:
        out.append(y.sum(-1))
    if argmax:
        columns = torch.arange(x.shape[1], device=x.device, dtype=torch.int32)
        hit = (y == m[:, None]) | y.isnan()
        out.append(torch.where(hit, columns, x.shape[1] - 1).amin(-1).to(m.dtype))
    return out


def _row_grad(
    x: Tensor, out: Tensor, target: Tensor, inv_t: Tensor, m: Tensor, log_s: Tensor,
    at_target: Tensor, a: Tensor, b: Tensor | None, c: Tensor | None,
) -> None:
    active = (a != 0) | (at_target != 0)
    d = x.to(accumulate_dtype(x.dtype)) * inv_t - m[:, None]
    if b is None:
        g = (d - log_s[:, None]).exp() * a[:, None]
    else:
        active = active | (b != 0)
        d = d.clamp_min(LOWEST)
        g = (d - log_s[:, None]).exp() * (a[:, None] + b[:, None] * d)
    if c is not None:
        active = active | (c != 0)
        g = g + c[:, None]
    # comparing with the column beats a scatter: it fuses
    columns = torch.arange(x.shape[1], device=x.device, dtype=torch.int32)
    g = g + torch.where(columns[None] == target[:, None], at_target[:, None], 0)
    out.copy_(torch.where(active[:, None], g, 0))


row_stats = torch.compile(_row_stats, fullgraph=True, dynamic=True)
row_grad = torch.compile(_row_grad, fullgraph=True, dynamic=True)
