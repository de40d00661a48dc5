"""Micro-batches on their way to the schedule: what is counted of them, and what is wrong in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import (
    PER_SEQUENCE,
    Counts,
    Labelling,
    Packed,
    Packing,
    counted_pairs,
    explain_fault,
    pair_counts,
    targets_of,
    value_faults,
)
from ..batch.targets import TARGETS, WEIGHTS, counted_sequences

PREFIX = 'extra '
"""Of the keys under which keywords that are aligned with the labels travel in a micro-batch."""


class Item(NamedTuple):
    """One micro-batch of whole sequences, padded to what the schedule needs.

    `extra` holds keywords as they are, those that are aligned with the labels stand in `batch`. `shape` is that of the
    caller; `columns` `[b, s]` says where in their rows its tokens lie now, if they had to move.
    """

    batch: dict[str, Any]
    extra: dict[str, Any]
    shape: tuple[int, int]
    packing: Packing | None
    columns: Tensor | None
    is_padding: bool


class Census:
    """Counts of some micro-batches, and their wrong values: ids out of the vocabulary, keywords and labels that are
    NaN, sequences of which nothing is pooled, and what else `value_faults` knows."""

    def __init__(
        self,
        items: Sequence[Item],
        labelling: Labelling,
        vocab_size: int | None,
        max_length: int | None,
        packed: Packed | None = None,
    ) -> None:
        self._items, self._labelling, self._packed = items, labelling, packed
        self._ignore_index, self._layout = labelling.ignored, labelling.layout
        self._vocab_size, self._max_length = vocab_size, max_length

    def row(self) -> Tensor:
        """The `Counts`, and behind them the number of faults, float64, on the items' device: no host sync."""
        device = self._items[0].batch['input_ids'].device if self._items else 'cpu'
        zero = torch.zeros((), dtype=torch.int64, device=device)
        labelled = [item.batch for item in self._items if 'sequence_tokens' in item.batch]
        counts = [self._counts(batch, batch['sequence_tokens']) for batch in labelled]
        faults = sum((n for item in self._items for n in self._faults(item).values()), start=zero)
        totals = [sum(column, start=zero) for column in zip(*counts)] or [zero] * len(Counts._fields)
        return torch.stack([*totals, faults]).double()

    def _counts(self, batch: Mapping[str, Any], n: Tensor) -> tuple[Tensor, ...]:
        targets = targets_of(batch)
        grouped = self._labelling.in_groups and targets is not None
        groups = (targets != 0).sum().to(n.device) if grouped and targets is not None else n.new_zeros(())
        sequences = counted_sequences(batch, self._labelling).sum()
        return n.sum(), sequences, *pair_counts(n, self._layout), groups

    def first_fault(self) -> Exception | None:
        """The error for the first of the faults. Reads from the device."""
        for index, item in enumerate(self._items):
            for key, count in self._faults(item).items():
                if count and key.startswith(PREFIX):
                    return self._explain_nan(index, key)
                if count and key in (TARGETS, WEIGHTS):
                    return self._explain_sequence(index, key)
                if count:
                    return explain_fault(key, item.batch, index, self._vocab_size, self._ignore_index, self._max_length)
        return None

    def _faults(self, item: Item) -> dict[str, Tensor]:
        faults = value_faults(item.batch, self._vocab_size, self._ignore_index, self._max_length)
        own = (key for key, value in item.batch.items() if key.startswith(PREFIX) and value.dim() < 3)
        faults |= {key: self._missing(item.batch, key).sum() for key in own}
        return faults | {key: found.sum() for key, found in self._wrong_sequences(item.batch).items()}

    def _wrong_sequences(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Sequences whose labels are NaN where they count, or of which no token is pooled, bool `[n]` by key."""
        found, targets = {}, targets_of(batch)
        if WEIGHTS in batch:
            found[WEIGHTS] = batch['sequence_tokens'] == 0
        if targets is None or not targets.is_floating_point():
            return found
        lacks = targets.isnan()
        if self._labelling.kind == PER_SEQUENCE:
            return found | {TARGETS: lacks.view(len(lacks), targets[:1].numel()).any(1)}
        lacks = (lacks & (batch['labels'] != self._ignore_index)).reshape(-1)
        number = lacks.new_zeros(batch['sequence_tokens'].numel(), dtype=torch.int64)
        return found | {TARGETS: number.index_add_(0, batch['sequence_ids'].reshape(-1), lacks.long()) > 0}

    def _explain_sequence(self, index: int, key: str) -> ValueError:
        first = int(self._wrong_sequences(self._items[index].batch)[key].nonzero()[0])
        if key == WEIGHTS:
            return ValueError(
                f'inputs[{index}]: sequence {first} has no token to pool; does its attention_mask (or completion_mask) '
                'leave none?'
            )
        return ValueError(f"inputs[{index}]['labels'] of sequence {first} must be numbers where they count, got NaN")

    def _missing(self, batch: Mapping[str, Any], key: str) -> Tensor:
        """Where a keyword is NaN though it counts, `[b, s]` or, of one a pair, `[p]`."""
        lacks = batch[key].isnan()
        if lacks.dim() == 2:
            return lacks & (batch['labels'] != self._ignore_index)
        return lacks if self._layout is None else lacks & counted_pairs(batch['sequence_tokens'], self._layout)

    def _explain_nan(self, index: int, key: str) -> ValueError:
        batch, name = self._items[index].batch, key.removeprefix(PREFIX)
        bad = self._missing(batch, key)
        before = sum(int(item.batch['sequence_tokens'].numel()) for item in self._items[:index])
        if bad.dim() == 1:
            pair = before // 2 + int(bad.nonzero()[0])
            if self._packed is not None and self._packed.pairs is not None:
                pair = self._packed.pairs[pair]
            return ValueError(f'{name} of pair {pair} must be a number, got NaN')
        sample = before + int(batch['sequence_ids'][bad][0])
        if self._packed is not None:
            sample = self._packed.order[sample]
        return ValueError(
            f'{name} of sample {sample} must be numbers at its trained tokens, got NaN '
            f'({int(bad.sum())} in micro-batch {index})'
        )
