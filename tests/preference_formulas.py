"""Preference losses and their metric as the papers write them: one pair after the other, in float64, without any of
this package's code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOSSES = ('DPOLoss', 'SimPOLoss', 'CPOLoss', 'ORPOLoss')


@dataclass(frozen=True)
class Pair:
    """Log-probs of the trained tokens of two sequences, under the policy and the reference; any may have none."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor

    @property
    def counts(self) -> bool:
        return len(self.chosen) + len(self.rejected) > 0


def loss_of(loss: str, init: dict[str, Any], pairs: Sequence[Pair]) -> Tensor:
    """The loss of a batch."""
    kept = [pair for pair in pairs if pair.counts]
    if not kept:
        return torch.zeros((), dtype=torch.float64)
    mean = torch.stack(pair_losses(loss, init, kept)).mean()
    tokens = torch.cat([pair.chosen for pair in kept])
    nll = -tokens.mean() if len(tokens) else torch.zeros(())
    if loss == 'ORPOLoss':
        return nll + init.get('beta', 0.1) * mean
    weight = init.get('cpo_alpha', 1.0) if loss == 'CPOLoss' else init.get('sft_weight', 0.0)
    return mean + weight * nll


def pair_losses(loss: str, init: dict[str, Any], pairs: Sequence[Pair]) -> list[Tensor]:
    if loss == 'SimPOLoss':
        beta, gamma = init.get('beta', 2.5), init.get('gamma', 0.5)
        return [-log_sigmoid(beta * (mean_of(p.chosen) - mean_of(p.rejected)) - gamma) for p in pairs]
    if loss == 'CPOLoss':
        return [-log_sigmoid(init.get('beta', 0.1) * (p.chosen.sum() - p.rejected.sum())) for p in pairs]
    if loss == 'ORPOLoss':
        return [-log_sigmoid(log_odds(mean_of(p.chosen)) - log_odds(mean_of(p.rejected))) for p in pairs]
    free = 0.0 if init.get('reference_free') else 1.0
    ratios = [(p.chosen - free * p.ref_chosen, p.rejected - free * p.ref_rejected) for p in pairs]
    beta, kind = init.get('beta', 0.1), init.get('loss_type', 'sigmoid')
    if kind == 'ipo':
        return [(mean_of(c) - mean_of(r) - 1 / (2 * beta)) ** 2 for c, r in ratios]
    sums = [(c.sum(), r.sum()) for c, r in ratios]
    if kind == 'kto':
        z_chosen = max(0.0, sum(c.item() for c, _ in sums) / len(sums))
        z_rejected = max(0.0, sum(r.item() for _, r in sums) / len(sums))
        return [2 - sigmoid(beta * (c - z_rejected)) - sigmoid(beta * (z_chosen - r)) for c, r in sums]
    if kind == 'hinge':
        return [torch.clamp(1 - beta * (c - r), min=0) for c, r in sums]
    eps = init.get('label_smoothing', 0.0)
    return [-(1 - eps) * log_sigmoid(beta * (c - r)) - eps * log_sigmoid(beta * (r - c)) for c, r in sums]


def mean_of(values: Tensor) -> Tensor:
    return values.mean() if len(values) else values.sum()


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


def log_odds(log_p: Tensor) -> Tensor:
    return log_p - torch.log(-torch.expm1(torch.clamp(log_p, max=-1e-7)))


def metric_of(beta: float, pairs: Sequence[Pair], reference: bool = True) -> dict[str, float]:
    """What `DPOMetric.values` says of a batch with at least one pair that counts."""
    kept = [pair for pair in pairs if pair.counts]

    def mean(values: list[Tensor] | list[float]) -> float:
        return math.fsum(float(value) for value in values) / len(kept)

    found = {
        'chosen_logps': mean([p.chosen.sum() for p in kept]),
        'rejected_logps': mean([p.rejected.sum() for p in kept]),
    }
    if reference:
        chosen = [beta * (p.chosen.sum() - p.ref_chosen.sum()) for p in kept]
        rejected = [beta * (p.rejected.sum() - p.ref_rejected.sum()) for p in kept]
        found['ref_chosen_logps'] = mean([p.ref_chosen.sum() for p in kept])
        found['ref_rejected_logps'] = mean([p.ref_rejected.sum() for p in kept])
        found |= {'rewards/chosen': mean(chosen), 'rewards/rejected': mean(rejected)}
        found['margin'] = mean([c - r for c, r in zip(chosen, rejected)])
        found['accuracy'] = mean([float(c > r) for c, r in zip(chosen, rejected)])
    twins = {
        'chosen_logps': 'logps/chosen', 'rejected_logps': 'logps/rejected', 'ref_chosen_logps': 'logps/ref_chosen',
        'ref_rejected_logps': 'logps/ref_rejected', 'margin': 'rewards/margins', 'accuracy': 'rewards/accuracies',
    }  # fmt: skip
    return found | {twins[name]: value for name, value in found.items() if name in twins}
