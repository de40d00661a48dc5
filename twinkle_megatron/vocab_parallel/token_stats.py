"""One differentiable operation behind cross entropy, log-prob, entropy, z-loss, label smoothing and argmax.

Every rank sweeps its own columns once and keeps a few numbers per token; one all-gather of these over the tensor
parallel group gives every rank the exact statistics of the whole row. With y = logits / temperature, m the row maximum
and p = softmax(y), every statistic has a gradient of one form,

    dL/dlogits = (1/T) · [ p · (a + b · (y − m)) + c + g · 1[id = target] ]      (c on true ids only)

with four numbers a, b, c, g per token, so one forward and one backward kernel serve them all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..groups import all_gather_rows
from .kernels import Kernels, select
from .kernels.eager import accumulate_dtype, check_temperature
from .labels import check_target, raise_for, raise_pending
from .logits import Logits, as_source
from .once import once_only
from .row_sums import LocalSums, Wanted, combine, label_codes
from .shard import VocabShard
from .source import Source, Tile


@dataclass(frozen=True)
class TokenStats:
    """Per-token statistics of y = logits / temperature over the whole true vocabulary, `[...]`.

    Bitwise the same on all TP ranks. What was not asked for is None. Ignored tokens hold 0, and −1 in `argmax`.
    """

    log_prob: Tensor | None = None
    """log p(target), nats."""
    log_normalizer: Tensor | None = None
    """log Σ exp(y)."""
    entropy: Tensor | None = None
    """−Σ p log p, nats."""
    mean_logit: Tensor | None = None
    """Mean of y over the true vocabulary."""
    argmax: Tensor | None = None
    """Global id of the largest logit, the lowest among equals; int64, not differentiable."""
    plain_log_prob: Tensor | None = None
    """log p(target) at temperature 1, whatever that of the others is, nats; not differentiable."""

    def detach(self) -> TokenStats:
        """The same numbers without their history."""
        return self._each(Tensor.detach)

    def first_rows(self, count: int) -> TokenStats:
        """Of the first entries along dim 0."""
        return self._each(lambda x: x[:count])

    def _each(self, function: Callable[[Tensor], Tensor]) -> TokenStats:
        return TokenStats(*(None if x is None else function(x) for x in vars(self).values()))


def token_stats(
    logits: Logits,
    target: Tensor | None = None,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    mean_logit: bool = False,
    argmax: bool = False,
    plain_log_prob: bool = False,
    chunk_size: int | None = None,
    reuse_storage: bool = False,
) -> TokenStats:
    """Statistics of each token's distribution over a vocabulary that is split over the tensor parallel group.

    Args:
        logits: `[..., shard.local_size]`, this rank's columns; float16, bfloat16, float32 or float64, any strides. Or a
            `LinearHead`, which has more collectives and keeps other things.
        target: `[...]` global ids aligned with the logits (already shifted), replicated over TP; None: no `log_prob`.
        shard: which ids the columns are, and the group.
        temperature: the logits are divided by it inside the operation; > 0.
        ignore_index: tokens with this target have value 0 and gradient exactly 0, whatever their logits hold.
        entropy, mean_logit, argmax, plain_log_prob: compute these too, in the same sweep.
        chunk_size: columns handled at once; bounds memory, changes no value beyond rounding. None: as many as fit.
        reuse_storage: write the gradient into the storage of `logits`. They are destroyed by the backward pass; a
            second backward through them is an error.

    Returns:
        `TokenStats`, float32 (float64 for float64 logits), differentiable in the logits but for `argmax` and
        `plain_log_prob`. Upstream
        gradients must be equal on all TP ranks, as they are when every rank computes the same loss.

    Collectives: one all-gather of at most 8 numbers a token over TP forward, none backward. Kept for backward: the
    logits and 5 numbers a token. The gradient has the dtype of the logits; it has no gradient of its own.

    Raises ValueError: wrong shape, dtype or temperature, before any collective; a target outside `[0, vocab_size)`, on
    every rank after it (on CUDA by a later call, without a host sync; its log_prob is NaN).
    """
    raise_pending()
    source = as_source(logits, shard, chunk_size, reuse_storage)
    reuse_storage = reuse_storage and isinstance(logits, Tensor)  # a linear head has no such storage
    check_temperature(temperature, source.dtype)
    if target is not None:
        check_target(target, source.lead, source.device)
        if not isinstance(ignore_index, Integral):
            raise ValueError(f'ignore_index must be an int, got {ignore_index!r}; -100 where no label is to be ignored')
    normalizer = not argmax or target is not None or entropy or mean_logit
    plain = plain_log_prob and target is not None and temperature != 1
    wanted = Wanted(target is not None, entropy, mean_logit, argmax, normalizer, plain)
    if source.rows == 0:
        return _with_plain(_no_rows(source, wanted)) if plain_log_prob else _no_rows(source, wanted)
    flat = None if target is None else target.reshape(-1).long()
    request = _Request(
        source, flat, shard, float(temperature), int(ignore_index), reuse_storage, wanted, torch.is_grad_enabled()
    )
    outputs = _TokenStats.apply(request, *source.tensors)
    stats = TokenStats(*(None if out is None else out.view(source.lead) for out in outputs))
    return _with_plain(stats) if plain_log_prob and not plain else stats


def _with_plain(stats: TokenStats) -> TokenStats:
    """At temperature 1, or without tokens, it is the log-prob."""
    return replace(stats, plain_log_prob=None if stats.log_prob is None else stats.log_prob.detach())


class _Request(NamedTuple):
    source: Source
    target: Tensor | None  # [N]
    shard: VocabShard
    temperature: float
    ignore_index: int
    reuse_storage: bool
    wanted: Wanted
    trains: bool


def _no_rows(source: Source, wanted: Wanted) -> TokenStats:
    """Empty statistics that still have a gradient path. Every rank has no rows, so none enters a collective."""
    empty = _NoRows.apply(source, *source.tensors)
    return TokenStats(
        log_prob=empty if wanted.log_prob else None,
        log_normalizer=empty if wanted.normalizer else None,
        entropy=empty if wanted.entropy else None,
        mean_logit=empty if wanted.mean else None,
        argmax=empty.detach().long() if wanted.argmax else None,
    )


class _NoRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Source, *tensors: Tensor) -> Tensor:
        ctx.source = _without_tensors(source)
        ctx.save_for_backward(*tensors)
        return torch.zeros(source.lead, dtype=accumulate_dtype(source.dtype), device=source.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        detached = tuple(t.detach() for t in ctx.saved_tensors)
        return (None, *ctx.source.gradients(detached, tuple(ctx.needs_input_grad[1:]), lambda tile, out: None, None))


class _TokenStats(torch.autograd.Function):
    """Per-token tensors are `[N]` in the order of the leading dims; only the sweeps over tiles use the source's row
    order, which may differ from rank to rank with the memory layout of their logits."""

    @staticmethod
    def forward(ctx: Any, request: _Request, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        source, target, shard, temperature, ignore_index, _, wanted, trains = request
        ignored = None if target is None else target == ignore_index
        if ignored is not None:
            source = source.without(ignored.view(source.lead))
        request = request._replace(source=source)
        kernels = select(source.device, source.rows, shard.true_columns)
        inv_t = torch.full((), 1 / temperature, dtype=accumulate_dtype(source.dtype), device=source.device)
        trained = tuple(ctx.needs_input_grad[1:]) if trains and wanted.normalizer else ()
        with torch.autocast(source.device.type, enabled=False):
            local = _sweep(request, tuple(t.detach() for t in tensors), kernels, inv_t, ignored, trained)
        whole = combine(all_gather_rows(local.pack(source), shard.group), inv_t, shard, wanted)

        log_prob = whole.log_prob
        if target is not None and ignored is not None:
            assert log_prob is not None
            assert whole.bad_label is not None
            raise_for(target.view(source.lead), whole.bad_label.view(source.lead), shard, ignore_index)
            log_prob = torch.where(whole.bad_label, torch.nan, log_prob)
        outputs = [log_prob if wanted.log_prob else None, whole.log_normalizer, whole.entropy, whole.mean]
        best = whole.best
        if ignored is not None:
            outputs = [None if out is None else out.masked_fill(ignored, 0) for out in outputs]
            best = None if best is None else best.masked_fill(ignored, -1)
        plain = whole.plain
        if plain is not None and whole.bad_label is not None and ignored is not None:
            plain = plain.masked_fill(whole.bad_label, torch.nan).masked_fill(ignored, 0)

        local_target = None if target is None else shard.local_ids(target)
        # autograd keeps the tensors, and lets go of them after backward: the context must not
        ctx.request = request._replace(target=None, source=_without_tensors(source))
        ctx.spent = False
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in (best, plain) if x is not None))
        ctx.save_for_backward(inv_t, whole.m, whole.log_s, whole.offset, local_target, ignored, *tensors)
        return (*outputs, best, plain)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                'the first backward has overwritten the logits with their gradient (reuse_storage=True); for '
                'a second backward through the same logits call with reuse_storage=False'
            )
        ctx.spent = ctx.request.reuse_storage
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = _gradients(ctx.request, saved, grads, tuple(ctx.needs_input_grad[1:]))
        return (None, *once_only(found, (*saved, *grads)))


def _gradients(
    request: _Request, saved: tuple[Any, ...], grads: tuple[Tensor | None, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Of the source's tensors, from what `_TokenStats` saved and the gradients of its outputs."""
    source, shard = request.source, request.shard
    inv_t, m, log_s, offset, local_target, ignored, *tensors = saved
    kernels = select(source.device, source.rows, shard.true_columns)
    zero = torch.zeros_like(m)
    if local_target is None:
        local_target = torch.full_like(m, -1, dtype=torch.int32)
    coefficients = _Coefficients.of(grads, zero, offset, ignored, inv_t, shard.vocab_size)
    own_column, m, log_s, *rows = (
        None if x is None else source.flatten(x.view(source.lead)) for x in (local_target, m, log_s, *coefficients)
    )
    assert own_column is not None
    assert m is not None
    assert log_s is not None

    def fill(tile: Tile, out: Tensor) -> None:
        at, first, last = tile.rows, tile.columns.start, tile.columns.stop
        own = own_column[at]
        own = torch.where((own >= first) & (own < last), own - first, -1)
        kernels.row_grad(tile.x, out, own, inv_t, m[at], log_s[at], *(None if k is None else k[at] for k in rows))

    detached = tuple(t.detach() for t in tensors)
    with torch.autocast(source.device.type, enabled=False):
        return source.gradients(detached, needed, fill, kernels.max_elements)


class _Coefficients(NamedTuple):
    """g, a, b, c of the module's formula, each already divided by the temperature; b and c None where they are 0."""

    at_target: Tensor
    a: Tensor
    b: Tensor | None
    c: Tensor | None

    @classmethod
    def of(
        cls,
        grads: tuple[Tensor | None, ...],
        zero: Tensor,
        offset: Tensor | None,
        ignored: Tensor | None,
        inv_t: Tensor,
        vocab_size: int,
    ) -> _Coefficients:
        """From the upstream gradients of (log_prob, log_normalizer, entropy, mean_logit, ...); offset = E[y] − m."""

        def scaled(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            grad = grad.to(zero.dtype) * inv_t
            return grad if ignored is None else grad.masked_fill(ignored, 0)

        log_prob, log_normalizer, entropy, mean = map(scaled, grads[:4])
        a = zero
        if log_prob is not None:
            a = a - log_prob
        if log_normalizer is not None:
            a = a + log_normalizer
        if entropy is not None and offset is not None:
            # rows without entropy gradient keep a exact 0 even where their offset is not finite
            a = a + torch.where(entropy == 0, 0, entropy * offset)
        return cls(
            at_target=zero if log_prob is None else log_prob,
            a=a,
            b=None if entropy is None else -entropy,
            c=None if mean is None else mean / vocab_size,
        )


def _without_tensors(source: Source) -> Source:
    bare = copy.copy(source)
    bare.tensors = ()
    return bare


def _sweep(
    request: _Request,
    tensors: tuple[Tensor, ...],
    kernels: Kernels,
    inv_t: Tensor,
    ignored: Tensor | None,
    trained: tuple[bool, ...],
) -> LocalSums:
    source, target, shard, wanted = request.source, request.target, request.shard, request.wanted
    zeros = torch.zeros(source.rows, dtype=inv_t.dtype, device=source.device)

    def state(needed: bool) -> Tensor | None:
        return zeros.clone() if needed else None

    local = LocalSums(
        inv_t=inv_t,
        top=zeros - torch.inf,
        s=state(wanted.normalizer),
        t=state(wanted.entropy),
        total=state(wanted.mean),
        best=state(wanted.argmax),
        target_logit=state(wanted.log_prob),
        plain_s=state(wanted.plain),
        label=None,
    )
    column = None
    if target is not None and ignored is not None:
        column = shard.local_ids(target)
        local.label = label_codes(target, column, ignored, shard.vocab_size, zeros.dtype)
        column = source.flatten(column.view(source.lead))
    for tile in source.tiles(tensors, kernels.max_elements, trained):
        flags = (wanted.entropy, wanted.mean, wanted.argmax, wanted.normalizer)
        found = kernels.row_stats(tile.x, inv_t, *flags)
        if wanted.plain:
            found = [*found, kernels.row_stats(tile.x, torch.ones_like(inv_t), False, False, False, True)[1]]
        local.fold(tile, found)
        if column is not None and local.target_logit is not None:
            tile.pick(column[:, None], local.target_logit[:, None])
    if local.best is not None:
        local.best += shard.start
    return local
