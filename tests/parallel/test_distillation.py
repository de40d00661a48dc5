"""The promise for distillation: padded or packed, whatever the layout and the split, of any teacher."""

from __future__ import annotations

import pytest
import torch
from cover import IMPOSSIBLE, assert_covered, cover, on_few_ranks
from distillation import (
    EVERY,
    KINDS,
    STUDENT,
    TEACHER,
    micro_batches,
    reference,
    teacher_logits,
    train,
)
from gradients import compare, padding_grad
from invariance import even
from policy import LENGTHS
from ranks import run_ranks
from tiny_gpt import Layout, build, initialize, wrap

from twinkle_megatron import MegatronModel
from twinkle_megatron.vocab_parallel import VocabShard


def run_case(case, layout=None, timeout=120):
    """All kinds in one layout against the one-process reference: 1e-9 of each tensor's largest entry, in float64."""
    layout = layout or case.layout
    teachers = {kind: teacher_logits(KINDS[kind][1].on(layout)) for kind in ('remote', 'shards')}
    every = run_ranks(
        train, layout.world, layout, case.cut, case.packed, case.head, case.per_token, teachers, timeout=timeout
    )
    which = tuple(sorted(i for replica in case.cut.replicas for micro_batch in replica for i in micro_batch))
    expected = reference(STUDENT.on(layout), which)
    for kind in KINDS:
        results, want = [mine[kind] for mine in every], expected[kind]
        for result in results:
            assert result.loss == pytest.approx(want.loss, rel=1e-9, abs=1e-12), kind
            assert result.loss == results[0].loss, 'ranks must return the bitwise same loss'
            assert result.metrics == results[0].metrics
        assert results[0].metrics['loss'] == pytest.approx(want.loss, rel=1e-9), kind
        worst = compare([result.grads for result in results], want.grads)
        assert worst.error < 1e-9, (kind, worst)
        assert padding_grad([result.grads for result in results], STUDENT) == 0
        for found, rows in zip(results[-1].logps, case.cut.replicas[-1]):
            right = want.logps[0][list(rows)]
            if case.packed:
                right = torch.cat([right[n, : LENGTHS[row]] for n, row in enumerate(rows)])[None]
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


FEW = on_few_ranks(EVERY)
ON_MORE_RANKS = {(('tp', 4), (name, 2)) for name in ('pp', 'cp', 'dp')} | {(('tp', 4), ('split', 'empty'))}
COVER = cover(FEW)


@pytest.mark.parametrize('case', COVER, ids=str)
def test_loss_and_gradients_do_not_depend_on_layout_packing_or_split(case):
    run_case(case)


def test_the_short_list_covers_every_pair_of_settings():
    assert_covered(COVER, FEW, IMPOSSIBLE | ON_MORE_RANKS)


@pytest.mark.long
@pytest.mark.parametrize('case', EVERY, ids=str)
def test_every_layout_packing_and_split(case):
    run_case(case)


def test_the_interleaved_schedule():
    pipeline = next(c for c in EVERY if (c.tp, c.pp, c.cp, c.dp, c.split, c.head) == (1, 2, 1, 2, 'mb2', 'linear'))
    run_case(pipeline, layout=Layout(pp=2, vpp=2, dp=2))


def test_the_kinds_differ_and_train():
    found = reference()
    assert len({round(result.loss, 9) for result in found.values()}) == len(KINDS)
    for kind, result in found.items():
        assert max(part.tensor.abs().max().item() for part in result.grads.values()) > 1e-4, kind


def _frozen(layout):
    """The teacher's gradients and weights, and what its heads hold."""
    initialize(layout)
    model = MegatronModel(wrap(build(STUDENT, layout)), vocab_size=STUDENT.vocab_size)
    model.set_loss('GKDLoss')
    chunks = build(TEACHER, layout)
    before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    batches = micro_batches(STUDENT, even(1, 2), 0, False)
    heads = model.teacher(chunks).heads(batches)
    model.forward_backward(batches, teacher=heads)
    after = [p for chunk in chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    assert all(p.grad is None for p in after)
    return [(tuple(head.hidden.shape), head.hidden.requires_grad) for head, _ in heads]


def test_a_teacher_gets_no_gradient_and_its_heads_hold_hidden_states_only():
    assert run_ranks(_frozen, 1, Layout()) == [[((16, 4, TEACHER.hidden), False)] * 2]
    assert run_ranks(_frozen, 2, Layout(pp=2)) == [[], [((16, 4, TEACHER.hidden), False)] * 2]
    assert run_ranks(_frozen, 2, Layout(tp=2, sp=True)) == [[((8, 4, TEACHER.hidden), False)] * 2] * 2


def _wrong(layout, what):
    initialize(layout)
    model = MegatronModel(wrap(build(STUDENT, layout)), vocab_size=STUDENT.vocab_size)
    model.set_loss('GKDLoss')
    batches = micro_batches(STUDENT, even(1, 2), 0, False)
    heads = model.teacher(build(TEACHER, layout)).heads(batches)
    if what == 'too few':
        heads = heads[:1]
    elif what == 'other tokens':
        heads = model.teacher(build(TEACHER, layout)).heads([{k: v[:, :8] for k, v in b.items()} for b in batches])
    keywords = {} if what == 'none' else {'teacher': heads}
    if what == 'logits' and model.groups.is_last_stage:
        keywords = {'teacher_logits': [torch.zeros(*b['labels'].shape, 7) for b in batches]}
    model.forward_backward(batches, **keywords)


@pytest.mark.parametrize(
    ('what', 'message'),
    [
        ('none', 'GKDLoss must be given a teacher'),
        ('too few', 'teacher must be a list with one entry for each of the 2 micro-batches, got 1'),
        ('other tokens', 'teacher must have the leading shape of the student'),
        ('logits', 'teacher_shard must be cut where shard is'),
    ],
)
def test_a_wrong_teacher_is_an_error_on_every_rank(what, message):
    for outcome in run_ranks(_wrong, 4, Layout(tp=2, pp=2), what, collect_errors=True):
        assert outcome.error == 'ValueError', outcome
        assert message in outcome.message


def _whole_teacher(tail):
    """The student on two tensor parallel ranks, the teacher whole on each of them."""
    initialize(Layout(tp=2))
    model = MegatronModel(wrap(build(STUDENT, Layout(tp=2))), vocab_size=STUDENT.vocab_size)
    model.set_loss('GKDLoss', beta=0.4, topk=3, topk_tail=tail)
    batches = micro_batches(STUDENT, even(1, 1), 0, False)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(8, 16, STUDENT.vocab_size, generator=generator, dtype=torch.float64)
    shard = VocabShard(0, STUDENT.vocab_size, STUDENT.vocab_size)
    found = model.forward_only(batches, teacher=[{'logits': logits, 'vocab_shard': shard}])
    model.set_loss('GKDLoss', beta=0.4, topk=3, topk_tail=tail)
    own = model._engine.own_shard
    part = torch.nn.functional.pad(logits, (0, 8))[..., own.start : own.stop]
    return found['loss'], model.forward_only(batches, teacher_logits=[part])['loss']


@pytest.mark.parametrize('tail', ['renormalize', 'bucket'])
def test_the_best_tokens_of_a_teacher_of_another_tensor_parallel_size(tail):
    for whole, split in run_ranks(_whole_teacher, 2, tail):
        assert whole == pytest.approx(split, rel=1e-12)
