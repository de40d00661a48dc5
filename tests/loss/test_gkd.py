"""GKDLoss called by hand: recorded values of Twinkle, cases from the field, float64 formulas of every mode, ragged
top-k lists, two vocabularies, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from tests.distillation_formulas import best, full, remote
from tests.recorded import assert_recorded, name_of, records_of, replay
from twinkle_megatron.loss import GKDLoss
from twinkle_megatron.vocab_parallel import LinearHead, VocabShard

F64 = torch.float64
PRECISE = {'rtol': 1e-11, 'atol': 1e-13}
B, S, V, K = 3, 5, 24, 4


@pytest.mark.parametrize('record', records_of(('GKDLoss',), 'equal'), ids=name_of)
def test_recorded_values_and_gradients(record):
    assert_recorded(record)


@pytest.mark.parametrize('record', records_of(('GKDLoss',), 'differs'), ids=name_of)
def test_where_twinkle_is_wrong(record):
    """Two vocabularies are compared over the ids that both have; the mean of nothing is a 0 with a gradient."""
    result, grads = replay(record)
    labels, logits = record['inputs']['labels'], record['outputs']['logits']
    leaf = logits.double().requires_grad_()
    at = labels != -100
    want = torch.zeros((), dtype=F64)
    if at.any():
        want = full(leaf[at], record['call']['teacher_logits'][at].double(), 0.5).mean()
        want.backward()
    else:
        assert 'ignored' in record['name']
    tolerance = {'rtol': 1e-10, 'atol': 1e-12} if record['name'].endswith('f64') else {'rtol': 1e-4, 'atol': 1e-6}
    torch.testing.assert_close(result['loss'].double(), want.detach(), **tolerance)
    expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    torch.testing.assert_close(grads['logits'].double(), expected, **tolerance)


@pytest.mark.parametrize(('beta', 'want'), [(0.0, 0.183787), (1.0, 0.192042), (0.5, 0.046201), (0.1, 0.016518)])
def test_case_42_the_ends_and_the_mixture_are_not_swapped(beta, want):
    student, teacher = (torch.tensor([[p]], dtype=F64).log() for p in ([0.4, 0.6], [0.7, 0.3]))
    loss = GKDLoss(beta=beta)({'labels': torch.tensor([[0]])}, {'logits': student}, teacher_logits=teacher)['loss']
    assert loss.item() == pytest.approx(want, abs=5e-7)


def test_case_43_a_bucket_for_the_tail_gives_a_lower_bound():
    teacher, student = (torch.tensor([[p]], dtype=F64).log() for p in ([0.5, 0.3, 0.1, 0.1], [0.6, 0.35, 0.03, 0.02]))
    inputs = {'labels': torch.tensor([[0]])}
    for given in (
        {'teacher_logits': teacher, 'topk': 2},
        {'teacher_topk_logprobs': teacher[..., :2], 'teacher_topk_indices': torch.tensor([[[0, 1]]])},
    ):
        loss = GKDLoss(beta=0.0, topk_tail='bucket')(inputs, {'logits': student}, **given)['loss']
        assert loss.item() == pytest.approx(0.139853, abs=5e-7)
    whole = GKDLoss(beta=0.0)(inputs, {'logits': student}, teacher_logits=teacher)['loss']
    assert whole.item() == pytest.approx(0.143935, abs=5e-7)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[0, 2], labels[1] = -100, -100
    student, teacher = (2 * torch.randn(B, S, V, generator=generator, dtype=F64) for _ in range(2))
    return labels, student, teacher


def value_and_grad(loss, labels, student, **given):
    leaf = student.clone().requires_grad_()
    result = loss({'labels': labels}, {'logits': leaf}, **given)
    result['loss'].backward()
    return result['loss'].detach(), leaf.grad


def expected(labels, student, divergence):
    leaf = student.clone().requires_grad_()
    want = divergence(leaf)[labels != -100].mean()
    want.backward()
    return want.detach(), leaf.grad


@pytest.mark.parametrize('temperature', [1.0, 0.6])
@pytest.mark.parametrize('beta', [0.0, 0.3, 1.0])
@pytest.mark.parametrize('mode', ['full', 'renormalize', 'bucket'])
def test_a_local_teacher(data, mode, beta, temperature):
    """Tensors and linear heads, chunks of any size; what stands at ignored tokens is never read."""
    labels, student, teacher = data
    hidden, weight = torch.randn(B, S, 7, dtype=F64), torch.randn(V, 7, dtype=F64)
    given = ((teacher, {'teacher_logits': teacher}), (hidden @ weight.T, {'teacher': LinearHead(hidden, weight)}))
    for mine, heads in given:

        def divergence(x, mine=mine):
            whole = mode == 'full'
            return full(x, mine, beta, temperature) if whole else best(x, mine, K, mode, beta, temperature)

        want = expected(labels, student, divergence)
        for chunk_size in (1, 4, 512, None):
            init = {} if mode == 'full' else {'topk': K, 'topk_tail': mode, 'teacher_mode': 'topk_local'}
            loss = GKDLoss(beta=beta, temperature=temperature, chunk_size=chunk_size, **init)
            for found, right in zip(value_and_grad(loss, labels, student, **heads), want):
                torch.testing.assert_close(found, right, **PRECISE)
    spoilt = student.masked_fill((labels == -100)[..., None], math.nan)
    found = value_and_grad(loss, labels, spoilt, **heads)
    torch.testing.assert_close(found[0], want[0], **PRECISE)
    torch.testing.assert_close(found[1], want[1], **PRECISE)


def api_reply(teacher, k):
    scores, ids = teacher.log_softmax(-1).topk(k, -1)
    return scores, ids


@pytest.mark.parametrize('beta', [0.0, 0.3, 1.0])
@pytest.mark.parametrize(('tail', 'temperature'), [('renormalize', 1.0), ('renormalize', 0.6), ('bucket', 1.0)])
def test_a_teacher_elsewhere(data, tail, temperature, beta):
    """Tensors, lists for each token, of all or of the trained ones, with −inf or nothing where a row is short."""
    labels, student, teacher = data
    scores, ids = api_reply(teacher, K)
    want = expected(labels, student, lambda x: remote(x, scores, ids, tail, beta, temperature))
    loss = GKDLoss('topk_remote', beta=beta, temperature=temperature, topk_tail=tail)
    kept = labels != -100
    none = torch.cat([scores, torch.full((B, S, 2), -torch.inf, dtype=F64)], -1)
    ways = [
        (scores, ids), (scores.numpy(), ids.numpy()), (scores.tolist(), ids.tolist()),
        (none, torch.cat([ids, torch.full((B, S, 2), -1)], -1)),
        (none, torch.cat([ids, torch.zeros(B, S, 2).long()], -1)),
        ([x[at].tolist() for x, at in zip(scores, kept)], [x[at].tolist() for x, at in zip(ids, kept)]),
        ([[*x.tolist(), None] for x in scores], [[*x.tolist(), None] for x in ids]),
    ]  # fmt: skip
    for logprobs, indices in ways:
        given = {'teacher_topk_logprobs': logprobs, 'teacher_topk_indices': indices}
        for found, right in zip(value_and_grad(loss, labels, student, **given), want):
            torch.testing.assert_close(found, right, **PRECISE)


def test_short_rows_are_compared_over_what_they_have(data):
    labels, student, teacher = data
    scores, ids = api_reply(teacher, K)
    counts = torch.arange(B * S).view(B, S) % K + 1
    logprobs = [[s[:n].tolist() for s, n in zip(*row)] for row in zip(scores, counts)]
    indices = [[i[:n].tolist() for i, n in zip(*row)] for row in zip(ids, counts)]
    for tail in ('renormalize', 'bucket'):

        def divergence(x, tail=tail):
            each = [remote(x[b, t], scores[b, t, :n], ids[b, t, :n], tail, 0.4) for b in range(B) for t in range(S)
                    for n in (int(counts[b, t]),)]  # fmt: skip
            return torch.stack(each).view(B, S)

        given = {'teacher_topk_logprobs': logprobs, 'teacher_topk_indices': indices}
        found = value_and_grad(GKDLoss(beta=0.4, topk_tail=tail), labels, student, **given)
        for mine, right in zip(found, expected(labels, student, divergence)):
            torch.testing.assert_close(mine, right, **PRECISE)


@pytest.mark.parametrize('sizes', [(V, V - 5), (V - 5, V)])
@pytest.mark.parametrize('mode', ['full', 'renormalize', 'bucket'])
def test_case_46_two_vocabularies_are_compared_over_the_common_ids(data, mode, sizes):
    labels, student, teacher = data
    student, teacher = student[..., : sizes[0]], teacher[..., : sizes[1]]
    if mode == 'full':
        loss, want = GKDLoss(beta=0.3), expected(labels, student, lambda x: full(x, teacher, 0.3))
    else:
        loss = GKDLoss(beta=0.3, topk=K, topk_tail=mode)
        common = min(sizes)

        def divergence(x):
            return best(x[..., :common], teacher[..., :common], K, mode, 0.3)

        want = expected(labels, student, divergence)
    padded = torch.cat([teacher, torch.full((B, S, 3), 99.0, dtype=F64)], -1)
    told = {'logits': padded, 'vocab_shard': VocabShard(0, sizes[1] + 3, sizes[1])}
    for given in ({'teacher_logits': teacher}, {'teacher': told}):
        found = value_and_grad(loss, labels.clamp(max=min(sizes) - 1), student, **given)
        for mine, right in zip(found, want):
            torch.testing.assert_close(mine, right, **PRECISE)


def test_packed_sequences_take_their_own_rows(data):
    labels, student, teacher = data
    lengths = (5, 3, 4)
    flat = torch.cat([labels[i, :n] for i, n in enumerate(lengths)])[None]
    inputs = {'labels': flat, 'position_ids': torch.cat([torch.arange(n) for n in lengths])[None]}
    logits = torch.cat([student[i, :n] for i, n in enumerate(lengths)])[None]
    want = torch.cat([teacher[i, :n] for i, n in enumerate(lengths)])[None]
    right = full(logits, want, 0.5)[flat != -100].mean()
    for given in (teacher, [x[:n] for x, n in zip(teacher, lengths)], want, [want]):
        loss = GKDLoss()(inputs, {'logits': logits}, teacher_logits=given)['loss']
        torch.testing.assert_close(loss, right, **PRECISE)


@pytest.mark.parametrize(
    ('init', 'call', 'message'),
    [
        ({}, {}, 'GKDLoss must be given a teacher: teacher='),
        ({}, {'teacher_topk_logprobs': 1}, 'must be given together, got teacher_topk_logprobs'),
        ({}, {'teacher_logits': 1, 'teacher': 1}, 'in one way, got teacher_logits and teacher'),
        ({'teacher_mode': 'topk_remote'}, {'teacher_logits': 1}, "teacher_mode='topk_remote' does not fit"),
        ({'teacher_mode': 'topk_local'}, {'teacher_logits': 1}, 'must be told topk'),
        ({'teacher_mode': 'full'}, {'teacher_logits': 1, 'topk': 3}, "teacher_mode='full' does not fit what"),
        ({'topk_tail': 'bucket', 'temperature': 0.5}, {'teacher_topk_logprobs': 1, 'teacher_topk_indices': 1},
         'must be at temperature 1, got 0.5'),
        ({}, {'teacher_logit': 1}, "did you mean 'teacher_logits'"),
        ({}, {'teacher': 1}, "teacher must be a LinearHead, or outputs with 'logits'"),
        ({}, {'teacher_logits': torch.zeros(B, S)}, r'teacher_logits must be \[b, s, c\]'),
        ({}, {'teacher_logits': torch.zeros(B + 1, S, V)}, 'one entry for each of the 3 sequences'),
        ({}, {'teacher_logits': torch.zeros(B, S - 1, V)}, 'teacher_logits of sample 1 must have 0'),
    ],
)  # fmt: skip
def test_wrong_calls(data, init, call, message):
    labels, student, _ = data
    with pytest.raises(ValueError, match=message):
        GKDLoss(**init)({'labels': labels}, {'logits': student.requires_grad_()}, **call)


@pytest.mark.parametrize(
    ('spoil', 'message'),
    [
        (lambda s, i: (s, i.index_fill(-1, torch.tensor([1]), V)), r'must lie in \[0, 24\)'),
        (lambda s, i: (s, i.index_fill(-1, torch.tensor([1, 2]), 3)), 'of one token must differ'),
        (
            lambda s, i: (s.masked_fill(torch.ones(B, S, 1).bool(), -math.inf), i),
            'must hold a log-prob at every trained',
        ),
        (lambda s, i: (s.index_fill(-1, torch.tensor([1]), math.nan), i), 'got NaN or'),
        (lambda s, i: (s[..., :2], i), r'must both be \[b, s, k\]'),
        (lambda s, i: (s, i.double()), 'must be integer ids'),
    ],
)
def test_wrong_replies_of_an_api(data, spoil, message):
    labels, student, teacher = data
    scores, ids = spoil(*api_reply(teacher, K))
    with pytest.raises(ValueError, match=message):
        GKDLoss()({'labels': labels}, {'logits': student}, teacher_topk_logprobs=scores, teacher_topk_indices=ids)


@pytest.mark.parametrize(
    ('init', 'message'),
    [
        ({'teacher_mode': 'topk'}, "teacher_mode must be 'full', 'topk_local', 'topk_remote' or None"),
        ({'beta': 1.5}, r'beta must be a number in \[0, 1\]'),
        ({'temperature': 0}, 'temperature must be a finite number > 0'),
        ({'topk': 0}, 'topk must be an int >= 1'),
        ({'topk_tail': 'ignore'}, "topk_tail must be 'renormalize' or 'bucket'"),
        ({'chunk_size': 0}, 'chunk_size must be an int >= 1'),
        ({'tempreature': 1}, "did you mean 'temperature'"),
        ({'teacher_mode': 'topk_remote', 'topk_tail': 'bucket', 'temperature': 2.0}, 'must be at temperature 1'),
    ],
)
def test_wrong_constructions(init, message):
    with pytest.raises(ValueError, match=message):
        GKDLoss(**init)
