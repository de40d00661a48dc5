"""The GRPO family and its metrics as their papers write them: one response after the other, in float64, without any of
this package's code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOKEN_MEANS = ('BNPOLoss', 'CISPOLoss')
LOSSES = ('GRPOLoss', 'GSPOLoss', 'SAPOLoss', 'CISPOLoss', 'BNPOLoss', 'DRGRPOLoss')
METRICS = ('GRPOMetric', 'GSPOMetric', 'CISPOMetric')


@dataclass(frozen=True)
class Response:
    """The trained tokens of one sequence `[n]`, n may be 0; `plain` are the log-probs at temperature 1."""

    new: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    entropy: Tensor
    plain: Tensor | None = None
    positions: Sequence[int] = ()
    token_ids: Sequence[int] = ()


def loss_of(loss: str, init: dict[str, Any], responses: Sequence[Response]) -> Tensor:
    """The loss of a batch."""
    terms = [tokens_of(loss, init, r) for r in responses if len(r.new)]
    if not terms:
        return torch.zeros(())
    if loss in TOKEN_MEANS:
        return torch.cat(terms).mean()
    if loss == 'DRGRPOLoss':
        return torch.cat(terms).sum() / (len(terms) * init.get('max_completion_length', 1024))
    return torch.stack([term.mean() for term in terms]).mean()


def tokens_of(loss: str, init: dict[str, Any], r: Response) -> Tensor:
    """The loss of each trained token of one response."""
    low = init.get('clip_range', 0.2)
    high = init.get('clip_range_high', low)
    ratio = (r.new - r.old).exp()
    if loss == 'GSPOLoss':
        ratio = (r.new - r.old).mean().exp().expand_as(r.new)
    if loss == 'SAPOLoss':
        signs = (r.advantages > 0).to(r.new)
        tau = signs * init.get('tau_pos', 1.0) + (1 - signs) * init.get('tau_neg', 1.0)
        policy = -r.advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    elif loss == 'CISPOLoss':
        policy = -ratio.clamp(max=1 + high).detach() * r.advantages * r.new
    else:
        policy = -torch.min(ratio * r.advantages, ratio.clamp(1 - low, 1 + high) * r.advantages)
    kl = (r.ref - r.new).exp() - (r.ref - r.new) - 1
    return policy + init.get('beta', 0.0) * kl - init.get('entropy_coef', 0.0) * r.entropy


def metric_of(metric: str, init: dict[str, Any], responses: Sequence[Response]) -> dict[str, float]:
    """What the metric says of a batch with at least one trained token."""
    low, high = 1 - init.get('epsilon', 0.2), 1 + init.get('epsilon_high', init.get('epsilon', 0.2))
    kept = [r for r in responses if len(r.new)]
    new, old, entropy = (torch.cat([getattr(r, name) for r in kept]) for name in ('new', 'old', 'entropy'))
    plain = torch.cat([r.new if r.plain is None else r.plain for r in kept])
    advantages = torch.cat([r.advantages.expand_as(r.new) for r in kept])
    ratio = (new - old).exp()
    kl = ratio - 1 - (new - old)
    judged, signs = ratio, advantages
    if metric == 'GSPOMetric':
        judged = torch.stack([(r.new - r.old).mean().exp() for r in kept])
        signs = torch.stack([r.advantages.expand_as(r.new).mean() for r in kept])
    too_low, too_high = judged < low, judged > high
    if metric != 'CISPOMetric':
        too_low, too_high = too_low & (signs < 0), too_high & (signs > 0)
    found = {
        'policy_confidence': math.exp(plain.mean()),
        'mean_new_logp': plain.mean(),
        'mean_old_logp': old.mean(),
        'logp_diff_mean': (new - old).mean(),
        'approx_kl': kl.mean(),
        'token_kl_max': kl.max(),
        'token_ratio_max': ratio.max(),
        'entropy': entropy.mean(),
        'clip_ratio_low': too_low.double().mean(),
        'clip_ratio_high': too_high.double().mean(),
        'clip_ratio': (too_low | too_high).double().mean(),
    }
    return {f'train/{name}': float(value) for name, value in found.items()}


def records_of(top_k: int, responses: Sequence[Response]) -> list[dict[str, Any]]:
    """The tokens with the highest KL; `responses` are in the order of the global batch."""
    records = []
    for gsi, r in enumerate(responses):
        for new, old, position, token in zip(r.new.tolist(), r.old.tolist(), r.positions, r.token_ids):
            ratio = math.exp(new - old)
            record = {'gsi': gsi, 'pos': position, 'token_id': token, 'kl': ratio - 1 - (new - old), 'ratio': ratio}
            records.append({**record, 'logp_new': new, 'logp_old': old})
    return sorted(records, key=lambda record: -record['kl'])[:top_k]
