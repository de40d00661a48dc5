"""Distillation on one global batch under any layout, padded or packed, beside its float64 formula
(tests/distillation_formulas.py) in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from cover import SEQUENCE_FACTORS, SequenceCase, settings_of
from gradients import collect_grads
from invariance import LENGTH, Result, Split
from policy import LENGTHS, cut_samples, micro_batches
from ranks import device, run_ranks
from tiny_gpt import Layout, Spec, build, initialize, unwrapped, wrap

from tests.distillation_formulas import best, full, remote
from twinkle_megatron import MegatronModel
from twinkle_megatron.metric import LossMetric

STUDENT = Spec(vocab_size=62, pad_vocab_to=4)
TEACHER = Spec(vocab_size=62, pad_vocab_to=4, hidden=16, heads=4)
OTHER_TEACHER = Spec(vocab_size=54, pad_vocab_to=3, hidden=16, heads=4)
"""With fewer ids, padded to other sizes, so that its shards are cut elsewhere."""

K = 5
KINDS: dict[str, tuple[dict[str, Any], Spec]] = {
    'mixed': ({'beta': 0.3, 'temperature': 0.8, 'chunk_size': 7}, TEACHER),
    'forward': ({'beta': 0.0}, TEACHER),
    'reverse': ({'beta': 1.0}, OTHER_TEACHER),
    'other vocabulary': ({'beta': 0.5, 'chunk_size': 1}, OTHER_TEACHER),
    'best': ({'beta': 0.6, 'topk': K}, TEACHER),
    'bucket': ({'beta': 0.6, 'topk': K, 'topk_tail': 'bucket', 'temperature': 1.3}, OTHER_TEACHER),
    'remote': ({'beta': 0.2, 'topk_tail': 'bucket', 'teacher_mode': 'topk_remote'}, TEACHER),
    'shards': ({'beta': 0.7}, TEACHER),
}
"""Arguments of the loss and the teacher, by a name: 'remote' gives the teacher's best tokens, 'shards' its logits, the
others its heads."""

ALL = tuple(range(8))


EVERY = [
    case
    for settings, number in settings_of(SEQUENCE_FACTORS | {'tp': (1, 2, 4)})
    if (case := SequenceCase(**settings, per_token=bool(number & 1))).possible
]


def _logits(spec: Spec) -> torch.Tensor:
    """Of all samples in one process `[8, LENGTH, V]`."""
    (chunk,) = build(spec)
    ids = torch.stack([s['input_ids'] for s in cut_samples(STUDENT)]).to(device()) % spec.vocab_size
    positions = torch.arange(LENGTH, device=device()).expand(len(ids), LENGTH)
    return chunk(ids, positions, None)[..., : spec.vocab_size].detach()


_teachers: dict[str, torch.Tensor] = {}


def teacher_logits(spec: Spec) -> torch.Tensor:
    """As `_logits`; computed once."""
    key = repr(spec)
    if key not in _teachers:

        def alone() -> torch.Tensor:
            initialize(Layout())
            return _logits(spec)

        _teachers[key] = run_ranks(alone, 1)[0]
    return _teachers[key]


def given(
    kind: str, split: Split, model: MegatronModel, teacher: torch.Tensor, batches: list[Any], packed: bool, cp: int
) -> dict[str, Any]:
    """The teacher's keywords of kinds 'remote' and 'shards'."""
    at = split.replicas[dist.get_rank(model.groups.dp)]
    if kind == 'remote':
        mine = [i for micro_batch in at for i in micro_batch]
        scores, ids = teacher.log_softmax(-1).topk(K, -1)
        kept = [s['labels'] != -100 for s in cut_samples(STUDENT)]
        return {
            'teacher_topk_logprobs': [scores[i][kept[i]].tolist() for i in mine],
            'teacher_topk_indices': [ids[i][kept[i]].tolist() for i in mine],
        }
    shard = model._engine.own_shard
    assert shard is not None
    columns = torch.nn.functional.pad(teacher, (0, 8), value=9.0)[..., shard.start : shard.stop]
    if packed:
        rows = [torch.cat([columns[i, : LENGTHS[i]] for i in micro_batch])[None] for micro_batch in at]
    else:
        rows = [torch.stack([columns[i] for i in micro_batch]) for micro_batch in at]
    return {'teacher_logits': rows} if model.groups.is_last_stage else {}


def train(
    layout: Layout, split: Split, packed: bool, head: str, per_token: bool, teachers: dict[str, torch.Tensor]
) -> dict[str, Result]:
    """On every rank: one forward-backward for each kind."""
    initialize(layout)
    spec = dataclasses.replace(STUDENT, config={'calculate_per_token_loss': per_token})
    chunks = wrap(build(spec, layout))
    model = MegatronModel(chunks, vocab_size=spec.vocab_size, head=head)
    batches = micro_batches(spec, split, dist.get_rank(model.groups.dp), packed)
    results = {}
    for kind, (init, teacher) in KINDS.items():
        model.zero_grad()
        model.set_loss('GKDLoss', **init)
        model.set_metric(LossMetric, is_training=True)
        model.add_metric('Accuracy', is_training=True)
        if kind in ('remote', 'shards'):
            keywords = given(kind, split, model, teachers[kind], batches, packed, layout.cp)
        else:
            inputs = [{**b, 'input_ids': b['input_ids'] % teacher.vocab_size} for b in batches]
            inputs = [{**b, 'labels': torch.where(b['labels'] < 0, b['labels'], 0)} for b in inputs]
            made = model.teacher(build(teacher, layout), vocab_size=teacher.vocab_size)
            keywords = {'teacher': made.heads(inputs)}
            assert bool(keywords['teacher']) is bool(model.groups.is_last_stage and batches)
        out = model.forward_backward(inputs=batches, **keywords)
        grads = collect_grads(model.chunks)
        results[kind] = Result(out['loss'], grads, model.metric_values(), out['logps'])
    return results


_references: dict[str, dict[str, Result]] = {}


def reference(student: Spec = STUDENT, which: Sequence[int] = ALL) -> dict[str, Result]:
    """These samples in one process in float64, for each kind. Computed once."""
    key = repr((student, which))
    if key not in _references:
        _references[key] = run_ranks(_reference, 1, student, which)[0]
    return _references[key]


def _reference(student: Spec, which: Sequence[int]) -> dict[str, Result]:
    initialize(Layout())
    (chunk,) = build(student)
    whole = cut_samples(STUDENT)
    ids, labels = (torch.stack([s[key] for s in whole]).to(device()) for key in ('input_ids', 'labels'))
    positions = torch.arange(LENGTH, device=device()).expand(len(ids), LENGTH)
    kept = torch.zeros_like(labels, dtype=torch.bool)
    kept[list(which)] = labels[list(which)] != -100
    results = {}
    for kind, (init, spec) in KINDS.items():
        teacher = _logits(dataclasses.replace(spec, layers=student.layers))
        chunk.zero_grad()
        logits = chunk(ids, positions, None)[..., : STUDENT.vocab_size]
        beta, temperature, tail = init['beta'], init.get('temperature', 1.0), init.get('topk_tail', 'renormalize')
        if kind == 'remote':
            scores, best_ids = teacher.log_softmax(-1).topk(K, -1)
            values = remote(logits, scores, best_ids, tail, beta)
        elif 'topk' in init:
            values = best(logits, teacher, K, tail, beta, temperature)
        else:
            values = full(logits, teacher, beta, temperature)
        total = values[kept].mean()
        total.backward()
        logp = (logits / temperature).log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        metrics = {'loss': total.item()}
        logps = torch.where(labels != -100, logp, 0).detach()
        results[kind] = Result(total.item(), collect_grads([unwrapped(chunk)]), metrics, [logps])
    return results
