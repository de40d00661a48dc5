"""Recorded values of Twinkle's losses, and how ours is compared with them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinkle_megatron import loss as losses
from twinkle_megatron.data_format import LossOutput

Record = dict[str, Any]


def records_of(classes: Collection[str], expect: str) -> list[Record]:
    """Of these classes, those that ours has to equal ('equal') or where Twinkle is wrong ('differs')."""
    every = torch.load(Path(__file__).parent / 'golden' / 'losses.pt', weights_only=True)
    return [record for record in every if record['cls'] in classes and record['expect'] == expect]


def name_of(record: Record) -> str:
    return record['name']


def tolerance_of(record: Record) -> dict[str, float]:
    return {'rtol': 1e-5, 'atol': 1e-7} if record['name'].endswith('f64') else {'rtol': 1e-4, 'atol': 1e-6}


def called(record: Record) -> tuple[LossOutput, dict[str, Tensor]]:
    """What our loss says, and the outputs it was given, which want a gradient."""
    outputs = {key: value.clone().requires_grad_() for key, value in record['outputs'].items()}
    return getattr(losses, record['cls'])(**record['init'])(record['inputs'], outputs, **record['call']), outputs


def replay(record: Record) -> tuple[LossOutput, dict[str, Tensor | None]]:
    """What our loss says, and its gradient for each of the outputs."""
    result, outputs = called(record)
    result['loss'].backward()
    return result, {key: value.grad for key, value in outputs.items()}


def assert_recorded(record: Record) -> None:
    """Ours has the recorded value and gradients."""
    result, grads = replay(record)
    assert float(result['num_tokens']) == record['num_tokens']
    torch.testing.assert_close(result['loss'], record['loss'], **tolerance_of(record))
    for key, expected in record['grads'].items():
        torch.testing.assert_close(grads[key], expected, **tolerance_of(record))
