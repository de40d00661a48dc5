"""The row kernels through torch.compile: one pass over memory each, no temporaries of the size of the tile.

A kernel is compiled once for each kind of tile (dtype, statistics asked for, layout) and never for another number of
rows or columns: every argument that could carry a hidden difference reaches the compiler in one form.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as shape_config

from . import divergence, eager
from .eager import LOWEST, accumulate_dtype
from .parts import first_of, join

logger = logging.getLogger('twinkle_megatron')

EAGER_ROWS = 1 << 18
"""Elements of a block where a tile has to be done in eager torch: see `_regular`."""


WIDTH = 4096
"""Columns summed at once. Inductor's CPU code adds a row up in one chain per vector lane and so loses 8e-6 of a sum of
76,000 columns, 1e-6 of one this long. The parts are then put together exactly, as the shards of the ranks are."""


def row_stats(x: Tensor, inv_t: Tensor, entropy: bool, mean: bool, argmax: bool, normalizer: bool) -> list[Tensor]:
    """As `eager.row_stats`."""
    asked = (entropy, mean, argmax, normalizer)
    found = None
    if _regular(x):
        # guarding against 0 · -inf costs a tenth of the time: where looking is free, only rows that need it pay
        guarded = x.device.type != 'cpu'
        found = _parts_stats(x, inv_t, asked, guarded)
        if entropy and not guarded and found is not None and (found[2].isnan() & ~found[1].isnan()).any():
            found = _parts_stats(x, inv_t, asked, guarded=True)
    if found is None:
        blocks = [eager.row_stats(x[at], inv_t, *asked) for at in _blocks(x)]
        return [torch.cat(parts) for parts in zip(*blocks)]
    return found


def _parts_stats(x: Tensor, inv_t: Tensor, asked: tuple[bool, ...], guarded: bool) -> list[Tensor] | None:
    rows, columns = x.shape
    width = _width(columns)
    if columns % width == 0 and x.is_contiguous():  # the parts of a row are rows of a view: one call, memory in order
        tiles = [x.view(-1, width)]
    else:
        tiles = [x[:, left : left + width] for left in range(0, columns, width)]
    found = []
    for tile in tiles:
        names = zip(('entropy', 'mean', 'argmax', 'normalizer'), asked)
        kernel = _kernel(
            _row_stats,
            (*(name for name, wanted in names if wanted), *('guarded',) * (asked[0] and guarded), *_kind(tile)),
        )
        stats = kernel(_alone(tile), inv_t, *asked, guarded)
        if stats is None:
            return None
        found.append([stat.view(rows, -1) for stat in stats])
    if width == columns:
        return [stat[:, 0] for stat in found[0]]
    return _join([torch.cat(parts, 1) for parts in zip(*found)], inv_t, width, asked)


def _width(columns: int) -> int:
    """Of the parts that a row is cut into: equal ones where there are such, else all but the last."""
    for parts in range(math.ceil(columns / WIDTH), math.ceil(4 * columns / WIDTH) + 1):
        if columns % parts == 0:
            return columns // parts
    return math.ceil(columns / math.ceil(columns / WIDTH))


def _join(stats: list[Tensor], inv_t: Tensor, width: int, asked: tuple[bool, ...]) -> list[Tensor]:
    """The statistics `[R]` of whole rows from those of their parts `[R, parts]`."""
    entropy, mean, argmax, normalizer = asked
    parts = iter(stats)
    tops = next(parts)
    top, s, t = join((tops, next(parts) if normalizer else None, next(parts) if entropy else None), inv_t, -1)
    out = [stat for stat in (top, s, t) if stat is not None]
    if mean:
        out.append(next(parts).sum(-1))
    if argmax:
        best, first = next(parts), first_of(tops, top).long()[:, None]
        out.append((best.gather(1, first) + first * width)[:, 0])
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
    """As `eager.row_grad`."""
    done = None
    if _regular(x) and _regular(out):
        # the targets' own columns are done apart: marking them in the kernel would cost a third of its time
        column = target.clamp_min(0).long()[:, None]
        picked = x.gather(1, column)  # now, since out may be x
        active = eager.active_rows(at_target, a, b, c)
        zero = torch.zeros_like(m)
        rows = torch.stack(
            [
                inv_t.expand_as(m),
                m,
                *eager.over_normalizer(log_s, a, zero if b is None else b),
                zero if c is None else c,
                active.to(m.dtype),
            ]
        )
        names = ('with entropy',) * (b is not None) + ('with mean',) * (c is not None)
        kernel = _kernel(_row_fill, (*names, *_kind(x), *_kind(out)[1:]))
        done = kernel(_alone(x), _alone(out), rows, b is not None, c is not None)
        if done is not None:
            own = torch.where(target >= 0, 0, -1)
            eager.row_grad(picked, picked, own, inv_t, m, log_s, at_target, a, b, c)
            # scatter_ on CPU would copy a half precision tensor whole, twice
            out[torch.arange(len(out), device=out.device), column[:, 0]] = picked[:, 0]
    if done is None:
        for at in _blocks(x):
            eager.row_grad(
                x[at],
                out[at],
                target[at],
                inv_t,
                m[at],
                log_s[at],
                at_target[at],
                a[at],
                None if b is None else b[at],
                None if c is None else c[at],
            )


def kl_stats(p: Tensor, q: Tensor, inv_t: Tensor, crossed: bool = True) -> list[Tensor]:
    """As `divergence.kl_stats`."""
    parts = _pairs(_kl_stats if crossed else _normalizers, p, q, inv_t)
    if parts is None:
        blocks = [divergence.kl_stats(p[at], q[at], inv_t, crossed) for at in _blocks(p)]
        return [torch.cat(found) for found in zip(*blocks)]
    return list(divergence.join_stats(torch.stack([torch.stack(found) for found in parts]), inv_t))


def jsd_sums(x: Tensor, t: Tensor, rows: divergence.Rows) -> list[Tensor]:
    """As `divergence.jsd_sums`."""
    parts = _pairs(_jsd_sums, x, t, torch.stack(list(rows)))
    if parts is None:
        blocks = [divergence.jsd_sums(x[at], t[at], rows.at(at)) for at in _blocks(x)]
        return [torch.cat(found) for found in zip(*blocks)]
    return list(torch.stack([torch.stack(found) for found in parts]).sum(0))


def divergence_grad(
    x: Tensor, t: Tensor, out: Tensor, rows: divergence.Rows, scale: Tensor, k: Tensor, kind: str
) -> None:
    """As `divergence.fill`."""
    if _regular(x) and _regular(t) and _regular(out):
        packed = torch.stack([*rows, scale, k])
        kernel = _kernel(_divergence_fill, (kind, *_kind(x), *_kind(t), *_kind(out)))
        if kernel(_alone(x), _alone(t), _alone(out), packed, kind) is not None:
            return
    for at in _blocks(x):
        divergence.fill(x[at], t[at], out[at], rows.at(at), scale[at], k[at], kind)


def _pairs(function: Callable[..., Any], x: Tensor, t: Tensor, more: Tensor) -> list[list[Tensor]] | None:
    """Of a pair of tiles what the kernel finds in each part of the columns that is summed at once, see `WIDTH`; None
    where it does not apply."""
    if not (_regular(x) and _regular(t)):
        return None
    found, width = [], _width(x.shape[1])
    if x.shape[1] % width == 0 and x.is_contiguous() and t.is_contiguous():  # one call, memory in order
        parts = x.shape[1] // width
        pair = [side.view(-1, width) for side in (x, t)]
        each = more.repeat_interleave(parts, -1) if more.dim() else more
        stats = _kernel(function, (*_kind(pair[0]), *_kind(pair[1])))(*map(_alone, pair), each)
        return (
            None if stats is None else [list(part) for part in zip(*(stat.view(-1, parts).unbind(1) for stat in stats))]
        )
    for left in range(0, x.shape[1], width):
        pair = [side[:, left : left + width] for side in (x, t)]
        found.append(_kernel(function, (*_kind(pair[0]), *_kind(pair[1])))(*map(_alone, pair), more))
    return None if any(part is None for part in found) else found


def _kl_stats(p: Tensor, q: Tensor, inv_t: Tensor) -> list[Tensor]:
    return divergence.kl_stats(p, q, inv_t)


def _normalizers(p: Tensor, q: Tensor, inv_t: Tensor) -> list[Tensor]:
    return divergence.kl_stats(p, q, inv_t, crossed=False)


def _jsd_sums(x: Tensor, t: Tensor, packed: Tensor) -> list[Tensor]:
    return divergence.jsd_sums(x, t, divergence.Rows(*packed.unbind(0)))


def _divergence_fill(x: Tensor, t: Tensor, out: Tensor, packed: Tensor, kind: str) -> bool:
    *rows, scale, k = packed.unbind(0)
    divergence.fill(x, t, out, divergence.Rows(*rows), scale, k, kind)
    return True


def _row_stats(
    x: Tensor, inv_t: Tensor, entropy: bool, mean: bool, argmax: bool, normalizer: bool, guarded: bool
) -> list[Tensor]:
    raw = x.to(accumulate_dtype(x.dtype))
    top = raw.amax(-1)
    out = [top]
    y, m = raw * inv_t, top * inv_t
    if normalizer:
        d = y - torch.where(m == -torch.inf, 0, m)[:, None]
        if entropy:
            e = d.exp()
            out += [e.sum(-1), (e * (_bounded(d) if guarded else d)).sum(-1)]
        else:
            out.append(d.exp().sum(-1))
    if mean:
        out.append(y.sum(-1))
    if argmax:
        columns = torch.arange(x.shape[1], device=x.device, dtype=torch.int32)
        hit = (raw == top[:, None]) | (raw != raw)  # isnan() would keep Inductor from vectorising the loop
        out.append(torch.where(hit, columns, x.shape[1] - 1).amin(-1).to(m.dtype))
    return out


def _bounded(d: Tensor) -> Tensor:
    """Exponents kept from -inf, so that 0 · -inf is 0. A NaN is lost here; the exponential beside it still has it."""
    return torch.where(d > LOWEST, d, LOWEST)


def _row_fill(x: Tensor, out: Tensor, rows: Tensor, with_b: bool, with_c: bool) -> bool:
    """Everything of `eager.row_grad` but the target. `rows` `[6, R]`: inv_t, m, a/s, b/s, c, 1 where not all zero."""
    inv_t, m, a, b, c, active = (row[:, None] for row in rows.unbind(0))
    d = x.to(rows.dtype) * inv_t - m
    g = d.exp() * (a + b * _bounded(d) if with_b else a)
    if with_c:
        g = g + c
    out.copy_(torch.where(active != 0, g, 0))
    return True


class _Kernel:
    """One function for one kind of tile, compiled at its first call. Returns None where it cannot be compiled."""

    def __init__(self, function: Callable[..., Any], label: str):
        # TorchDynamo bounds the number of compilations per code object: each kind has one of its own
        copy = FunctionType(function.__code__.replace(co_name=function.__name__), function.__globals__)
        self._run: Callable[..., Any] | None = torch.compile(copy, fullgraph=True, dynamic=True)
        self._label, self._compiled = label, False

    def __call__(self, *args: Any) -> Any:
        if self._run is not None and not self._compiled:
            return self._first(self._run, args)
        return None if self._run is None else self._run(*args)

    def _first(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        logger.warning(
            'twinkle_megatron compiles %s: some seconds, once; later runs find it in the compiler cache '
            '(TWINKLE_MEGATRON_KERNELS=eager does without)',
            self._label,
        )
        started = time.perf_counter()
        try:
            # equal sizes of this call (rows = columns, say) are a coincidence, not a condition to compile in
            with shape_config.patch(use_duck_shape=False):  # pyright: ignore[reportAttributeAccessIssue]
                result = run(*args)
        except Exception as error:  # any failure of the compiler leaves the eager kernels, which need none
            self._run = None
            logger.warning(
                'twinkle_megatron uses the eager kernel, slower but equal in value: torch.compile failed: %s: %s',
                type(error).__name__,
                error,
            )
            return None
        self._compiled = True
        logger.warning('twinkle_megatron compiled %s in %.1f s', self._label, time.perf_counter() - started)
        return result


@functools.cache
def _kernel(function: Callable[..., Any], kind: tuple[str, ...]) -> _Kernel:
    return _Kernel(function, f'{function.__name__.strip("_")} ({", ".join(kind)})')


def _regular(x: Tensor) -> bool:
    """Rows of adjacent columns that do not overlap; one row or one column is not worth a kernel of its own."""
    return x.shape[0] > 1 and x.shape[1] > 1 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _kind(x: Tensor) -> tuple[str, ...]:
    """What the compiler would otherwise find out and compile again for."""
    return (
        f'{x.dtype}'.removeprefix('torch.'),
        'whole rows' if x.stride(0) == x.shape[1] else 'part of the columns',
        *(('inference mode',) if torch.is_inference_mode_enabled() else ()),
    )


def _alone(x: Tensor) -> Tensor:
    """The same memory as a tensor of its own: no base, no storage offset, never the same object as another argument."""
    return torch.from_dlpack(x)


def _blocks(x: Tensor) -> list[slice]:
    height = max(1, EAGER_ROWS // x.shape[1])
    return [slice(top, top + height) for top in range(0, x.shape[0], height)]
