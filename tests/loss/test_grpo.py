"""GRPO and its variants called by hand: recorded values of Twinkle, plain float64 formulas, far-off policies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_megatron import loss as losses
from twinkle_megatron.loss import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss
from twinkle_megatron.loss.grpo import k3

FAMILY = (GRPOLoss, GSPOLoss, SAPOLoss, CISPOLoss, BNPOLoss, DRGRPOLoss)
NAMES = [cls.__name__ for cls in FAMILY]
RECORDS = [
    r
    for r in torch.load(Path(__file__).parents[1] / 'golden' / 'losses.pt', weights_only=True)
    if r['cls'] in NAMES
]
F64 = torch.float64


def run(record):
    outputs = {key: value.clone().requires_grad_() for key, value in record['outputs'].items()}
    return getattr(losses, record['cls'])(**record['init'])(record['inputs'], outputs, **record['call']), outputs


@pytest.mark.parametrize('record', [r for r in RECORDS if r['expect'] == 'equal'], ids=lambda r: r['name'])
def test_recorded_values_and_gradients(record):
    result, outputs = run(record)
    tolerance = {'rtol': 1e-5, 'atol': 1e-7} if record['name'].endswith('f64') else {'rtol': 1e-4, 'atol': 1e-6}
    assert float(result['num_tokens']) == record['num_tokens']
    torch.testing.assert_close(result['loss'], record['loss'], **tolerance)
    result['loss'].backward()
    for key, expected in record['grads'].items():
        torch.testing.assert_close(outputs[key].grad, expected, **tolerance)
