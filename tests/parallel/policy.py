"""The GRPO family on one global batch under any layout, padded or packed, beside its float64 formulas in one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gradients import collect_grads
from invariance import LENGTH, Result, Split, samples
from ranks import device, run_ranks
from tiny_gpt import Layout, Spec, build, initialize, unwrapped, wrap

from twinkle_megatron import MegatronModel

INIT: dict[str, dict[str, Any]] = {
    'GRPOLoss': {'clip_range': 0.1, 'clip_range_high': 0.3, 'beta': 0.04, 'entropy_coef': 0.01, 'temperature': 0.8},
    'GSPOLoss': {'clip_range': 0.02, 'beta': 0.04},
    'SAPOLoss': {'tau_pos': 1.5, 'tau_neg': 0.7, 'beta': 0.04},
    'CISPOLoss': {'clip_range_high': 0.1, 'beta': 0.04, 'entropy_coef': 0.01},
    'BNPOLoss': {'clip_range': 0.1, 'beta': 0.04},
    'DRGRPOLoss': {'clip_range': 0.1, 'max_completion_length': 24},
}


LENGTHS = (LENGTH, 5, 7, LENGTH, 16, 9, 3, 11)
"""Tokens of each sample."""


@dataclass(frozen=True)
class Rollouts:
    """Extras of the eight samples of invariance.py, in sample order; per-token ones for the trained tokens alone."""

    old_logps: list[torch.Tensor]
    ref_logps: list[torch.Tensor]
    advantages: list[float]


def rollouts(spec: Spec) -> Rollouts:
    """Near a uniform policy, so that ratios lie on both sides of every clip."""
    generator = torch.Generator().manual_seed(5)
    kept = [int((s['labels'] != -100).sum()) for s in cut_samples(spec)]
    level = -torch.log(torch.tensor(float(spec.vocab_size)))

    def near(count: int) -> torch.Tensor:
        return level + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)

    return Rollouts(
        [near(n) for n in kept], [near(n) for n in kept], torch.randn(len(kept), generator=generator).tolist()
    )


def cut_samples(spec: Spec) -> list[dict[str, torch.Tensor]]:
    """The samples of invariance.py, of several lengths: what is behind the length is not trained."""
    out = []
    for sample, length in zip(samples(spec), LENGTHS):
        labels = sample['labels'].clone()
        labels[length:] = -100
        out.append({**sample, 'labels': labels})
    return out


def micro_batches(spec: Spec, split: Split, replica: int, packed: bool) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of one replica: rows `[b, LENGTH]`, or packed rows `[1, T]` without what is behind a sample."""
    whole = cut_samples(spec)
    if not packed:
        return [{key: torch.stack([whole[i][key] for i in at]) for key in whole[0]} for at in split.replicas[replica]]
    out = []
    for at in split.replicas[replica]:
        row = {key: torch.cat([whole[i][key][: LENGTHS[i]] for i in at])[None] for key in whole[0]}
        out.append({**row, 'position_ids': torch.cat([torch.arange(LENGTHS[i]) for i in at])[None]})
    return out


def extras(spec: Spec, split: Split, replica: int) -> dict[str, Any]:
    """What a replica is given beside its micro-batches, in sample order."""
    at = [i for micro_batch in split.replicas[replica] for i in micro_batch]
    whole = rollouts(spec)
    return {name: [getattr(whole, name)[i] for i in at] for name in ('old_logps', 'ref_logps', 'advantages')}


def train_once(spec: Spec, layout: Layout, split: Split, loss: str, packed: bool, **arguments: Any) -> Result:
    """On every rank: one forward-backward of this rank's replica."""
    initialize(layout)
    model = MegatronModel(wrap(build(spec, layout)), vocab_size=spec.vocab_size, **arguments)
    model.set_loss(loss, **INIT[loss])
    replica = dist.get_rank(model.groups.dp)
    out = model.forward_backward(inputs=micro_batches(spec, split, replica, packed), **extras(spec, split, replica))
    return Result(out['loss'], collect_grads(model.chunks), {}, out['logps'])


_references: dict[str, Result] = {}


def reference(spec: Spec, loss: str) -> Result:
    """The whole batch in one process in float64, without this package. Computed once for each spec and loss."""
    key = repr((spec, loss))
    if key not in _references:
        _references[key] = run_ranks(functools.partial(_reference, spec, loss), 1)[0]
    return _references[key]


def _reference(spec: Spec, loss: str) -> Result:
    initialize(Layout())
    (chunk,) = build(spec)
    whole = cut_samples(spec)
    ids = torch.stack([s['input_ids'] for s in whole]).to(device())
    positions = torch.arange(LENGTH, device=device()).expand(len(whole), LENGTH)
    logits = chunk(ids, positions, None)[..., : spec.vocab_size]
    temperature = INIT[loss].get('temperature', 1.0)
    logp = (logits / temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    terms, given = [], rollouts(spec)
    for i, sample in enumerate(whole):
        at = sample['labels'] != -100
        if at.any():
            mine = logp[i, at].gather(-1, sample['labels'][at].to(device())[:, None])[:, 0]
            old, ref = given.old_logps[i].to(mine), given.ref_logps[i].to(mine)
            terms.append(tokens_of(loss, mine, old, ref, given.advantages[i], entropy[i, at]))
    total = mean_of(loss, terms)
    total.backward()
    labels = torch.stack([s['labels'] for s in whole]).to(device())
    picked = logp.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    logps = torch.where(labels != -100, picked, 0).detach()
    return Result(total.item(), collect_grads([unwrapped(chunk)]), {}, [logps])


def tokens_of(
    loss: str, logp: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, advantage: float, entropy: torch.Tensor
) -> torch.Tensor:
    """The loss of each trained token of one sequence, by the papers' formulas."""
    init = INIT[loss]
    low, beta = init.get('clip_range', 0.2), init.get('beta', 0.0)
    high = init.get('clip_range_high', low)
    ratio = (logp - old).exp()
    if loss == 'GSPOLoss':
        ratio = (logp - old).mean().exp().expand_as(logp)
    if loss == 'SAPOLoss':
        tau = init['tau_pos'] if advantage > 0 else init['tau_neg']
        policy = -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    elif loss == 'CISPOLoss':
        policy = -ratio.clamp(max=1 + high).detach() * advantage * logp
    else:
        policy = -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    kl = (ref - logp).exp() - (ref - logp) - 1
    return policy + beta * kl - init.get('entropy_coef', 0.0) * entropy


def mean_of(loss: str, terms: list[torch.Tensor]) -> torch.Tensor:
    """The loss of the batch from the tokens of its sequences."""
    if loss in ('BNPOLoss', 'CISPOLoss'):
        return torch.cat(terms).mean()
    if loss == 'DRGRPOLoss':
        return torch.cat(terms).sum() / (len(terms) * INIT[loss]['max_completion_length'])
    return torch.stack([term.mean() for term in terms]).mean()
