"""Losses on Megatron's shards, under Twinkle's names."""

from .base import Loss
from .cross_entropy import ChunkedCrossEntropyLoss, CrossEntropyLoss
from .gkd import GKDLoss
from .grpo import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss
from .infonce import InfonceLoss
from .mse import MSELoss
from .preference import CPOLoss, DPOLoss, ORPOLoss, PreferenceLossBase, SimPOLoss

__all__ = [
    'BNPOLoss',
    'CISPOLoss',
    'CPOLoss',
    'ChunkedCrossEntropyLoss',
    'CrossEntropyLoss',
    'DPOLoss',
    'DRGRPOLoss',
    'GKDLoss',
    'GRPOLoss',
    'GSPOLoss',
    'InfonceLoss',
    'Loss',
    'MSELoss',
    'ORPOLoss',
    'PreferenceLossBase',
    'SAPOLoss',
    'SimPOLoss',
]
