"""The GRPO family and its metrics on one global batch under any layout, padded or packed, beside their float64 formulas
(tests/policy_formulas.py) in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cover import SEQUENCE_FACTORS, SequenceCase, settings_of
from gradients import collect_grads
from invariance import LENGTH, Result, Split, samples
from ranks import device, run_ranks
from tiny_gpt import Layout, Spec, build, initialize, unwrapped, wrap

from tests.policy_formulas import LOSSES, Response, loss_of, metric_of, records_of
from twinkle_megatron import MegatronModel
from twinkle_megatron.metric import Accuracy, CISPOMetric, GRPOMetric, GSPOMetric, LossMetric

INIT: dict[str, dict[str, Any]] = {
    'GRPOLoss': {'clip_range': 0.1, 'clip_range_high': 0.3, 'beta': 0.04, 'entropy_coef': 0.01, 'temperature': 0.8},
    'GSPOLoss': {'clip_range': 0.02, 'beta': 0.04},
    'SAPOLoss': {'tau_pos': 1.5, 'tau_neg': 0.7, 'beta': 0.04},
    'CISPOLoss': {'clip_range_high': 0.1, 'beta': 0.04, 'entropy_coef': 0.01},
    'BNPOLoss': {'clip_range': 0.1, 'beta': 0.04},
    'DRGRPOLoss': {'clip_range': 0.1, 'max_completion_length': 24},
}
METRIC_INIT: dict[type, dict[str, Any]] = {
    GRPOMetric: {'epsilon': 0.1, 'epsilon_high': 0.3, 'top_k_kl': 5},
    GSPOMetric: {'epsilon': 0.02},
    CISPOMetric: {'epsilon': 0.3, 'epsilon_high': 0.1},
}

LENGTHS = (LENGTH, 5, 7, LENGTH, 16, 9, 3, 11)
"""Tokens of each sample."""

ALL = tuple(range(8))


@dataclass(frozen=True, kw_only=True)
class Case(SequenceCase):
    """`form` is how the extras are given."""

    loss: str
    form: str = 'ragged'

    def __str__(self) -> str:
        return f'{self.loss}-{super().__str__()}-{self.form}'


FORMS = ('ragged', 'rows', 'aligned')
EVERY = [
    case
    for settings, number in settings_of({'loss': LOSSES, **SEQUENCE_FACTORS})
    if (case := Case(**settings, form=FORMS[number % len(FORMS)], per_token=bool(number & 64))).possible
]


@dataclass(frozen=True)
class Rollouts:
    """Extras of the eight samples of invariance.py, in sample order; per-token ones for the trained tokens alone."""

    old_logps: list[torch.Tensor]
    ref_logps: list[torch.Tensor]
    advantages: list[float]


def rollouts(spec: Spec) -> Rollouts:
    """Near what the tiny GPT gives, so that ratios lie on both sides of every clip."""
    generator = torch.Generator().manual_seed(11)
    kept = [int((s['labels'] != -100).sum()) for s in cut_samples(spec)]
    level = -torch.log(torch.tensor(float(spec.vocab_size))) - 0.7

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


def extras(spec: Spec, split: Split, replica: int, packed: bool = False, form: str = 'ragged') -> dict[str, Any]:
    """What a replica is given beside its micro-batches, in sample order.

    'ragged': the trained tokens of each sample. 'rows': all of its tokens, advantages as an array `[S, 1]`. 'aligned':
    one tensor a micro-batch, in the shape of its labels. What stands at ignored tokens is NaN.
    """
    names = ('old_logps', 'ref_logps', 'advantages')
    at, given = split.replicas[replica], rollouts(spec)
    mine = [i for micro_batch in at for i in micro_batch]
    out: dict[str, Any] = {name: [getattr(given, name)[i] for i in mine] for name in names}
    if form == 'ragged':
        return out
    labels = [s['labels'][: LENGTHS[i] if packed else LENGTH] for i, s in enumerate(cut_samples(spec))]
    rows = {name: [_at_tokens(getattr(given, name)[i], labels[i]) for i in range(8)] for name in names}
    if form == 'rows':
        advantages = torch.tensor(out['advantages'], dtype=torch.float64).numpy()[:, None]
        return {name: [rows[name][i] for i in mine] for name in names} | {'advantages': advantages}
    join = (lambda parts: torch.cat(parts)[None]) if packed else torch.stack
    return {name: [join([rows[name][i] for i in micro_batch]) for micro_batch in at] for name in names}


def _at_tokens(values: Any, labels: torch.Tensor) -> torch.Tensor:
    row = torch.full(labels.shape, torch.nan, dtype=torch.float64)
    row[labels != -100] = torch.as_tensor(values, dtype=torch.float64)
    return row


def train(
    spec: Spec, layout: Layout, split: Split, packed: bool, runs: Sequence[tuple[str, str, str]], per_token: bool = True
) -> list[Result]:
    """On every rank: for each (loss, head, form of the extras) one forward-backward of this rank's replica, with all
    metrics."""
    initialize(layout)
    results = []
    spec = Spec(**{**vars(spec), 'config': {**spec.config, 'calculate_per_token_loss': per_token}})
    chunks = wrap(build(spec, layout))
    for loss, head, form in runs:
        model = MegatronModel(chunks, vocab_size=spec.vocab_size, head=head)
        model.zero_grad()
        model.set_loss(loss, **INIT[loss])
        metrics = [cls(model.groups, model.groups.dp_cp, **init) for cls, init in METRIC_INIT.items()]
        metrics += [LossMetric(model.groups, model.groups.dp_cp), Accuracy(model.groups, model.groups.dp_cp)]
        for metric in metrics:
            model.add_metric(metric)
        replica = dist.get_rank(model.groups.dp)
        out = model.forward_backward(
            inputs=micro_batches(spec, split, replica, packed), **extras(spec, split, replica, packed, form)
        )
        values = {type(metric).__name__: metric.values() for metric in metrics}
        shown = {type(metric).__name__: metric.calculate() for metric in metrics}
        records = shown['GRPOMetric'].pop('_high_kl_records')
        assert all(shown[name] == values[name] for name in ('GRPOMetric', 'GSPOMetric', 'CISPOMetric'))
        again = [metric.calculate() for metric in metrics[:3]]
        assert again == [{}, {}, {}], 'calculate must forget what it has shown'
        results.append(Result(out['loss'], collect_grads(model.chunks), {**values, 'records': records}, out['logps']))
    return results


_references: dict[str, Result] = {}


def reference(spec: Spec, loss: str, which: Sequence[int] = ALL) -> Result:
    """These samples of the batch in one process in float64, without this package. Computed once for each."""
    key = repr((spec, loss, which))
    if key not in _references:
        _references[key] = run_ranks(_reference, 1, spec, loss, which)[0]
    return _references[key]


def _reference(spec: Spec, loss: str, which: Sequence[int]) -> Result:
    initialize(Layout())
    (chunk,) = build(spec)
    whole, given = cut_samples(spec), rollouts(spec)
    ids = torch.stack([s['input_ids'] for s in whole]).to(device())
    positions = torch.arange(LENGTH, device=device()).expand(len(whole), LENGTH)
    logits = chunk(ids, positions, None)[..., : spec.vocab_size]
    plain, logp = logits.log_softmax(-1), (logits / INIT[loss].get('temperature', 1.0)).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    labels = torch.stack([s['labels'] for s in whole]).to(device())

    def of_labels(x: torch.Tensor) -> torch.Tensor:
        return x.gather(-1, labels.clamp_min(0)[..., None])[..., 0]

    responses = []
    for i in which:
        at = labels[i] != -100
        new, bare = of_labels(logp)[i, at], of_labels(plain)[i, at].detach()
        old, ref = given.old_logps[i].to(new), given.ref_logps[i].to(new)
        advantage = torch.as_tensor(given.advantages[i]).to(new)
        where, tokens = at.nonzero()[:, 0].tolist(), labels[i, at].tolist()
        responses.append(Response(new, old, ref, advantage, entropy[i, at], bare, where, tokens))
    total = loss_of(loss, INIT[loss], responses)
    total.backward()
    found = [Response(r.new.detach(), r.old, r.ref, r.advantages, r.entropy.detach(), r.plain) for r in responses]
    metrics = {cls.__name__: metric_of(cls.__name__, init, found) for cls, init in METRIC_INIT.items()}
    tokens = sum(len(r.new) for r in responses)
    kept = (labels != -100)[list(which)]
    correct = int(((logits.argmax(-1) == labels)[list(which)] & kept).sum())
    metrics['LossMetric'] = {'loss': total.item()}
    metrics['Accuracy'] = {'accuracy': correct / tokens, 'correct_tokens': correct, 'total_tokens': tokens}
    records = records_of(METRIC_INIT[GRPOMetric]['top_k_kl'], responses)
    logps = torch.where(labels != -100, of_labels(logp), 0).detach()
    return Result(total.item(), collect_grads([unwrapped(chunk)]), {**metrics, 'records': records}, [logps])
