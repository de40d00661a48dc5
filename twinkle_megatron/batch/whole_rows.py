"""A micro-batch of whole sequences, which keywords of a call are aligned with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .sequences import Packing, packing_of, sequence_ids, sequence_lengths
from .tokens import trained_labels


@dataclass(frozen=True)
class WholeRows:
    """A micro-batch of whole sequences, before any split: what extras are aligned with."""

    batch: Mapping[str, Any]
    packing: Packing | None
    ignore_index: int

    @classmethod
    def of(cls, inputs: Mapping[str, Any], ignore_index: int) -> WholeRows:
        """From an InputFeature, whose labels may be 1-D."""
        labels = trained_labels(cast(Any, inputs), ignore_index)
        rows = {key: _row(torch.as_tensor(value)) for key, value in inputs.items() if _is_row(value, labels)}
        rows['labels'] = _row(labels)
        rest = {key: inputs[key] for key in ('cu_seqlens', 'cu_seqlens_padded', 'packed_seq_params') if key in inputs}
        batch = {'input_ids': rows['labels'], **rest, **rows}
        return cls(batch, packing_of(batch), ignore_index)

    @property
    def labels(self) -> Tensor:
        """`[b, s]`"""
        return self.batch['labels']

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sequence. A host read."""
        return sequence_lengths(self.batch, self.packing).tolist()

    @property
    def count(self) -> int:
        """Sequences."""
        return self.labels.shape[0] if self.packing is None else self.packing.lengths.numel()

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where each sequence begins in the flattened labels."""
        if self.packing is not None:
            return self.packing.boundaries[:-1].tolist()
        return [row * self.labels.shape[1] for row in range(self.labels.shape[0])]

    @functools.cached_property
    def trained(self) -> np.ndarray:
        """Which of the flattened labels count. A host read."""
        return (self.labels != self.ignore_index).reshape(-1).cpu().numpy()

    @functools.cached_property
    def ids(self) -> Tensor:
        """The sequence of each token, int64 `[b, s]`."""
        return sequence_ids(tuple(self.labels.shape), self.packing, self.labels.device)

    @functools.cached_property
    def tokens(self) -> Tensor:
        """Trained tokens of each sequence, int64 `[n]`."""
        trained = (self.labels != self.ignore_index).reshape(-1).long()
        return trained.new_zeros(self.count).index_add_(0, self.ids.reshape(-1), trained)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """`[n]` at each token of its sequence, `[b, s]`."""
        return per_sequence.to(self.labels.device)[self.ids]


def _is_row(value: Any, labels: Tensor) -> bool:
    try:
        return tuple(np.shape(value)) == tuple(labels.shape)
    except ValueError:
        return False


def _row(x: Tensor) -> Tensor:
    return x.reshape(1, -1) if x.dim() < 2 else x
