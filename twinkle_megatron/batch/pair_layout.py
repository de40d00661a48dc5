"""Where the sequences of a pair lie in a micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LAYOUTS = ('interleaved', 'separated')
"""Of the pairs of a micro-batch: chosen₀, rejected₀, chosen₁, …; or all chosen sequences, then all rejected ones."""


def check_layout(layout: Any) -> str:
    """ValueError unless it is one of `LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be 'interleaved' or 'separated', got {layout!r}")
    return layout


def check_pairs(sequences: int) -> None:
    """ValueError for an odd number of sequences."""
    if sequences % 2:
        raise ValueError(
            f'a micro-batch must hold whole pairs of a chosen and a rejected sequence, got {sequences} sequences'
        )


def split_pairs(per_sequence: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Of values `[n, ...]`, one a sequence of a micro-batch, those of chosen and of rejected sequences, `[n/2, ...]`.

    ValueError for an odd n.
    """
    count = len(per_sequence)
    check_pairs(count)
    if layout == 'interleaved':
        return per_sequence[0::2], per_sequence[1::2]
    return per_sequence[: count // 2], per_sequence[count // 2 :]


def join_pairs(chosen: Tensor, rejected: Tensor, layout: str) -> Tensor:
    """The inverse of `split_pairs`."""
    if layout == 'interleaved':
        return torch.stack([chosen, rejected], 1).flatten(0, 1)
    return torch.cat([chosen, rejected])


def counted_pairs(sequence_tokens: Tensor, layout: str) -> Tensor:
    """Which pairs have a trained token, bool `[p]`, from those of each sequence `[2p]`."""
    chosen, rejected = split_pairs(sequence_tokens, layout)
    return chosen + rejected > 0


def pair_counts(sequence_tokens: Tensor, layout: str | None) -> tuple[Tensor, Tensor]:
    """Pairs that count, and trained tokens of chosen sequences, of one micro-batch; zeros without a layout."""
    if layout is None:
        zero = sequence_tokens.new_zeros(())
        return zero, zero
    chosen, _ = split_pairs(sequence_tokens, layout)
    return counted_pairs(sequence_tokens, layout).sum(), chosen.sum()
