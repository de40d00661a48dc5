"""Losses on Megatron's shards, under Twinkle's names."""

from .base import Loss
from .cross_entropy import ChunkedCrossEntropyLoss, CrossEntropyLoss
from .grpo import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss

__all__ = [
    'BNPOLoss',
    'CISPOLoss',
    'ChunkedCrossEntropyLoss',
    'CrossEntropyLoss',
    'DRGRPOLoss',
    'GRPOLoss',
    'GSPOLoss',
    'Loss',
    'SAPOLoss',
]
