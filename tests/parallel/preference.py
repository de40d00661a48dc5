"""Preference losses and their metric on one global batch under any layout, padded or packed, beside their float64
formulas (tests/preference_formulas.py) in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cover import SEQUENCE_FACTORS, SequenceCase, settings_of
from gradients import collect_grads
from invariance import Result, Split
from ranks import device, run_ranks
from tiny_gpt import Layout, Spec, build, initialize, unwrapped, wrap

from tests.preference_formulas import Pair, loss_of, metric_of
from twinkle_megatron import MegatronModel
from twinkle_megatron.metric import LossMetric

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    'sigmoid': ('DPOLoss', {'beta': 0.3, 'sft_weight': 0.2, 'label_smoothing': 0.1}),
    'hinge': ('DPOLoss', {'loss_type': 'hinge', 'beta': 0.3}),
    'ipo': ('DPOLoss', {'loss_type': 'ipo', 'beta': 0.4}),
    'kto': ('DPOLoss', {'loss_type': 'kto', 'beta': 0.2, 'sft_weight': 0.1}),
    'free': ('DPOLoss', {'reference_free': True, 'beta': 0.05}),
    'simpo': ('SimPOLoss', {'beta': 2.0, 'gamma': 0.4}),
    'cpo': ('CPOLoss', {'beta': 0.2, 'cpo_alpha': 0.7}),
    'orpo': ('ORPOLoss', {'beta': 0.5}),
}
"""Loss and its arguments, by a name."""

BETA = 0.3
"""Of the metric."""

LENGTH = 16
LENGTHS = ((LENGTH, 5), (12, LENGTH), (LENGTH, 9), (4, 6), (10, 7), (13, LENGTH))
"""Tokens of the chosen and of the rejected sequence of each of the six pairs."""

KEPT = ((14, 1), (0, 9), (LENGTH, 2), (0, 0), (5, 7), (3, 11))
"""How many of them are trained: one pair has a chosen sequence without any, one has none at all."""

ALL = tuple(range(6))

SPLITS: dict[tuple[str, int], Split] = {
    (name, len(replicas)): Split(name, replicas)
    for name, replicas in (
        ('ones', (((0,), (1,), (2,), (3,), (4,), (5,)),)),
        ('threes', (((0, 1, 2), (3, 4, 5)),)),
        ('uneven', (((0, 1), (3,), (2, 4, 5)),)),
        ('ones', (((0,), (1,), (2,)), ((3,), (4,), (5,)))),
        ('threes', (((0, 1, 2),), ((3, 4, 5),))),
        ('uneven', (((0, 1, 2), (3,)), ((4, 5),))),
        ('empty', (((0, 1, 2), (3,), (4, 5)), ())),
    )
}
"""Which pairs each replica has in each of its micro-batches, by name and dp."""

FORMS = ('ragged', 'outputs', 'sums')
"""How the reference is given."""


@dataclass(frozen=True, kw_only=True)
class Case(SequenceCase):
    """`order` is the layout of the pairs, `form` how the reference is given."""

    order: str = 'interleaved'
    form: str = 'ragged'

    @property
    def cut(self) -> Split:
        return SPLITS[self.split, self.dp]

    def __str__(self) -> str:
        return f'{super().__str__()}-{self.order}-{self.form}'


def _case(settings: dict[str, Any], number: int) -> Case:
    order = 'separated' if number & 32 else 'interleaved'
    return Case(**settings, order=order, form=FORMS[number % len(FORMS)], per_token=bool(number & 64))


EVERY = [
    case
    for settings, number in settings_of(SEQUENCE_FACTORS | {'split': ('ones', 'threes', 'uneven', 'empty')})
    if (case := _case(settings, number)).possible
]


Sample = dict[str, torch.Tensor]


def samples(spec: Spec, seed: int = 3) -> list[tuple[Sample, Sample]]:
    """The global batch: chosen and rejected sample of each pair, ids and shifted labels, and log-probs of the reference
    at every token, NaN where nothing is trained. It lies below the policy for chosen samples, so that KTO has a
    baseline above 0."""
    generator = torch.Generator().manual_seed(seed)
    level = -torch.log(torch.tensor(float(spec.vocab_size)))

    def one(length: int, kept: int, below: float) -> Sample:
        ids = torch.randint(0, spec.vocab_size, (length + 1,), generator=generator)
        labels, ref = (
            ids[1:].clone(),
            level - below + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64),
        )
        ignored = torch.randperm(length, generator=generator)[kept:]
        labels[ignored], ref[ignored] = -100, torch.nan
        return {'input_ids': ids[:-1].clone(), 'labels': labels, 'ref': ref}

    return [(one(a, n, 0.5), one(b, m, 0.0)) for (a, b), (n, m) in zip(LENGTHS, KEPT, strict=True)]


def in_order(pairs: Sequence[tuple[Any, Any]], order: str) -> list[Any]:
    """The sequences of some pairs."""
    if order == 'interleaved':
        return [one for pair in pairs for one in pair]
    return [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]


def _rows(sequences: Sequence[Sample], key: str, packed: bool) -> torch.Tensor:
    if packed:
        return torch.cat([one[key] for one in sequences])[None]
    fill = {'input_ids': 0, 'labels': -100, 'ref': torch.nan}[key]
    out = sequences[0][key].new_full((len(sequences), LENGTH), fill)
    for row, one in zip(out, sequences):
        row[: len(one[key])] = one[key]
    return out


def micro_batches(spec: Spec, split: Split, replica: int, packed: bool, order: str) -> list[dict[str, torch.Tensor]]:
    """Of one replica: rows `[2p, LENGTH]`, or packed rows `[1, T]`."""
    whole, out = samples(spec), []
    for at in split.replicas[replica]:
        sequences = in_order([whole[i] for i in at], order)
        batch = {key: _rows(sequences, key, packed) for key in ('input_ids', 'labels')}
        if packed:
            batch['position_ids'] = torch.cat([torch.arange(len(one['labels'])) for one in sequences])[None]
        out.append(batch)
    return out


def reference_keywords(spec: Spec, split: Split, replica: int, packed: bool, order: str, form: str) -> dict[str, Any]:
    """The reference's log-probs for a replica.

    'ragged': the trained tokens of each sequence. 'outputs': what a model returned for each micro-batch. 'sums': one
    number a pair.
    """
    whole, at = samples(spec), split.replicas[replica]
    if form == 'outputs':
        rows = [_rows(in_order([whole[i] for i in mine], order), 'ref', packed) for mine in at]
        return {'ref_outputs': {'logps': rows}}
    if form == 'ragged':
        every = [one for mine in at for one in in_order([whole[i] for i in mine], order)]
        return {'ref_logps': [one['ref'][one['labels'] != -100] for one in every]}
    pairs = [whole[i] for mine in at for i in mine]
    sums = [[one['ref'].nansum().item() for one in pair] for pair in pairs]
    sums = [pair if KEPT[i] != (0, 0) else [torch.nan] * 2 for pair, i in zip(sums, (i for mine in at for i in mine))]
    return {f'ref_{side}_logps': [pair[i] for pair in sums] for i, side in enumerate(('chosen', 'rejected'))}


def train(
    spec: Spec, layout: Layout, split: Split, packed: bool, head: str, order: str, form: str, per_token: bool = True
) -> dict[str, Result]:
    """On every rank: for each kind of loss one forward-backward of this rank's replica, with its metrics."""
    initialize(layout)
    spec = Spec(**{**vars(spec), 'config': {**spec.config, 'calculate_per_token_loss': per_token}})
    chunks = wrap(build(spec, layout))
    model = MegatronModel(chunks, vocab_size=spec.vocab_size, head=head)
    replica = dist.get_rank(model.groups.dp)
    batches = micro_batches(spec, split, replica, packed, order)
    given = reference_keywords(spec, split, replica, packed, order, form)
    results = {}
    for kind, (loss, init) in KINDS.items():
        model.zero_grad()
        model.set_loss(loss, **init, layout=order)
        model.set_metric('DPOMetric', is_training=True, beta=BETA, layout=order)
        model.add_metric(LossMetric, is_training=True)
        out = model.forward_backward(inputs=batches, **given)
        values = model.metric_values()
        shown = model.calculate_metric()
        assert shown.keys() == values.keys()
        assert 'chosen_logps' not in model.metric_values(), 'calculate must forget what it has shown'
        results[kind] = Result(out['loss'], collect_grads(model.chunks), values, out['logps'])
    return results


_references: dict[str, dict[str, Result]] = {}


def reference(spec: Spec, which: Sequence[int] = ALL) -> dict[str, Result]:
    """These pairs of the batch in one process in float64, without this package, for each kind. Computed once."""
    key = repr((spec, which))
    if key not in _references:
        _references[key] = run_ranks(_reference, 1, spec, which)[0]
    return _references[key]


def _reference(spec: Spec, which: Sequence[int]) -> dict[str, Result]:
    initialize(Layout())
    (chunk,) = build(spec)
    sequences = [one for pair in samples(spec) for one in pair]
    ids, labels = (_rows(sequences, key, False).to(device()) for key in ('input_ids', 'labels'))
    positions = torch.arange(LENGTH, device=device()).expand(len(ids), LENGTH)
    results = {}
    for kind, (loss, init) in KINDS.items():
        chunk.zero_grad()
        logits = chunk(ids, positions, None)[..., : spec.vocab_size]
        logp = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        mine = []
        for i in which:
            at = [labels[row] != -100 for row in (2 * i, 2 * i + 1)]
            new = [logp[2 * i, at[0]], logp[2 * i + 1, at[1]]]
            ref = [one['ref'][one['labels'] != -100].to(logp) for one in sequences[2 * i : 2 * i + 2]]
            mine.append(Pair(*new, *ref))
        total = loss_of(loss, init, mine)
        total.backward()
        found = [Pair(p.chosen.detach(), p.rejected.detach(), p.ref_chosen, p.ref_rejected) for p in mine]
        metrics = {**metric_of(BETA, found), 'loss': total.item()}
        logps = torch.where(labels != -100, logp, 0).detach()
        results[kind] = Result(total.item(), collect_grads([unwrapped(chunk)]), metrics, [logps])
    return results
