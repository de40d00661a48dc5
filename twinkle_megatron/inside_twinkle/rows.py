"""Reads a micro-batch as Twinkle's `MegatronModel` hands it to a loss and to metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..batch.context import context_positions
from ..data_format import InputFeature
from ..groups import group_rank, group_size


@dataclass(frozen=True)
class Rows:
    """The whole sequences of a micro-batch, one a row, and where they came from.

    `inputs` hold `labels` `[n, s]` and `attention_mask` `[n, s]`, 0 where there is padding. `starts` are the first
    tokens of the sequences in the packed row `[1, T]` that they lay in, and its end; None for padded rows.
    """

    inputs: InputFeature
    starts: list[int] | None

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> Rows:
        """Twinkle unpacks `labels` (and log-probs), and leaves `position_ids` as they were, -1 in padding. Both are
        whole on the last pipeline stage. ValueError where they do not fit."""
        labels, positions = inputs.get('labels'), inputs.get('position_ids')
        if labels is None:
            raise ValueError(f"inputs must hold 'labels', got the keys {sorted(inputs)}; does every sample have them?")
        labels = torch.as_tensor(labels)
        labels = labels.reshape(1, -1) if labels.dim() < 2 else labels
        rows: dict[str, Any] = {'labels': labels}
        mask = inputs.get('completion_mask')
        if mask is not None:
            if tuple(mask.shape) != tuple(labels.shape):
                raise ValueError(
                    f'completion_mask must have the shape of labels, {tuple(labels.shape)}, got {tuple(mask.shape)}: '
                    'Twinkle unpacks and joins labels, but not this mask; set labels to -100 in its place'
                )
            rows['completion_mask'] = mask
        starts = None
        if positions is not None:
            positions = positions[0] if positions.dim() == 3 else positions
            if positions.shape == labels.shape:
                rows['attention_mask'] = positions >= 0
            else:
                rows['attention_mask'], starts = _unpacked(positions.reshape(-1) >= 0, positions.reshape(-1), labels)
        return cls(cast(InputFeature, rows), starts)

    @property
    def shape(self) -> tuple[int, int]:
        n, s = self.inputs['labels'].shape  # type: ignore[typeddict-item]
        return n, s

    def cells(self) -> Tensor:
        """The flat places in `[n, s]` of the tokens, as the model got them: `[n, s]` or `[1, T]`."""
        n, s = self.shape
        if self.starts is None:
            return torch.arange(n * s).view(n, s)
        return torch.cat([i * s + torch.arange(end - start) for i, (start, end) in enumerate(pairwise(self.starts))])[
            None
        ]

    def local_cells(self, cp: ProcessGroup | None) -> Tensor:
        """Those of what `local` gives, of this context parallel rank; without context parallelism `[n, s]`."""
        if group_size(cp) == 1:
            return torch.arange(self.shape[0] * self.shape[1]).view(self.shape)
        cells = self.cells()
        boundaries = None if self.starts is None else torch.tensor(self.starts)
        at = context_positions(cells.shape[1], group_size(cp), group_rank(cp), boundaries)
        return cells[:, at]

    def local(self, found: Tensor, cp: ProcessGroup | None) -> Tensor:
        """What the model gave for the tokens of this context parallel rank, `[b, s/cp, ...]` or `[1, T/cp, ...]`.

        Without context parallelism Twinkle hands it over as `[n, s, ...]`. With it, it unpacks the rank's part by the
        boundaries of the whole row: nothing is lost, and it is put together again here.
        """
        if self.starts is None or group_size(cp) == 1:
            return found
        held = self.starts[-1] // group_size(cp)
        inside = [min(start, held) for start in self.starts]
        lengths = [end - start for start, end in pairwise(inside)]
        if tuple(found.shape[:2]) != (len(lengths), max(lengths)):
            return found  # refused by its shape
        return torch.cat([row[:length] for row, length in zip(found, lengths)])[None]


def _unpacked(real: Tensor, positions: Tensor, labels: Tensor) -> tuple[Tensor, list[int]]:
    """Of a packed row, `[n, s]`, and where its sequences begin and end."""
    starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)]
    lengths = [end - start for start, end in pairwise(starts)]
    if tuple(labels.shape) != (len(lengths), max(lengths, default=0)):
        raise ValueError(
            f'labels must be unpacked by position_ids, which tell of {len(lengths)} sequences of at most '
            f'{max(lengths, default=0)} tokens, got {tuple(labels.shape)}'
        )
    out = torch.zeros(labels.shape, dtype=torch.bool, device=real.device)
    for row, start, end in zip(out, starts, starts[1:]):
        row[: end - start] = real[start:end]
    return out, starts
