"""Makes a metric from what a person hands to `add_metric`."""

from __future__ import annotations

from typing import Any

from ..arguments import by_name
from .accuracy import Accuracy
from .base import Metric
from .completion import CompletionRewardMetric
from .dpo import DPOMetric
from .embedding import EmbeddingMetric
from .grpo import CISPOMetric, GRPOMetric, GSPOMetric
from .loss import LossMetric
from .train import TrainMetric

_CLASSES = (
    TrainMetric, LossMetric, Accuracy, CompletionRewardMetric, DPOMetric, GRPOMetric, GSPOMetric, CISPOMetric,
    EmbeddingMetric,
)  # fmt: skip
METRICS: dict[str, type[Metric]] = {cls.__name__: cls for cls in _CLASSES}


def build_metric(metric: Any, device_mesh: Any = None, process_group: Any = None, **init: Any) -> Metric:
    """A metric from its class, its name, or an instance.

    A class is called with `device_mesh`, `process_group` and `init`. An instance is given what it has not. Any
    class with `accumulate`, `calculate` and `reset` will do. ValueError for a function, an unknown name, or `init`
    beside an instance.
    """
    if isinstance(metric, str):
        metric = by_name(metric, METRICS, 'metric')
    if not all(callable(getattr(metric, name, None)) for name in ('accumulate', 'calculate', 'reset')):
        raise ValueError(
            'metric must be a Metric class, an instance or a name, because it needs accumulate, calculate and reset, '
            f'got {getattr(metric, "__qualname__", None) or type(metric).__name__}, which lacks them: a function '
            'cannot be reset, so make it a subclass of Metric'
        )
    if isinstance(metric, type):
        return metric(device_mesh=device_mesh, process_group=process_group, **init)
    if init:
        raise ValueError(f'{type(metric).__name__} is an instance already and takes no {sorted(init)}; pass the class')
    lacks_group = getattr(metric, 'process_group', None) is None
    if getattr(metric, 'device_mesh', None) is None and (lacks_group or isinstance(metric, Metric)):
        metric.device_mesh = device_mesh
        if lacks_group:
            metric.process_group = process_group
        if isinstance(metric, Metric):
            metric.check_groups()
    return metric
