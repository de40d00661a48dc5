"""This package's losses and metrics for the `MegatronModel` of twinkle-kit: the same names, of Twinkle's own kinds.

    from twinkle_megatron.inside_twinkle import GRPOLoss, GRPOMetric

    model.set_loss(GRPOLoss, beta=0.04)
    model.add_metric(GRPOMetric, is_training=True)

Needs twinkle-kit 0.5.1, which this module imports. `docs/twinkle.md` says what is exact there under which layout.
"""

from __future__ import annotations

from .. import loss, metric
from .losses import adapted_loss
from .metrics import adapted_metric

__all__ = [
    'Accuracy', 'BNPOLoss', 'CISPOLoss', 'CISPOMetric', 'CPOLoss', 'ChunkedCrossEntropyLoss', 'CompletionRewardMetric',
    'CrossEntropyLoss', 'DPOLoss', 'DPOMetric', 'DRGRPOLoss', 'EmbeddingMetric', 'GKDLoss', 'GRPOLoss', 'GRPOMetric',
    'GSPOLoss', 'GSPOMetric', 'InfonceLoss', 'LossMetric', 'MSELoss', 'ORPOLoss', 'SAPOLoss', 'SimPOLoss',
    'TrainMetric', 'adapted_loss', 'adapted_metric',
]  # fmt: skip

CrossEntropyLoss = adapted_loss(loss.CrossEntropyLoss)
ChunkedCrossEntropyLoss = adapted_loss(loss.ChunkedCrossEntropyLoss, logps=False)
DPOLoss = adapted_loss(loss.DPOLoss)
SimPOLoss = adapted_loss(loss.SimPOLoss)
CPOLoss = adapted_loss(loss.CPOLoss)
ORPOLoss = adapted_loss(loss.ORPOLoss)
GKDLoss = adapted_loss(loss.GKDLoss)
GRPOLoss = adapted_loss(loss.GRPOLoss)
GSPOLoss = adapted_loss(loss.GSPOLoss)
SAPOLoss = adapted_loss(loss.SAPOLoss)
CISPOLoss = adapted_loss(loss.CISPOLoss)
BNPOLoss = adapted_loss(loss.BNPOLoss)
DRGRPOLoss = adapted_loss(loss.DRGRPOLoss)
InfonceLoss = adapted_loss(loss.InfonceLoss, logps=False)
MSELoss = adapted_loss(loss.MSELoss, logps=False)

TrainMetric = adapted_metric(metric.TrainMetric)
LossMetric = adapted_metric(metric.LossMetric)
Accuracy = adapted_metric(metric.Accuracy)
CompletionRewardMetric = adapted_metric(metric.CompletionRewardMetric)
DPOMetric = adapted_metric(metric.DPOMetric)
GRPOMetric = adapted_metric(metric.GRPOMetric)
GSPOMetric = adapted_metric(metric.GSPOMetric)
CISPOMetric = adapted_metric(metric.CISPOMetric)
EmbeddingMetric = adapted_metric(metric.EmbeddingMetric)
