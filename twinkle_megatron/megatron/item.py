"""Micro-batches on their way to the schedule: what is counted of them, and what is wrong in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import Counts, Packing, counted_pairs, explain_fault, pair_counts, value_faults

PREFIX = 'extra '
"""Of the keys under which keywords that are aligned with the labels travel in a micro-batch."""


class Item(NamedTuple):
    """One micro-batch of whole sequences, padded to what the schedule needs.

    `extra` holds keywords as they are, those that are aligned with the labels stand in `batch`. `shape` is that of the
    caller; in a packed row `columns` says where its tokens lie now, if they had to move.
    """

    batch: dict[str, Any]
    extra: dict[str, Any]
    shape: tuple[int, int]
    packing: Packing | None
    columns: Tensor | None
    is_padding: bool


class Census:
    """Counts of some micro-batches, and their wrong values: ids out of the vocabulary, keywords that are NaN, and what
    else `value_faults` knows.

    `layout` is where the sequences of a pair lie; None: nobody asks for pairs.
    """

    def __init__(
        self,
        items: Sequence[Item],
        ignore_index: int,
        vocab_size: int | None,
        max_length: int | None,
        layout: str | None,
    ) -> None:
        self._items, self._ignore_index, self._layout = items, ignore_index, layout
        self._vocab_size, self._max_length = vocab_size, max_length

    def row(self) -> Tensor:
        """The `Counts`, and behind them the number of faults, float64, on the items' device: no host sync."""
        device = self._items[0].batch['input_ids'].device if self._items else 'cpu'
        zero = torch.zeros((), dtype=torch.int64, device=device)
        per_sequence = [item.batch['sequence_tokens'] for item in self._items if 'sequence_tokens' in item.batch]
        counts = [(n.sum(), (n > 0).sum(), *pair_counts(n, self._layout)) for n in per_sequence]
        faults = sum((n for item in self._items for n in self._faults(item).values()), start=zero)
        totals = [sum(column, start=zero) for column in zip(*counts)] or [zero] * len(Counts._fields)
        return torch.stack([*totals, faults]).double()

    def first_fault(self) -> Exception | None:
        """The error for the first of the faults. Reads from the device."""
        for index, item in enumerate(self._items):
            for key, count in self._faults(item).items():
                if count and key.startswith(PREFIX):
                    return self._explain_nan(index, key)
                if count:
                    return explain_fault(key, item.batch, index, self._vocab_size, self._ignore_index, self._max_length)
        return None

    def _faults(self, item: Item) -> dict[str, Tensor]:
        faults = value_faults(item.batch, self._vocab_size, self._ignore_index, self._max_length)
        own = (key for key, value in item.batch.items() if key.startswith(PREFIX) and value.dim() < 3)
        return faults | {key: self._missing(item.batch, key).sum() for key in own}

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
            return ValueError(f'{name} of pair {before // 2 + int(bad.nonzero()[0])} must be a number, got NaN')
        sample = before + int(batch['sequence_ids'][bad][0])
        return ValueError(
            f'{name} of sample {sample} must be numbers at its trained tokens, got NaN '
            f'({int(bad.sum())} in micro-batch {index})'
        )
