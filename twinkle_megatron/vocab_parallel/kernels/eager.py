"""The row kernels in eager torch: no compiler, a few temporaries of the size of the tile."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from .parts import first_of

LOWEST = -1e4
"""exp() of anything below is exactly 0 in every dtype; bounding the exponent there keeps 0 · -inf out, and NaN in."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are taken in float32, in float64 for float64 logits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_temperature(temperature: float, dtype: torch.dtype) -> None:
    """ValueError unless logits of this dtype can be divided by it."""
    largest = torch.finfo(accumulate_dtype(dtype)).max
    if not (isinstance(temperature, Real) and 0 < temperature < math.inf and 1 / temperature <= largest):
        raise ValueError(f'temperature must be a finite number > 0 whose inverse is finite too, got {temperature!r}')


def row_stats(x: Tensor, inv_t: Tensor, entropy: bool, mean: bool, argmax: bool, normalizer: bool) -> list[Tensor]:
    """Sufficient statistics of each row of y = x · inv_t, x `[R, C]`; tensors `[R]` in the accumulation dtype.

    max x, then as asked, with m = max x · inv_t: Σ exp(y − m) (normalizer), Σ exp(y − m)·(y − m) (entropy), Σ y
    (mean), and the lowest column of the maximum (argmax). A row that is all −inf gives −inf and zero sums.
    The maximum is that of x, since scaling can round neighbours together.
    """
    y = x.to(accumulate_dtype(x.dtype), copy=True)
    top = y.amax(-1)
    out = [top]
    best = first_of(y, top) if argmax else None
    y.mul_(inv_t)
    m = top * inv_t
    total = y.sum(-1) if mean else None
    if normalizer:
        y.sub_(torch.where(m == -torch.inf, 0, m)[:, None])
        if entropy:
            d = y.clamp_min_(LOWEST)
            e = d.exp()
            out += [e.sum(-1), e.mul_(d).sum(-1)]
        else:
            out.append(y.exp_().sum(-1))
    if total is not None:
        out.append(total)
    if best is not None:
        out.append(best.to(top.dtype))
    return out


def row_grad(
    x: Tensor,
    out: Tensor,
    target: Tensor,
    inv_t: Tensor,
    m: Tensor,
    log_s: Tensor,
    at_target: Tensor,
    a: Tensor,
    b: Tensor | None,
    c: Tensor | None,
) -> None:
    """out[r, j] = p·(a + b·(y − m)) + c + at_target·1[j = target], with p = exp((y − m) − log_s), y = x · inv_t.

    The coefficients are `[R]` in the accumulation dtype; `target` is int32, −1 where another tile owns it. A row whose
    coefficients are all 0 is written as exact zeros whatever x holds. `out` may be `x` itself.
    """
    active = active_rows(at_target, a, b, c)
    d = x.to(accumulate_dtype(x.dtype), copy=True).mul_(inv_t).sub_(m[:, None])
    if b is None:
        (a,) = over_normalizer(log_s, a)
        g = d.exp_().mul_(a[:, None])
    else:
        a, b = over_normalizer(log_s, a, b)
        d.clamp_min_(LOWEST)
        g = d.exp().mul_(d.mul_(b[:, None]).add_(a[:, None]))
    if c is not None:
        g.add_(c[:, None])
    own = torch.where(target >= 0, at_target, 0)
    g.scatter_add_(1, target.clamp_min(0).long()[:, None], own[:, None])
    if g.device.type != 'cpu' or not active.all():  # on CPU looking costs nothing, and a pass over the tile does
        g.masked_fill_(~active[:, None], 0)
    out.copy_(g)


def active_rows(at_target: Tensor, a: Tensor, b: Tensor | None, c: Tensor | None) -> Tensor:
    """Rows that have a coefficient other than 0, `[R]` bool."""
    active = (a != 0) | (at_target != 0)
    for more in (b, c):
        if more is not None:
            active |= more != 0
    return active


def over_normalizer(log_s: Tensor, *rows: Tensor) -> list[Tensor]:
    """Each row of coefficients over s, so that p is one exponential and one product: exp(y − m)·(a / s)."""
    inverse = (-log_s).exp()
    return [row * inverse for row in rows]
