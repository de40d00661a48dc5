"""Losses that are somebody else's: any callable `(inputs, outputs, **extra)`, as a summand of the global loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import keywords_of
from .batch import Counts, TokenBatch
from .data_format import InputFeature
from .seen import Pooled, PooledHead, Seen

_FORMULAS = ('contribution', 'token_losses', 'pair_losses')
"""Methods of this package's losses that `MegatronModel` calls."""


def overrides_call(loss: Any) -> bool:
    """Whether the loss is somebody's subclass of one of this package's that overrides `__call__`, and below that none
    of the methods which would be called in its place."""
    for cls in type(loss).__mro__:
        if cls.__module__.partition('.')[0] == __package__ or any(name in vars(cls) for name in _FORMULAS):
            return False
        if '__call__' in vars(cls):
            return True
    return False


class Weights(NamedTuple):
    """What a custom loss of a micro-batch is divided by: if it is a sum, or a mean, which weighs the same for every
    micro-batch of every rank."""

    of_sum: float
    of_mean: float

    @classmethod
    def of(cls, counts: Counts, micro_batches: int, cp: int, head: PooledHead | None) -> Weights:
        """`counts` and `micro_batches` of the global batch. A sum is over tokens, or over sequences where the head
        gives one thing for each, all of which every one of the `cp` context parallel ranks has."""
        per_token = head is None or head.pooling is None
        return cls(counts.tokens if per_token else counts.sequences * cp, micro_batches * cp)


BATCH = 'batch'
"""The keyword under which a custom loss that names it gets the `TokenBatch`."""


def takes_batch(loss: Callable[..., Any]) -> bool:
    """Whether a custom loss divides by the global counts itself: it names the keyword `batch`."""
    return BATCH in keywords_of(loss)


def custom_share(
    loss: Callable[..., Any],
    inputs: InputFeature,
    seen: Seen | Pooled,
    extra: Mapping[str, Any],
    batch: TokenBatch,
    weights: Weights,
) -> Tensor:
    """What the loss says of a micro-batch as a summand of the global loss: as it is, if it was given the `batch` to
    divide by, else divided by the weights. ValueError where it returns something else than a loss of what it was given,
    or writes to that."""
    exact = takes_batch(loss)
    extra = {**extra, BATCH: batch} if exact else extra
    source, name = seen.source, seen.name
    trains = source.requires_grad and torch.is_grad_enabled()
    version = source._version if isinstance(source, Tensor) else 0
    outputs: Any = {**seen.outputs(), name: source}
    result = loss(inputs, outputs, **extra)
    value, count = (result.get('loss'), result.get('num_tokens', 0)) if isinstance(result, Mapping) else (result, 0)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
        raise ValueError(
            "a loss must return a scalar tensor of floats, or {'loss': such a tensor, 'num_tokens': n}, got "
            f'{_described(result)}'
        )
    if trains and isinstance(source, Tensor) and source._version != version:
        raise ValueError(
            f"a loss must not write to outputs['{name}'], from which gradients are computed; work on a new tensor, "
            f'as in {name} / temperature'
        )
    if trains and not value.requires_grad and value.item() != 0:
        raise ValueError(
            f'a loss must depend on the {name}{" or logps" if name == "logits" else ""} in a way that autograd '
            f'sees, got the constant {value.item():g}; was it detached, or made with .item() or torch.tensor()?'
        )
    if exact:
        return value.reshape(())
    return value.reshape(()) / max(weights.of_sum if _is_sum(count) else weights.of_mean, 1)


def _described(result: Any) -> str:
    if isinstance(result, Tensor):
        return f'a tensor of shape {tuple(result.shape)} and {result.dtype}'
    if isinstance(result, Mapping):
        return f'{{{", ".join(f"{key!r}: {_described(value)}" for key, value in result.items())}}}'
    return type(result).__name__


def _is_sum(num_tokens: Any) -> bool:
    """Whether a loss is a sum over tokens: its `num_tokens` is above 0."""
    single = isinstance(num_tokens, Tensor) and num_tokens.numel() == 1
    given = num_tokens.item() if single else num_tokens
    count = float(given) if isinstance(given, Real) else math.nan
    if not count >= 0:
        got = given if isinstance(given, Real) else _described(num_tokens)
        raise ValueError(
            f"a loss's num_tokens must be one number: the tokens it is summed over, or 0 for a mean, got {got}"
        )
    return count > 0
