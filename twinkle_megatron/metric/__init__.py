"""Training metrics: sums as state, one reduction over the data parallel group, the same numbers on every rank."""

from .accuracy import Accuracy
from .base import Metric
from .build import build_metric
from .completion import CompletionRewardMetric
from .dpo import DPOMetric
from .embedding import EmbeddingMetric
from .grpo import CISPOMetric, GRPOMetric, GSPOMetric
from .loss import LossMetric
from .state import MAXIMUM, MINIMUM, SUM, Field
from .train import TrainMetric

__all__ = [
    'MAXIMUM',
    'MINIMUM',
    'SUM',
    'Accuracy',
    'CISPOMetric',
    'CompletionRewardMetric',
    'DPOMetric',
    'EmbeddingMetric',
    'Field',
    'GRPOMetric',
    'GSPOMetric',
    'LossMetric',
    'Metric',
    'TrainMetric',
    'build_metric',
]
