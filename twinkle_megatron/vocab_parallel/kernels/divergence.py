"""The kernels of two distributions, on a tile of logits of each: sums over its columns, and the gradient.

Logits x of the student and t of the teacher `[R, C]` may differ in dtype. With y = logits · inv_t and `rows` the
per-row numbers, log-probs are log S = (y_x − m_x) − log_s_x and log T likewise. M = beta·T + (1 − beta)·S.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .parts import join

FORWARD, REVERSE, MIXED = 'KL(T|S)', 'KL(S|T)', 'JSD'
"""Which divergence: those of beta 0 and 1, and those between."""


class Rows(NamedTuple):
    """Per row `[R]`, in the accumulation dtype: inv_t; beta, such that beta and 1 − beta add up to 1 exactly; the log
    of the smaller weight in the mixture; and the normalisers, m and log Σ exp(y − m), of both."""

    inv_t: Tensor
    beta: Tensor
    log_least: Tensor
    m_x: Tensor
    log_s_x: Tensor
    m_t: Tensor
    log_s_t: Tensor

    def at(self, rows: slice) -> Rows:
        return Rows(*(row[rows] for row in self))


def kl_stats(p: Tensor, q: Tensor, inv_t: Tensor, crossed: bool = True) -> list[Tensor]:
    """For KL(P‖Q) in one pass: max p, Σ exp(y_p − m_p), max q, Σ exp(y_q − m_q) and Σ exp(y_p − m_p)·((y_p − m_p) −
    (y_q − m_q)), each `[R]`; where P is 0 nothing is added. The last is 0 unless `crossed`."""
    a, b = p.to(inv_t.dtype), q.to(inv_t.dtype)
    top_p, top_q = a.amax(-1), b.amax(-1)
    # in one layout, so that equal rows are summed in the same order
    y = (a * inv_t).contiguous() - _finite(top_p * inv_t)[:, None]
    z = (b * inv_t).contiguous() - _finite(top_q * inv_t)[:, None]
    e = y.exp()
    last = torch.where(e == 0, 0, e * (y - z)).sum(-1) if crossed else torch.zeros_like(top_p)
    return [top_p, e.sum(-1), top_q, z.exp().sum(-1), last]


def join_stats(parts: Tensor, inv_t: Tensor) -> Tensor:
    """`kl_stats` of whole rows `[5, ...]` from those of their parts `[parts, 5, ...]`."""
    top_p, s_p, _ = join((parts[:, 0], parts[:, 1], None), inv_t, 0)
    top_q, s_q, _ = join((parts[:, 2], parts[:, 3], None), inv_t, 0)
    assert s_p is not None
    assert s_q is not None
    m_p, m_q = _finite(top_p * inv_t), _finite(top_q * inv_t)
    weight = (parts[:, 0] * inv_t - m_p).exp()
    moved = (_finite(parts[:, 0] * inv_t) - m_p) - (_finite(parts[:, 2] * inv_t) - m_q)
    crossed = torch.where(weight == 0, 0, weight * (parts[:, 4] + parts[:, 1] * moved)).sum(0)
    return torch.stack([top_p, s_p, top_q, s_q, crossed])


def jsd_sums(x: Tensor, t: Tensor, rows: Rows) -> list[Tensor]:
    """Σ T·(log T − log M) and Σ S·(log S − log M), each `[R]`, exactly 0 where S = T."""
    log_s, log_t = _log_probs(x, t, rows)
    d = log_s - log_t
    ratio, q = _mixture(d, rows)
    p = torch.maximum(log_s, log_t).exp()
    larger, smaller = torch.where(p == 0, 0, -p * q), torch.where(ratio > 0, p * ratio * (-d.abs() - q), 0)
    return [torch.where(d > 0, smaller, larger).sum(-1), torch.where(d > 0, larger, smaller).sum(-1)]


def gradient(x: Tensor, t: Tensor, rows: Rows, scale: Tensor, k: Tensor, kind: str) -> Tensor:
    """scale · ∂D/∂y_x `[R, C]`: S·(log S − log M − k) with k = KL(S‖M) for `MIXED` (without its factor 1 − beta),
    S·(log S − log T − k) with k = KL(S‖T) for `REVERSE`, S − T for `FORWARD`. Rows of scale 0 are exact zeros."""
    log_s, log_t = _log_probs(x, t, rows)
    s = log_s.exp()
    if kind == FORWARD:
        g = s - log_t.exp()
    else:
        d = log_s - log_t
        away = d.clamp(max=0) - _mixture(d, rows)[1] if kind == MIXED else d
        g = torch.where(s == 0, 0, s * (away - k[:, None]))
    return torch.where(scale[:, None] != 0, scale[:, None] * g, 0)


def fill(x: Tensor, t: Tensor, out: Tensor, rows: Rows, scale: Tensor, k: Tensor, kind: str) -> None:
    """Writes `gradient` into `out`, which may be `x` itself."""
    out.copy_(gradient(x, t, rows, scale, k, kind))


def _log_probs(x: Tensor, t: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    inv_t, _, _, m_x, log_s_x, m_t, log_s_t = (row[:, None] for row in rows)
    dtype = rows.inv_t.dtype
    return (x.to(dtype) * inv_t - m_x) - log_s_x, (t.to(dtype) * inv_t - m_t) - log_s_t


def _mixture(d: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """From d = log S − log T the smaller probability over the larger one, and q = log(M / the larger one).

    So log T − log M = −max(d, 0) − q and log S − log M = min(d, 0) − q, and nothing overflows. Where one is −∞ the
    other's is −log of its own weight, also where that weight is lost beside 1.
    """
    beta = rows.beta[:, None]
    ratio = torch.exp(-d.abs())
    smaller = torch.where(d > 0, beta, 1 - beta)
    q = torch.log((1 - smaller) + smaller * ratio)
    return ratio, torch.maximum(q, rows.log_least[:, None])


def _finite(m: Tensor) -> Tensor:
    return torch.where(m == -torch.inf, 0, m)
