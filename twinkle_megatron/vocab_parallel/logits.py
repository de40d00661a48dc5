"""What the operations of this package take as logits."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from .linear_head import LinearHead
from .linear_source import LinearSource
from .shard import VocabShard
from .source import Source
from .tensor_source import TensorSource

Logits: TypeAlias = Tensor | LinearHead
"""`[..., V/tp]` that exist, or a linear head that never builds them."""


def local_size(logits: Logits) -> int:
    """Columns of the logits on this rank; 0 for a number."""
    if isinstance(logits, LinearHead):
        return logits.local_size
    return logits.shape[-1] if logits.dim() else 0


def as_source(logits: Logits, shard: VocabShard, chunk_size: int | None = None, reuse_storage: bool = False) -> Source:
    """`logits` as a source of tiles, for one sweep. ValueError for what are no logits of this shard.

    `reuse_storage` means nothing to a linear head, whose logits have no storage.
    """
    if not isinstance(shard, VocabShard):
        raise ValueError(
            f'shard must be a VocabShard, got {type(shard).__name__}; VocabShard.from_group(local_size, group) '
            'makes one'
        )
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f'chunk_size must be an int >= 1 (vocabulary entries handled at once), got {chunk_size!r}')
    if isinstance(logits, LinearHead):
        return LinearSource(logits, shard, chunk_size)
    if isinstance(logits, Tensor):
        return TensorSource(logits, shard, chunk_size, reuse_storage)
    raise ValueError(f'logits must be a tensor [..., {shard.local_size}] or a LinearHead, got {type(logits).__name__}')
