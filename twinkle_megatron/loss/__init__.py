"""Losses on Megatron's shards, under Twinkle's names."""

from .base import Loss
from .cross_entropy import ChunkedCrossEntropyLoss, CrossEntropyLoss

__all__ = ['ChunkedCrossEntropyLoss', 'CrossEntropyLoss', 'Loss']
