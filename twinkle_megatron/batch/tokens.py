"""The tokens that a loss is taken over, their sequences, and what means over them divide by."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..data_format import InputFeature
from ..groups import group_rank, group_size, sum_over
from .context import BOUNDARIES, context_positions, whole_rows
from .pair_layout import counted_pairs
from .sequences import inside_sequences, packing_of, sequence_ids


class Counts(NamedTuple):
    """Of a global batch: trained tokens, sequences with at least one of them, pairs of sequences with at least one,
    trained tokens of chosen sequences, and groups of sequences. Each is counted once, whatever the layout; what nobody
    asks for is 0."""

    tokens: float
    sequences: float
    pairs: float = 0
    chosen_tokens: float = 0
    groups: float = 0


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one micro-batch that a loss is taken over: flat, whatever rows they come in.

    `labels` `[b, s]` are aligned with the logits; tokens that do not count hold `ignore_index`. Under context
    parallelism they are this rank's slice, and `cp` is the group that shares the sequences. `counts` are what means
    divide by: those of the global batch inside `MegatronModel`; None for those of this micro-batch, at least 1, so that
    the mean of nothing is 0. `totals` are the sums over the global batch of what the loss gave in `SweepLoss.totals`.
    """

    inputs: Mapping[str, Any]
    labels: Tensor
    ignore_index: int
    counts: Counts | None = None
    cp: ProcessGroup | None = None
    totals: Tensor | None = None

    @classmethod
    def of(
        cls,
        inputs: InputFeature,
        ignore_index: int = -100,
        counts: Counts | None = None,
        cp: ProcessGroup | None = None,
        totals: Tensor | None = None,
    ) -> TokenBatch:
        """From `inputs['labels']` and, where given, `completion_mask`, and what says which sequences a packed row
        holds: `position_ids` that restart at 0, `cu_seqlens`, `packed_seq_params`. A slice of a packed row has to bring
        `sequence_ids` `[1, T/cp]`. ValueError without labels."""
        return cls(inputs, trained_labels(inputs, ignore_index), ignore_index, counts, cp, totals)

    @functools.cached_property
    def mask(self) -> Tensor:
        """Which tokens count, bool."""
        return self.labels != self.ignore_index

    @property
    def count(self) -> Tensor:
        """Tokens of this micro-batch on this rank that count, int64."""
        return self.mask.sum()

    @functools.cached_property
    def tokens(self) -> float | Tensor:
        """What a mean over tokens divides by."""
        return sum_over(self.count, self.cp).clamp(min=1) if self.counts is None else max(self.counts.tokens, 1)

    @functools.cached_property
    def sequences(self) -> float | Tensor:
        """What a mean over sequences divides by: those with a trained token."""
        if self.counts is not None:
            return max(self.counts.sequences, 1)
        return (self.sequence_tokens > 0).sum().clamp(min=1)

    @functools.cached_property
    def sequence_ids(self) -> Tensor:
        """The sequence of each token, a number from 0 within the micro-batch, int64 of the shape of `labels`."""
        given = self.inputs.get('sequence_ids')
        if given is not None:
            return torch.as_tensor(given).to(self.labels.device)
        rows = _rows(self.labels)
        return sequence_ids(tuple(rows.shape), _packing(self.inputs, rows), rows.device).reshape(self.labels.shape)

    @functools.cached_property
    def sequence_tokens(self) -> Tensor:
        """Trained tokens of each sequence, of all context parallel ranks, int64 `[n]`."""
        given = self.inputs.get('sequence_tokens')
        if given is not None:
            return torch.as_tensor(given).to(self.labels.device)
        ids = self.sequence_ids
        highest = int(ids.max()) + 1 if ids.numel() else 0
        if group_size(self.cp) > 1:
            raise ValueError(
                "a slice of sequences must bring inputs['sequence_tokens'] [n], the trained tokens of each whole one"
            )
        return torch.zeros(highest, dtype=torch.int64, device=ids.device).index_add_(
            0, ids.reshape(-1), self.mask.reshape(-1).long()
        )

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Per-token `values` summed over the counting tokens of each sequence, `[n]`, the same on all context parallel
        ranks. Differentiable: each rank is given the gradient that all of them have found together.

        One all-reduce over the context parallel group forward and one backward.
        """
        counted = torch.where(self.mask, values, 0).reshape(-1)
        total = counted.new_zeros(self.sequence_tokens.numel()).index_add(0, self.sequence_ids.reshape(-1), counted)
        return sum_over_context(total, self.cp)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """As `sequence_sum`, divided by the counting tokens of the sequence; 0 for one that has none."""
        return self.sequence_sum(values) / self.sequence_tokens.clamp(min=1)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """`per_sequence` `[n]` at each of its tokens, in the shape of `labels`."""
        return per_sequence[self.sequence_ids]

    def whole(self, values: Tensor) -> Tensor:
        """Per-token `values` of this rank's slice, in the shape of `labels`, as whole rows `[b, s]` in input order, the
        same on all context parallel ranks: what stands before and after each token. Differentiable, like
        `sequence_sum`. `labels`, `mask` and `sequence_ids` can be made whole, too.

        One all-gather over the context parallel group forward and one all-reduce backward; a single rank gets `values`.
        ValueError for another shape, and by hand for a slice that does not say how it was cut.
        """
        if values.shape != self.labels.shape:
            shape = tuple(self.labels.shape)
            raise ValueError(f'values must have the shape of labels, {shape}, got {tuple(values.shape)}')
        if group_size(self.cp) == 1:
            return values
        if BOUNDARIES not in self.inputs:
            raise ValueError(
                f'a slice of sequences must come from batch.split_context: inputs must hold {BOUNDARIES!r}'
            )
        return whole_rows(values, self.cp, self.inputs[BOUNDARIES])

    def _own_part(self, values: Tensor) -> Tensor:
        """This rank's slice of whole rows; what is no whole row as it is."""
        cp, labels = group_size(self.cp), self.labels
        if cp == 1 or labels.dim() != 2 or values.shape != (labels.shape[0], labels.shape[1] * cp):
            return values
        at = context_positions(values.shape[1], cp, group_rank(self.cp), self.inputs.get(BOUNDARIES))
        return values[:, at.to(values.device)]

    def mean(self, values: Tensor, over: str = 'tokens', layout: str = 'interleaved') -> Tensor:
        """This rank's summand of a mean over the global batch: summed over micro-batches and ranks it is that mean.

        Args:
            values: per token, in the shape of `labels`, or of whole rows that all context parallel ranks have alike
                (`whole`); per pair `[p]` for pairs, the same on all context parallel ranks. What stands where nothing
                counts is never read.
            over: 'tokens': every token weighs the same. 'sequences': the mean over each sequence's tokens, and of these
                over the sequences that have any; or of `values` `[n]` beside labels `[b, s]`, which all context
                parallel ranks have alike, the mean over these. 'pairs': the mean over pairs of sequences with any
                trained token.
            layout: where the sequences of a pair lie. Inside `MegatronModel` a loss of pairs says so in its attribute
                `layout`, too, so that no pair is cut and they are counted.
        """
        if over == 'pairs':
            real = counted_pairs(self.sequence_tokens, layout)
            if values.shape != real.shape:
                raise ValueError(f'values must be one for each of the {len(real)} pairs, got {tuple(values.shape)}')
            count = real.sum().clamp(min=1) if self.counts is None else max(self.counts.pairs, 1)
            return torch.where(real, values, 0).sum() / (count * group_size(self.cp))
        values = self._own_part(values)
        if over == 'tokens':
            return torch.where(self.mask, values, 0).sum() / self.tokens
        if over == 'sequences' and values.dim() == 1 < self.labels.dim():
            real = self.sequence_tokens > 0
            if values.shape != real.shape:
                raise ValueError(f'values must be one for each of the {len(real)} sequences, got {tuple(values.shape)}')
            return torch.where(real, values, 0).sum() / (self.sequences * group_size(self.cp))
        if over == 'sequences':
            weight = 1 / self.sequence_tokens.clamp(min=1).to(values.dtype)
            return torch.where(self.mask, values * self.spread(weight), 0).sum() / self.sequences
        raise ValueError(f"over must be 'tokens', 'sequences' or 'pairs', got {over!r}")


def sum_over_context(x: Tensor, cp: ProcessGroup | None) -> Tensor:
    """The sum of `x` over the context parallel ranks. Differentiable: each rank is given the gradient that all of them
    have found together. One all-reduce forward and one backward, none for a single rank."""
    return _SumOverContext.apply(x, cp) if group_size(cp) > 1 else x


class _SumOverContext(torch.autograd.Function):
    """Sum over the context parallel ranks. Every rank uses the sum for its own tokens, so its gradient is the sum of
    what they all send back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return sum_over(x.detach().clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_over(grads[0].clone(), ctx.group), None


def trained_labels(inputs: InputFeature, ignore_index: int = -100) -> Tensor:
    """`labels` with `ignore_index` where `completion_mask` is 0, and in the padding between packed sequences.

    ValueError without labels or for unequal shapes.
    """
    labels = inputs.get('labels')
    if labels is None:
        raise ValueError(f"inputs must hold 'labels' (shifted, -100 where ignored), got the keys {sorted(inputs)}")
    labels = torch.as_tensor(labels)
    mask = inputs.get('completion_mask')
    if mask is not None:
        mask = torch.as_tensor(mask)
        if mask.shape != labels.shape:
            raise ValueError(
                f'completion_mask must have the shape of labels, {tuple(labels.shape)}, got {tuple(mask.shape)}; was '
                'it shifted with the labels?'
            )
        labels = labels.masked_fill(mask.to(labels.device, non_blocking=True) == 0, ignore_index)
    if inputs.get('sequence_ids') is None and (inputs.get('cu_seqlens') is not None or 'packed_seq_params' in inputs):
        rows = _rows(labels)
        inside = inside_sequences(tuple(rows.shape), _packing(inputs, rows), rows.device)
        if inside is not None:
            labels = labels.masked_fill(~inside.view(labels.shape), ignore_index)
    return labels


def _rows(labels: Tensor) -> Tensor:
    return labels.reshape(-1, labels.shape[-1] if labels.dim() else 1)


def _packing(inputs: Mapping[str, Any], rows: Tensor) -> Any:
    keys = ('position_ids', 'attention_mask', 'cu_seqlens', 'cu_seqlens_padded', 'packed_seq_params')
    given = {key: inputs[key] for key in keys if inputs.get(key) is not None}
    for key in ('position_ids', 'attention_mask'):
        value = given.get(key)
        if value is not None:
            value = torch.as_tensor(value)
            if value.numel() == rows.numel():
                given[key] = value.reshape(rows.shape)
            else:
                given.pop(key)
    return packing_of({**given, 'input_ids': rows})
