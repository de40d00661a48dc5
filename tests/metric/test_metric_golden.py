"""Twinkle's recorded results of Accuracy and LossMetric."""

from pathlib import Path
from typing import Any

import pytest
import torch

from twinkle_megatron.metric import build_metric

RECORDS = torch.load(Path(__file__).parents[1] / 'golden' / 'metrics.pt', weights_only=True)
EQUAL = [record for record in RECORDS if 'error' not in record]
REFUSED = [record for record in RECORDS if 'error' in record]


def replay(record: dict[str, Any]) -> Any:
    metric = build_metric(record['cls'], None, None, **record['init'])
    for inputs, outputs, keywords in record['ops']:
        metric.accumulate(inputs, outputs, **keywords)
    return metric


@pytest.mark.parametrize('record', EQUAL, ids=lambda record: record['name'])
def test_calculate_gives_the_recorded_result_and_resets(record):
    metric = replay(record)
    assert metric.calculate() == record['result']
    assert metric.calculate() == record['second_calculate']


@pytest.mark.parametrize('record', REFUSED, ids=lambda record: record['name'])
def test_what_twinkle_refused_as_a_list_counts_like_the_single_micro_batch(record):
    (single,) = [r for r in EQUAL if r['name'] == record['name'].removesuffix(' list')]
    assert replay(record).calculate() == single['result']
