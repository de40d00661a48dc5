"""The divergence over forked ranks: the numbers of one process, bitwise alike, with two collectives."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from ranks import run_ranks

from tests.vocab_parallel.divergence_reference import (
    BETAS,
    F64,
    assert_pair,
    gradient,
    pairs,
    plain,
    run_pair,
)
from tests.vocab_parallel.probes import counted
from twinkle_megatron.groups import group_rank
from twinkle_megatron.vocab_parallel import LinearHead, VocabShard, generalized_jsd, recut


def assert_random_pairs(seed, count, tp, heads, timeout=60):
    drawn = pairs(seed, count, tp, heads)
    ranks = run_ranks(lambda: [run_pair(pair, dist.group.WORLD) for pair in drawn], tp, timeout=timeout)
    for i, pair in enumerate(drawn):
        assert_pair(pair, [found[i] for found in ranks])


@pytest.mark.parametrize('heads', [False, True])
@pytest.mark.parametrize('tp', [2, 3])
def test_values_and_gradients_equal_the_definition(tp, heads):
    assert_random_pairs(tp, 80, tp, heads)


@pytest.mark.long
@pytest.mark.parametrize('tp', [2, 3, 4])
@pytest.mark.parametrize('seed', range(4))
def test_values_and_gradients_equal_the_definition_on_a_long_list(tp, seed):
    assert_random_pairs(1000 + seed, 500, tp, heads=seed % 2 == 1, timeout=400)


@pytest.mark.long
def test_compiled_kernels_equal_the_definition(monkeypatch):
    monkeypatch.setenv('TWINKLE_MEGATRON_KERNELS', 'compiled')
    bf16 = torch.bfloat16
    drawn = [p for p in pairs(11, 1000, 2, heads=True) if p.student.dtype == p.teacher.dtype == bf16]
    ranks = run_ranks(lambda: [run_pair(pair, dist.group.WORLD) for pair in drawn], 2, timeout=500)
    for i, pair in enumerate(drawn):
        assert_pair(pair, [found[i] for found in ranks])


def parts(widths, tokens=5, hidden=3, seed=0):
    """Whole logits of both, hidden states and weights of both, in float64."""
    g, columns = torch.Generator().manual_seed(seed), sum(widths)
    shapes = [(tokens, columns)] * 2 + [(tokens, hidden), (columns, hidden)] * 2
    return [torch.randn(shape, generator=g, dtype=F64) for shape in shapes]


def shard_of(widths, vocab_size):
    """On this rank, without a collective."""
    group = dist.group.WORLD
    start = sum(widths[: group_rank(group)])
    return VocabShard(start, start + widths[group_rank(group)], vocab_size, group)


def own(whole, shard, dim=-1):
    return whole.narrow(dim, shard.start, shard.local_size).clone()


@pytest.mark.parametrize('beta', BETAS)
@pytest.mark.parametrize('widths', [(6, 6), (12, 0), (1, 2, 9), (5, 0, 7)])
def test_gradients_equal_one_process_to_the_last_digits(widths, beta):
    student, teacher, *heads = parts(widths)
    g = torch.Generator().manual_seed(9)
    weights, mask = torch.randn(5, generator=g, dtype=F64), torch.tensor([True, True, False, True, True])
    teacher[2], options = math.nan, {'beta': beta, 'temperature': 0.7, 'mask': mask}

    def on_rank():
        shard = shard_of(widths, 11)
        x = own(student, shard).requires_grad_()
        hidden, weight = heads[0].clone().requires_grad_(), own(heads[1], shard, 0).requires_grad_()
        value = generalized_jsd(x, own(teacher, shard), shard=shard, **options)
        other = generalized_jsd(
            LinearHead(hidden, weight), LinearHead(heads[2], own(heads[3], shard, 0)), shard=shard, **options
        )
        return value, gradient(value, x, weights), other, *torch.autograd.grad(other, [hidden, weight], weights)

    ranks = run_ranks(on_rank, len(widths))
    student.requires_grad_()
    hidden, weight = (t.requires_grad_() for t in heads[:2])
    want = plain(student, teacher, beta, 0.7, mask, 11)
    other = plain(hidden @ weight.T, heads[2] @ heads[3].T, beta, 0.7, mask, 11)
    d_hidden, d_weight = torch.autograd.grad(other, [hidden, weight], weights)
    close = {'rtol': 1e-12, 'atol': 1e-14}
    for value, _, of_heads, grad, _ in ranks:
        torch.testing.assert_close((value, of_heads), (want.detach(), other.detach()), **close)
        torch.testing.assert_close(grad, d_hidden, **close)
        assert torch.equal(grad, ranks[0][3])
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks], -1), gradient(want, student, weights), **close)
    torch.testing.assert_close(torch.cat([rank[4] for rank in ranks]), d_weight, **close)


@pytest.mark.parametrize(('beta', 'want'), [(0, 0.183787), (1, 0.192042), (0.5, 0.046201), (0.1, 0.016518)])
def test_case_42_with_one_probability_a_rank(beta, want):
    teacher, student = (torch.tensor(p, dtype=F64).log() for p in ([0.7, 0.3], [0.4, 0.6]))

    def on_rank():
        shard = shard_of((1, 1), 2)
        x = own(student, shard).requires_grad_()
        value = generalized_jsd(x, own(teacher, shard), shard=shard, beta=beta)
        return value, gradient(value, x, torch.tensor(2.0))

    ranks = run_ranks(on_rank, 2)
    x = student.clone().requires_grad_()
    for value, _ in ranks:
        assert value.item() == pytest.approx(want, abs=6e-7)
    expected = gradient(plain(x, teacher, beta), x, torch.tensor(2.0))
    torch.testing.assert_close(torch.cat([grad for _, grad in ranks]), expected)


def collectives(student, teacher, shard, **options):
    """Of the forward and of the backward pass."""
    with counted() as forward:
        value = generalized_jsd(student, teacher, shard=shard, **options)
    with counted() as backward:
        value.sum().backward()
    return dict(forward), dict(backward)


def test_logits_need_two_collectives_forward_and_none_backward_whatever_the_chunks():
    student, teacher, *_ = parts((6, 6))

    def on_rank():
        shard, found = shard_of((6, 6), 11), []
        for beta in BETAS:
            for chunk_size in (None, 1, 4):
                x = own(student, shard).requires_grad_()
                options = {'beta': beta, 'chunk_size': chunk_size}
                found.append(collectives(x, own(teacher, shard), shard, **options))
        with counted() as none:
            x = student[:0, :6].clone().requires_grad_()
            generalized_jsd(x, x.detach(), shard=shard, beta=0.5).sum().backward()
        return found, sum(none.values())

    gather, both = {'all_gather': 1}, {'all_gather': 1, 'all_reduce': 1}
    want = [(both if 0 < beta < 1 else gather, {}) for beta in BETAS for _ in range(3)]
    assert run_ranks(on_rank, 2) == [(want, 0)] * 2


@pytest.mark.parametrize('sequence_parallel', [False, True])
def test_a_head_adds_its_own_collectives(sequence_parallel):
    """One of them for each sweep over a head whose hidden states lie on all ranks; two sweeps where beta is inside."""
    student, teacher, h, w, h_teacher, w_teacher = parts((6, 6), tokens=4)

    def on_rank():
        shard, rank, found = shard_of((6, 6), 11), dist.get_rank(), []
        for beta in (0, 0.5):
            hidden, others = (x.chunk(2)[rank].clone() if sequence_parallel else x.clone() for x in (h, h_teacher))
            tensors = [hidden.requires_grad_(), own(w, shard, 0).requires_grad_()]
            options = {'sequence_parallel': sequence_parallel, 'max_workspace_mb': 1e-4}
            head, other = LinearHead(*tensors, **options), LinearHead(others, own(w_teacher, shard, 0), **options)
            x = own(student, shard).requires_grad_()
            found += [
                collectives(logits, given, shard, beta=beta)
                for logits, given in ((x, other), (head, own(teacher, shard)), (head, other))
            ]
        return found

    want = []
    for sweeps in (1, 2):
        for student_gathers, teacher_gathers in ((0, 1), (1, 0), (1, 1)):
            gathers = sequence_parallel * (student_gathers + teacher_gathers)
            forward = {'all_gather': 1 + sweeps * gathers, **({'all_reduce': 1} if sweeps == 2 else {})}
            backward = {'all_gather': gathers} if gathers else {}
            if student_gathers:
                backward['reduce_scatter_tensor' if sequence_parallel else 'all_reduce'] = 1
            want.append((forward, backward))
    assert run_ranks(on_rank, 2) == [want] * 2


@pytest.mark.parametrize('beta', [0, 0.3, 1])
@pytest.mark.parametrize(
    ('widths', 'vocab_size', 'others', 'other_vocab'),
    [
        ((4, 4), 8, (4, 2), 6),
        ((4, 4), 6, (4, 4), 8),
        ((4, 4), 8, (4, 5), 8),  # on the first rank both shards are one and the same
        ((3, 3, 3), 7, (3, 3, 1), 7),
        ((3, 3, 3), 9, (3, 2, 0), 5),
        ((2, 0, 5), 5, (2, 0, 6), 8),
    ],
)
def test_case_46_only_ids_that_both_vocabularies_have_are_compared(widths, vocab_size, others, other_vocab, beta):
    student, teacher, *_ = parts((max(sum(widths), sum(others)),))
    student, teacher = student[:, : sum(widths)].clone(), teacher[:, : sum(others)].clone()
    common, weights = min(vocab_size, other_vocab), torch.arange(1, 6)
    student[:, vocab_size:], teacher[:, other_vocab:] = math.nan, math.inf

    def on_rank():
        shard, other = shard_of(widths, vocab_size), shard_of(others, other_vocab)
        x = own(student, shard).requires_grad_()
        with counted() as calls:
            value = generalized_jsd(x, own(teacher, other), shard=shard, teacher_shard=other, beta=beta)
        return value, gradient(value, x, weights), calls['all_gather']

    ranks = run_ranks(on_rank, len(widths))
    x = student.clone().requires_grad_()
    want = plain(x, teacher, beta, vocab_size=common)
    for value, _, gathers in ranks:
        assert gathers == 2
        torch.testing.assert_close(value, want.detach(), rtol=1e-12, atol=1e-14)
    grad = torch.cat([grad for _, grad, _ in ranks], -1)
    torch.testing.assert_close(grad, gradient(want, x, weights), rtol=1e-12, atol=1e-14)
    assert (grad[:, common:] == 0).all()


@pytest.mark.parametrize(
    ('widths', 'vocab_size', 'others', 'other_vocab'),
    [
        ((4, 4), 8, (3, 3), 6),
        ((4, 4), 8, (5, 3), 8),
        ((2, 3, 3), 8, (2, 2, 4), 8),  # the first rank sees no difference
        ((2, 2, 2), 6, (2, 2, 3), 7),  # none that matters: the error would be wrong
    ],
)
def test_a_teacher_cut_elsewhere_is_an_error_on_every_rank(widths, vocab_size, others, other_vocab):
    same = widths[:-1] == others[:-1]

    def on_rank():
        shard, other = shard_of(widths, vocab_size), shard_of(others, other_vocab)
        x, teacher = torch.zeros(2, shard.local_size), torch.zeros(2, other.local_size)
        for head in (False, True):
            given = LinearHead(torch.zeros(2, 3), torch.zeros(other.local_size, 3)) if head else teacher
            try:
                generalized_jsd(x, given, shard=shard, teacher_shard=other, beta=0.5)
            except ValueError as error:
                message = str(error)
            else:
                message = ''
        # whatever one rank has seen before, all go on together
        alike = generalized_jsd(x, x, shard=shard, teacher_shard=shard_of(widths, vocab_size), beta=0.5)
        assert torch.equal(alike, torch.zeros(2))
        return message

    messages = run_ranks(on_rank, len(widths), timeout=20)
    for message in messages:
        assert message == messages[0]
        assert not message if same else 'recut(weight, teacher_shard, shard)' in message


def test_a_shard_that_one_rank_has_met_before_is_no_reason_not_to_ask_the_others():
    """The first rank's shards are the same in both calls, the second one's are not."""

    def on_rank():
        shard, x = shard_of((4, 4), 8), torch.zeros(2, 4)
        found = []
        for others in ((4, 2), (4, 4)):
            other = shard_of(others, 6)
            teacher = torch.zeros(2, other.local_size)
            found.append(generalized_jsd(x, teacher, shard=shard, teacher_shard=other, beta=0.5))
        return found

    for found in run_ranks(on_rank, 2, timeout=20):
        assert all((value == 0).all() for value in found)


def cuts(ranks):
    """Widths of the shards of a vocabulary, and its true size."""
    return st.tuples(*[st.integers(0, 5)] * ranks).filter(any)


@settings(deadline=None, max_examples=6)
@drawn(st.lists(st.tuples(cuts(3), cuts(3), st.sampled_from([None, 4])), min_size=8, max_size=8), st.integers(0, 99))
def test_recut_equals_cutting_the_whole_weight(drawn, seed):
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(sum(held), *([4] if width else []), generator=g) for held, _, width in drawn]

    def on_rank():
        found = []
        for weight, (held, wanted, _) in zip(weights, drawn):
            shard, other = shard_of(held, sum(held)), shard_of(wanted, sum(wanted))
            rows = own(weight, shard, 0)
            found.append(recut(rows, shard, other))
            assert torch.equal(rows, own(weight, shard, 0))
        return found

    ranks = run_ranks(on_rank, 3)
    for i, (weight, (_, wanted, _)) in enumerate(zip(weights, drawn)):
        whole = torch.cat([weight, weight.new_zeros(sum(wanted), *weight.shape[1:])])[: sum(wanted)]
        assert torch.equal(torch.cat([found[i] for found in ranks]), whole)


@pytest.mark.parametrize('beta', [0, 0.5, 1])
def test_a_teacher_that_was_cut_elsewhere_is_compared_once_it_is_recut(beta):
    widths, others = (5, 5, 2), (4, 4, 4)
    student, _, hidden, weight, *_ = parts(widths)

    def on_rank():
        shard, held = shard_of(widths, 11), shard_of(others, 10)
        x, rows = own(student, shard).requires_grad_(), own(weight, held, 0)
        rows[max(0, 10 - held.start) :] = math.nan
        wanted = replace(shard, vocab_size=10)
        teacher = LinearHead(hidden, recut(rows, held, wanted))
        value = generalized_jsd(x, teacher, shard=shard, teacher_shard=wanted, beta=beta)
        return value, gradient(value, x, torch.arange(5))

    ranks = run_ranks(on_rank, 3)
    x = student.clone().requires_grad_()
    want = plain(x, hidden @ weight.T, beta, vocab_size=10)
    for value, _ in ranks:
        torch.testing.assert_close(value, want.detach(), rtol=1e-12, atol=1e-14)
    expected = gradient(want, x, torch.arange(5))
    torch.testing.assert_close(torch.cat([grad for _, grad in ranks], -1), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize('whose', ['student', 'teacher'])
@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_a_bad_number_shows_on_every_rank(whose, bad):
    student, teacher, *_ = parts((6, 6))
    (student if whose == 'student' else teacher)[1, 8] = bad

    def on_rank():
        shard, found = shard_of((6, 6), 11), []
        for beta in BETAS:
            x = own(student, shard).requires_grad_()
            value = generalized_jsd(x, own(teacher, shard), shard=shard, beta=beta)
            found.append((value.isnan().tolist(), gradient(value, x, torch.ones(5)).isnan().any(-1).tolist()))
        return found

    for found in run_ranks(on_rank, 2):
        for value, grad in found:
            assert value == grad == [False, True, False, False, False]


@pytest.mark.parametrize('beta', BETAS)
def test_infinite_columns_of_a_whole_rank(beta):
    student, teacher, *_ = parts((4, 4, 4))
    student[0, :4] = student[1, 4:8] = student[2, 8:] = -math.inf
    teacher[1, 4:8] = teacher[2, 8:] = teacher[3, :4] = -math.inf

    def on_rank():
        shard = shard_of((4, 4, 4), 12)
        x = own(student, shard).requires_grad_()
        value = generalized_jsd(x, own(teacher, shard), shard=shard, beta=beta)
        return value, gradient(value, x, value.isfinite().float())

    ranks = run_ranks(on_rank, 3)
    x = student.clone().requires_grad_()
    want = plain(x, teacher, beta)
    assert want.isinf().tolist() == [beta == 0, False, False, beta == 1, False]
    for value, _ in ranks:
        torch.testing.assert_close(value, want.detach(), rtol=1e-12, atol=1e-14)
    kept = want.isfinite()
    grad = torch.cat([grad for _, grad in ranks], -1)
    torch.testing.assert_close(grad[kept], gradient(want, x, kept)[kept], rtol=1e-12, atol=1e-14)


def test_ranks_may_cut_their_tiles_differently():
    drawn = [pair for pair in pairs(5, 200, 3, heads=True) if pair.student.head and len(pair.lead) > 1][:15]

    def on_rank():
        mb, chunk_size = ((1e-9, 1), (2e-4, None), (None, 3))[dist.get_rank()]
        sides = [replace(side, largest_mb=mb) for pair in drawn for side in (pair.student, pair.teacher)]
        return [
            run_pair(replace(pair, student=s, teacher=t, chunk_size=chunk_size), dist.group.WORLD)
            for pair, s, t in zip(drawn, sides[::2], sides[1::2])
        ]

    ranks = run_ranks(on_rank, 3)
    for i, pair in enumerate(drawn):
        assert_pair(pair, [found[i] for found in ranks])


@pytest.mark.parametrize('dtype', [F64, torch.float32, torch.bfloat16])
def test_the_hidden_gradient_is_not_multiplied_by_the_number_of_ranks(dtype):
    _, teacher, hidden, weight, *_ = parts((4, 4, 4), tokens=7)
    upstream = torch.randn(7, generator=torch.Generator().manual_seed(3), dtype=F64)

    def on_rank(tp):
        shard = shard_of((12 // tp,) * tp, 12) if tp > 1 else VocabShard.from_group(12)
        h, w = hidden.to(dtype).requires_grad_(), own(weight, shard, 0).to(dtype)
        value = generalized_jsd(LinearHead(h, w), own(teacher, shard), shard=shard, beta=0.5)
        return gradient(value, h, upstream)

    (alone,) = run_ranks(on_rank, 1, 1)
    close = {'rtol': 1e-12, 'atol': 1e-13} if dtype == F64 else {'rtol': 3e-2, 'atol': 3e-2}
    for tp in (2, 3):
        first, *rest = run_ranks(on_rank, tp, tp)
        assert all(torch.equal(grad, first) for grad in rest)
        torch.testing.assert_close(first, alone, **close)


def test_a_sequence_parallel_head_beside_one_that_is_not_and_a_pair_of_them():
    """The teacher need not lie as the student does."""
    drawn = [
        pair
        for pair in pairs(17, 1500, 2, heads=True)
        if pair.lead in ((2,), (6, 2)) and pair.student.head and pair.student.sequence_parallel
    ][:40]
    kinds = {(pair.teacher.head, pair.teacher.sequence_parallel) for pair in drawn}
    assert kinds == {(False, False), (True, False), (True, True)}
    ranks = run_ranks(lambda: [run_pair(pair, dist.group.WORLD) for pair in drawn], 2)
    for i, pair in enumerate(drawn):
        assert_pair(pair, [found[i] for found in ranks])
