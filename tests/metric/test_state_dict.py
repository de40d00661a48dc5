"""What a metric has summed up goes through a checkpoint's file, and another one of its kind goes on from there."""

from __future__ import annotations

import inspect
import io
from typing import ClassVar

import pytest
import torch

from twinkle_megatron.metric import (
    SUM,
    Accuracy,
    CISPOMetric,
    CompletionRewardMetric,
    DPOMetric,
    EmbeddingMetric,
    GRPOMetric,
    GSPOMetric,
    LossMetric,
    Metric,
    TrainMetric,
)
from twinkle_megatron.metric.build import METRICS

LABELS = torch.tensor([[1, 2, -100, 3], [4, -100, 0, 1]])
RESPONSES = {'old_logps': torch.full((2, 4), -1.5), 'advantages': torch.tensor([1.0, -0.5])}


class Own(Metric):
    fields: ClassVar = {'calls': SUM}

    def accumulate(self, inputs, outputs, **facts):
        self.state.fold(calls=1)

    def figures(self, totals):
        return {'calls': totals['calls']}


CASES = {
    Accuracy: {},
    LossMetric: {},
    DPOMetric: {'ref_logps': torch.full((2, 4), -2.0)},
    GRPOMetric: RESPONSES,
    GSPOMetric: RESPONSES,
    CISPOMetric: RESPONSES,
    EmbeddingMetric: {},
    CompletionRewardMetric: {'rewards': {'a': [1.0, 2.5], 'b': [0.0, 4.0]}, 'completions': [3, 9]},
    TrainMetric: {'lr': [1e-3, 1e-4], 'step': 7, 'gradient_accumulation_steps': 2},
    Own: {},
}


def made(cls):
    return cls(top_k_kl=3) if 'top_k_kl' in inspect.signature(cls).parameters else cls()


def fed(metric, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = {'labels': LABELS}
    outputs = {'logits': torch.randn(2, 4, 5, generator=generator), 'loss': torch.tensor(1.5), 'num_tokens': 0}
    if isinstance(metric, EmbeddingMetric):
        inputs = {'labels': torch.tensor([1, 0, 1, 0])}
        outputs = {'embeddings': torch.randn(4, 8, generator=generator), 'loss': torch.tensor(2.0), 'num_tokens': 2}
    metric.accumulate(inputs, outputs, **CASES[type(metric)])
    return metric


def test_every_metric_has_a_case():
    assert set(METRICS.values()) <= set(CASES)


@pytest.mark.parametrize('cls', CASES, ids=lambda cls: cls.__name__)
def test_another_one_goes_on_with_what_was_kept(cls):
    first = fed(fed(made(cls), 1), 2)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = fed(made(cls), 9)  # what it has is replaced
    second.load_state_dict(torch.load(file, weights_only=True))
    shown = [fed(metric, 3).calculate() for metric in (first, second)]
    for one in shown:
        one.pop('speed', None)  # of the clock
    assert shown[0]
    assert shown[0] == shown[1]
    again = [fed(metric, 4).calculate() for metric in (first, second)]
    assert {k: v for k, v in again[0].items() if k != 'speed'} == {k: v for k, v in again[1].items() if k != 'speed'}
