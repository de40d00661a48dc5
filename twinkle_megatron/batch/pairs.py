"""Pairs of sequences, one chosen and one rejected: where they lie in a micro-batch, and means over them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..groups import group_size
from .budget import Packed, packed_row
from .micro_batches import DEFAULT_SIZE, as_micro_batches
from .pair_layout import counted_pairs, join_pairs, split_pairs
from .targets import Labelling, group_sizes, targets_apart
from .tokens import TokenBatch


@dataclass(frozen=True)
class Pairs:
    """The sequences of one micro-batch as p pairs. A pair counts if any of its tokens does."""

    batch: TokenBatch
    layout: str

    def split(self, per_sequence: Tensor) -> tuple[Tensor, Tensor]:
        """Values `[n]` of the chosen and of the rejected sequences, `[p]` each."""
        return split_pairs(per_sequence, self.layout)

    @functools.cached_property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Trained tokens of the chosen and of the rejected sequences, int64 `[p]` each."""
        return self.split(self.batch.sequence_tokens)

    @functools.cached_property
    def real(self) -> Tensor:
        """Which pairs count, bool `[p]`."""
        return counted_pairs(self.batch.sequence_tokens, self.layout)

    @functools.cached_property
    def count(self) -> float | Tensor:
        """What a mean over pairs divides by."""
        counts = self.batch.counts
        return self.real.sum().clamp(min=1) if counts is None else max(counts.pairs, 1)

    @functools.cached_property
    def chosen_tokens(self) -> float | Tensor:
        """What a mean over the tokens of chosen sequences divides by."""
        counts = self.batch.counts
        return self.tokens[0].sum().clamp(min=1) if counts is None else max(counts.chosen_tokens, 1)

    def sums(self, per_token: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the trained tokens of the chosen and of the rejected sequences, `[p]` each, the same on all context
        parallel ranks; see `TokenBatch.sequence_sum`."""
        return self.split(self.batch.sequence_sum(per_token))

    def total(self, per_pair: Tensor) -> Tensor:
        """This rank's summand of a sum over pairs. All context parallel ranks know every pair, so each brings a share.
        What stands at pairs that do not count is never read."""
        return torch.where(self.real, per_pair, 0).sum() / group_size(self.batch.cp)

    def mean(self, per_pair: Tensor) -> Tensor:
        """This rank's summand of a mean over the pairs of the global batch."""
        return self.total(per_pair) / self.count

    def chosen_mean(self, per_token: Tensor) -> Tensor:
        """This rank's summand of a mean over the trained tokens of the chosen sequences of the global batch."""
        chosen, rejected = self.tokens
        is_chosen = join_pairs(torch.ones_like(chosen), torch.zeros_like(rejected), self.layout).bool()
        counted = self.batch.mask & self.batch.spread(is_chosen)
        return torch.where(counted, per_token, 0).sum(dtype=torch.float64) / self.chosen_tokens


class Collated(NamedTuple):
    """The micro-batches of a call, and in which order its samples and its pairs became them; None: in that in which
    they were given."""

    batches: list[dict[str, Any]]
    order: list[int] | None
    pairs: list[int] | None = None


def collated(inputs: Any, micro_batch_size: int | None, labelling: Labelling, packed: Packed | None = None) -> Collated:
    """`as_micro_batches`, without cutting pairs or groups where there are such, and with labels that are no ids as
    `TARGETS` where they are not per token. `packed` samples become the rows that it says."""
    if packed is not None:
        samples = targets_apart([inputs] if isinstance(inputs, Mapping) else inputs, labelling.kind)

        def rows(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [packed_row([tensors[i] for i in row], labelling.ignored) for row in packed.rows]

        return Collated(as_micro_batches(samples, None, labelling.ignored, join=rows), packed.order, packed.pairs)
    order = order_of_samples(inputs, micro_batch_size, labelling.layout)
    samples = targets_apart(inputs if order is None else [inputs[i] for i in order], labelling.kind)
    sizes = group_sizes if labelling.in_groups else None
    return Collated(as_micro_batches(samples, micro_batch_size, labelling.ignored, sizes), order)


def order_of_samples(inputs: Any, micro_batch_size: int | None, layout: str | None) -> list[int] | None:
    """In which order a list of 1-D samples becomes micro-batches of whole pairs; None: in that in which they are given.

    Of separated samples, all chosen ones first, each micro-batch takes some pairs, and has their chosen samples first.
    ValueError where a pair would be cut.
    """
    if layout is None or not _are_samples(inputs):
        return None
    if len(inputs) % 2:
        raise ValueError(
            f'inputs must hold pairs of a chosen and a rejected sample ({layout}), got {len(inputs)} samples'
        )
    size = DEFAULT_SIZE if micro_batch_size is None else micro_batch_size
    if not isinstance(size, Integral) or size < 1:
        return None  # refused with the other arguments
    size = int(size)
    if size % 2:
        raise ValueError(f'micro_batch_size must be even, so that no pair is cut, got {size}')
    if layout == 'interleaved':
        return None
    pairs, step = len(inputs) // 2, size // 2
    parts = [range(first, min(first + step, pairs)) for first in range(0, pairs, step)]
    return [i for part in parts for i in (*part, *(pairs + i for i in part))]


def _are_samples(inputs: Any) -> bool:
    """Whether these are 1-D samples, as far as can be told before they are checked."""
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        return False
    try:
        return all(isinstance(one, Mapping) and np.ndim(one['input_ids']) == 1 for one in inputs)
    except (KeyError, ValueError):
        return False
