"""The generalised Jensen-Shannon divergence on one process: values, gradients, memory and manners."""

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint

from tests.vocab_parallel.divergence_reference import (
    BETAS,
    DTYPES,
    F64,
    LAYOUTS,
    Pair,
    assert_pair,
    gradient,
    pairs,
    plain,
    run_pair,
)
from tests.vocab_parallel.probes import NewTensors, needs_peak, peak_memory
from tests.vocab_parallel.reference import lay_out
from twinkle_megatron.vocab_parallel import LinearHead, VocabShard, generalized_jsd, recut

INSIDE = (0.1, 0.5, 0.9)


def both(*lead, vocab_size=11, seed=0, dtype=F64, near=None):
    """Random logits of a student, which want a gradient, and of a teacher; `near`: how far apart they are."""
    g = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(*lead, vocab_size, generator=g, dtype=F64) for _ in range(2))
    teacher = teacher if near is None else student + near * teacher
    return student.to(dtype).requires_grad_(), teacher.to(dtype), VocabShard.from_group(vocab_size)


def upstream(*lead, seed=9):
    return torch.randn(lead, generator=torch.Generator().manual_seed(seed), dtype=F64)


def logits_of(probabilities):
    """The shard has two columns of padding."""
    return torch.tensor([*probabilities, 1.0, 1.0], dtype=F64).log().requires_grad_()


@settings(deadline=None, max_examples=150)
@drawn(st.data(), st.booleans())
def test_values_and_gradients_equal_the_definition(data, heads):
    pair = Pair.draw(lambda options: data.draw(st.sampled_from(options)), 1, heads)
    assert_pair(pair, [run_pair(pair, None)])


@pytest.mark.long
@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('heads', [False, True])
def test_values_and_gradients_equal_the_definition_on_a_long_list(seed, heads):
    for pair in pairs(100 + seed, 1000, 1, heads):
        assert_pair(pair, [run_pair(pair, None)])


@pytest.mark.parametrize('beta', BETAS)
def test_compiled_kernels_equal_the_definition(monkeypatch, beta):
    monkeypatch.setenv('TWINKLE_MEGATRON_KERNELS', 'compiled')
    student, teacher, shard = both(3, 4, vocab_size=5000, dtype=torch.bfloat16)
    teacher = teacher.float()
    teacher[0, 0, ::7] = -math.inf if beta < 1 else -30
    student.detach()[1, 1, ::5] = -math.inf if beta > 0 else -30
    teacher[2, 3] = math.nan
    mask, weights = torch.arange(12).view(3, 4) < 11, upstream(3, 4)
    found = generalized_jsd(student, teacher, shard=shard, beta=beta, temperature=0.7, mask=mask)
    want = plain(student, teacher, beta, 0.7, mask)
    torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=1e-7)
    got, expected = gradient(found, student, weights), gradient(want, student, weights)
    torch.testing.assert_close(got, expected, rtol=8e-3, atol=1e-9)
    assert (got[2, 3] == 0).all()
    same = generalized_jsd(student, student.detach().float(), shard=shard, beta=beta, temperature=0.7)
    assert torch.equal(same, torch.zeros(3, 4))


@pytest.mark.long
@pytest.mark.parametrize('dtypes', [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (F64, F64)])
def test_compiled_kernels_equal_the_definition_on_a_long_list(monkeypatch, dtypes):
    monkeypatch.setenv('TWINKLE_MEGATRON_KERNELS', 'compiled')
    for pair in pairs(3, 3000, 1, heads=True):
        if (pair.student.dtype, pair.teacher.dtype) == dtypes:
            assert_pair(pair, [run_pair(pair, None)])


@pytest.mark.parametrize('beta', BETAS)
@pytest.mark.parametrize(('chunk_size', 'temperature'), [(None, 1.0), (2, 0.6), (100, 3.0)])
def test_gradcheck(beta, chunk_size, temperature):
    student, teacher, shard = both(2, 2, vocab_size=5)
    mask = torch.tensor([[True, False], [True, True]])
    options = {'beta': beta, 'temperature': temperature, 'chunk_size': chunk_size, 'mask': mask}
    assert torch.autograd.gradcheck(lambda x: generalized_jsd(x, teacher, shard=shard, **options), student)


@pytest.mark.parametrize('beta', BETAS)
def test_gradcheck_of_a_linear_head(beta):
    g = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=g, dtype=F64).requires_grad_() for shape in ((2, 3), (5, 3), (5,))]
    teacher = LinearHead(torch.randn(2, 4, generator=g, dtype=F64), torch.randn(5, 4, generator=g, dtype=F64))
    shard = VocabShard.from_group(5)

    def value(hidden, weight, bias):
        return generalized_jsd(LinearHead(hidden, weight, bias=bias), teacher, shard=shard, beta=beta)

    assert torch.autograd.gradcheck(value, tensors)


@pytest.mark.parametrize(('beta', 'want'), [(0, 0.183787), (1, 0.192042), (0.5, 0.046201), (0.1, 0.016518)])
@pytest.mark.parametrize('dtype', [F64, torch.float32])
def test_case_42_the_ends_are_forward_and_reverse_and_beta_weighs_the_teacher(beta, want, dtype):
    teacher, student = logits_of([0.7, 0.3]).to(dtype), logits_of([0.4, 0.6]).to(dtype)
    shard = VocabShard.from_group(4, vocab_size=2)
    assert generalized_jsd(student, teacher, shard=shard, beta=beta).item() == pytest.approx(want, abs=6e-7)
    inside = 0 < beta < 1
    value = generalized_jsd(student, teacher, shard=shard, beta=beta, normalize=True)
    assert value.item() == pytest.approx(want / (beta * (1 - beta)) if inside else want, rel=1e-4)


def test_case_43_one_bucket_for_the_tail_is_a_lower_bound_and_never_negative():
    t, s = [0.5, 0.3, 0.1, 0.1], [0.6, 0.35, 0.03, 0.02]
    full = generalized_jsd(logits_of(s), logits_of(t), shard=VocabShard.from_group(6, vocab_size=4), beta=0)
    coarse = [logits_of([*row[:2], sum(row[2:])]) for row in (s, t)]
    bucket = generalized_jsd(*coarse, shard=VocabShard.from_group(5, vocab_size=3), beta=0)
    assert full.item() == pytest.approx(0.143935, abs=6e-7)
    assert bucket.item() == pytest.approx(0.139853, abs=6e-7)


@pytest.mark.parametrize('beta', BETAS)
@pytest.mark.parametrize('swapped', [False, True])
def test_case_46_only_ids_that_both_vocabularies_have_are_compared(beta, swapped):
    student, _, shard = both(3, vocab_size=6 if swapped else 8, seed=1)
    teacher, _, other = both(3, vocab_size=8 if swapped else 6, seed=2)
    found = generalized_jsd(student, teacher, shard=shard, teacher_shard=other, beta=beta)
    want, weights = plain(student, teacher, beta, vocab_size=6), upstream(3)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)
    grad = gradient(found, student, weights)
    torch.testing.assert_close(grad, gradient(want, student, weights), rtol=1e-12, atol=1e-13)
    assert (grad[:, 6:] == 0).all()
    with pytest.raises(ValueError, match=r'teacher must hold the \d ids .* teacher_shard says which ids they are'):
        generalized_jsd(student, teacher, shard=shard, beta=beta)


@pytest.mark.parametrize('beta', BETAS)
def test_a_padding_that_differs_takes_no_part(beta):
    student, teacher, _ = both(3, vocab_size=9)
    shard, other = VocabShard.from_group(9, vocab_size=6), VocabShard.from_group(7, vocab_size=6)
    teacher = teacher[:, :7].clone()
    teacher[:, 6] = math.inf
    found = generalized_jsd(student, teacher, shard=shard, teacher_shard=other, beta=beta)
    torch.testing.assert_close(found, plain(student, teacher, beta, vocab_size=6))


@pytest.mark.parametrize('beta', BETAS)
@pytest.mark.parametrize('garbage', [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize('head', [False, True])
def test_masked_tokens_are_zero_and_as_good_as_deleted(beta, garbage, head):
    student, teacher, shard = both(5)
    mask, weights = torch.tensor([True, False, True, False, True]), upstream(5)
    want = generalized_jsd(student[mask], teacher[mask], shard=shard, beta=beta)
    expected = gradient(want, student, weights[mask])
    with torch.no_grad():
        student[1], teacher[3, 2:] = garbage, garbage
    eye = torch.eye(11, dtype=F64)
    found = generalized_jsd(LinearHead(student, eye) if head else student, teacher, shard=shard, beta=beta, mask=mask)
    assert torch.equal(found[~mask], torch.zeros(2, dtype=F64))
    torch.testing.assert_close(found[mask], want, rtol=1e-13, atol=1e-14)
    grad = gradient(found, student, weights)
    assert torch.equal(grad[~mask], torch.zeros(2, 11, dtype=F64))
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


def test_all_masked_is_zero_with_a_gradient_path():
    student, teacher, shard = both(3)
    for logits in (student, LinearHead(student, torch.eye(11, dtype=F64))):
        value = generalized_jsd(logits, teacher * math.nan, shard=shard, beta=0.5, mask=torch.zeros(3) > 0)
        assert torch.equal(value, torch.zeros(3, dtype=F64))
        assert torch.equal(gradient(value, student, upstream(3)), torch.zeros(3, 11, dtype=F64))


@pytest.mark.parametrize('dtype', [F64, torch.float32])
@pytest.mark.parametrize('chunk_size', [None, 2])
@pytest.mark.parametrize('beta', BETAS)
def test_columns_of_minus_infinity_take_no_probability(beta, chunk_size, dtype):
    student, teacher, shard = both(4, dtype=dtype)
    with torch.no_grad():
        student[0, 3], teacher[1, 4] = -math.inf, -math.inf  # one of them alone
        student[2, :5], teacher[2, :5] = -math.inf, -math.inf
    found = generalized_jsd(student, teacher, shard=shard, beta=beta, chunk_size=chunk_size)
    want, weights = plain(student, teacher, beta), upstream(4)
    infinite = {0: [True, False, False, False], 1: [False, True, False, False]}.get(beta, [False] * 4)
    assert found.isinf().tolist() == infinite
    assert (found >= 0).all()
    torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=1e-7)
    kept = ~torch.tensor(infinite)
    got, expected = (gradient(value, student, torch.where(kept, weights, 0)) for value in (found, want))
    torch.testing.assert_close(got[kept], expected[kept], rtol=1e-5, atol=1e-6)
    assert (got[2, :5] == 0).all()


@pytest.mark.parametrize('beta', [1e-3, 1e-9, 1 - 1e-9, 1 - 1e-3])
@pytest.mark.parametrize('dtype', [F64, torch.float32])
def test_disjoint_distributions_stay_finite_next_to_the_ends(beta, dtype):
    """Where the weight of one of the two is lost beside 1 in float32."""
    student = torch.tensor([[0.0, -math.inf], [0.0, -200.0]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[-math.inf, 0.0], [-200.0, 0.0]], dtype=dtype)
    found = generalized_jsd(student, teacher, shard=VocabShard.from_group(2), beta=beta)
    entropy = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)
    torch.testing.assert_close(found.double(), torch.full((2,), entropy, dtype=F64), rtol=1e-6, atol=2e-7)
    assert gradient(found, student, upstream(2)).isfinite().all()


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_equal_logits_give_exactly_zero_in_any_two_dtypes_and_layouts(dtype, layout):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-40, 40, (3, 4, 333), generator=g) / 16  # the same number in every dtype
    x[0, 0, ::3], shard = -math.inf, VocabShard.from_group(333)
    student = lay_out(x.to(dtype), layout).requires_grad_()
    for teacher in [x.to(other) for other in DTYPES]:
        for beta in BETAS:
            value = generalized_jsd(student, teacher, shard=shard, beta=beta, temperature=0.7)
            assert (value == 0).all(), (teacher.dtype, beta, value)
            assert (gradient(value, student, upstream(3, 4)) == 0).all(), (teacher.dtype, beta)


@pytest.mark.parametrize('beta', BETAS)
@pytest.mark.parametrize('offset', [0.0, 30.0, 1e4])
@pytest.mark.parametrize('near', [0.0, 1e-5, 1e-3, 0.1])
def test_never_negative_beyond_rounding(beta, offset, near):
    """Nor does it lose digits to a constant in all logits of a row, which means nothing."""
    student, teacher, shard = both(200, vocab_size=50, dtype=torch.float32, near=near)
    student = (student.detach() + offset).requires_grad_()
    found = generalized_jsd(student, teacher, shard=shard, beta=beta)
    assert found.min() >= -5e-7
    torch.testing.assert_close(found.double(), plain(student, teacher, beta), rtol=1e-4, atol=5e-7)


@pytest.mark.parametrize('beta', BETAS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_huge_logits_neither_overflow_nor_lose_their_digits(beta, dtype):
    student, teacher, shard = both(6, dtype=F64)
    size = torch.tensor([1e4, -1e4, 1e4, 1.0, 1.0, 1e4], dtype=F64)[:, None]
    spread = torch.tensor([0, 0, 1, 1, 0, 1])[:, None] == 1
    student = torch.where(spread, size * student.detach().sign(), size + student.detach()).to(dtype).requires_grad_()
    teacher = torch.where(spread, size * teacher.sign(), size + teacher).to(dtype)
    found = generalized_jsd(student, teacher, shard=shard, beta=beta)
    want, weights = plain(student, teacher, beta), upstream(6)
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=1e-6)
    close = {'rtol': 1e-5, 'atol': 1e-5} if dtype.itemsize > 2 else {'rtol': 8e-3, 'atol': 1e-4}
    torch.testing.assert_close(*(gradient(value, student, weights) for value in (found, want)), **close)


@pytest.mark.parametrize('beta', BETAS)
@pytest.mark.parametrize('bad', [math.nan, math.inf])
@pytest.mark.parametrize('whose', ['student', 'teacher'])
def test_a_bad_logit_of_a_counted_token_shows(beta, bad, whose):
    student, teacher, shard = both(3)
    with torch.no_grad():
        (student if whose == 'student' else teacher)[1, 4] = bad
    for chunk_size in (None, 3):
        value = generalized_jsd(student, teacher, shard=shard, beta=beta, chunk_size=chunk_size)
        assert value.isnan().tolist() == [False, True, False]
        grad = gradient(value, student, torch.ones(3))
        assert grad[1].isnan().any()
        assert grad[[0, 2]].isfinite().all()
        assert torch.equal(gradient(value, student, torch.tensor([1, 0, 2]))[1], torch.zeros(11, dtype=F64))


@pytest.mark.parametrize('of_student', LAYOUTS)
@pytest.mark.parametrize('of_teacher', LAYOUTS)
@pytest.mark.parametrize('dtype', [F64, torch.bfloat16])
def test_layouts_of_both_change_nothing(of_student, of_teacher, dtype):
    student, teacher, shard = both(3, 4, dtype=dtype)
    weights, laid = upstream(3, 4), lay_out(student.detach(), of_student).requires_grad_()
    for beta in (0, 0.5, 1):
        want = generalized_jsd(student, teacher, shard=shard, beta=beta)
        found = generalized_jsd(laid, lay_out(teacher, of_teacher), shard=shard, beta=beta)
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7)
        grad = gradient(found, laid, weights)
        close = {'rtol': 1e-12, 'atol': 1e-15} if dtype == F64 else {'rtol': 8e-3, 'atol': 1e-6}
        torch.testing.assert_close(grad, gradient(want, student, weights), **close)


@pytest.mark.parametrize('lead', [(), (0,), (2, 0), (0, 3), (1,), (1, 1)])
@pytest.mark.parametrize('vocab_size', [1, 7])
@pytest.mark.parametrize('heads', [(False, False), (True, False), (False, True), (True, True)])
def test_no_token_one_token_and_one_column(lead, vocab_size, heads):
    student, teacher, shard = both(*lead, vocab_size=vocab_size)
    eye = torch.eye(vocab_size, dtype=F64)
    given = [LinearHead(x, eye) if head else x for x, head in zip((student, teacher), heads)]
    for mask in (None, torch.ones(lead, dtype=torch.bool), torch.zeros(lead, dtype=torch.bool)):
        for beta in (0, 0.5, 1):
            value = generalized_jsd(*given, shard=shard, beta=beta, mask=mask)
            want, weights = plain(student, teacher, beta, mask=mask), upstream(*lead)
            torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-14)
            grad = gradient(value, student, weights)
            torch.testing.assert_close(grad, gradient(want, student, weights), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize('beta', [0, 0.5, 1])
@pytest.mark.parametrize('heads', [(False, False), (True, False), (False, True), (True, True)])
def test_chunks_of_one_of_no_divisor_and_of_more_than_all_agree(beta, heads):
    student, teacher, shard = both(6, vocab_size=19)
    weights, want = upstream(6), plain(student, teacher, beta)
    eye = torch.eye(19, dtype=F64)
    for chunk_size in (1, 4, 19, 1000):
        for mb in (None, 1e-4):
            given = [
                LinearHead(x, eye, max_workspace_mb=mb) if head else x for x, head in zip((student, teacher), heads)
            ]
            found = generalized_jsd(*given, shard=shard, beta=beta, chunk_size=chunk_size)
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-14)
            grad = gradient(found, student, weights)
            torch.testing.assert_close(grad, gradient(want, student, weights), rtol=1e-12, atol=1e-14)


def test_a_transposed_head_beside_logits_and_a_narrow_one():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4, 3, 2, generator=g, dtype=F64), torch.randn(7, 2, generator=g, dtype=F64)
    student, shard = torch.randn(3, 4, 7, generator=g, dtype=F64).requires_grad_(), VocabShard.from_group(7)
    head = LinearHead(hidden, weight, logit_scale=0.5).transpose(0, 1)
    want, weights = plain(student, (hidden @ weight.T).transpose(0, 1) / 2, 0.3), upstream(3, 4)
    found = generalized_jsd(student, head, shard=shard, beta=0.3)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(gradient(found, student, weights), gradient(want, student, weights))
    part = generalized_jsd(student[:, 1:3], head.narrow(1, 1, 2), shard=shard, beta=0.3)
    torch.testing.assert_close(part, want[:, 1:3])


@pytest.mark.parametrize('beta', [0, 0.5, 1])
def test_a_head_into_main_grad(beta):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 3, generator=g, dtype=F64).requires_grad_() for n in (5, 7))
    teacher, weights, shard = torch.randn(5, 7, generator=g, dtype=F64), upstream(5), VocabShard.from_group(7)
    main_grad = torch.ones(7, 3, dtype=F64)
    head = LinearHead(hidden, weight, main_grad=main_grad)
    torch.autograd.backward(generalized_jsd(head, teacher, shard=shard, beta=beta), weights)
    want = torch.autograd.grad(plain(hidden @ weight.T, teacher, beta), [hidden, weight], weights)
    torch.testing.assert_close(hidden.grad, want[0])
    torch.testing.assert_close(main_grad - 1, want[1])


@pytest.mark.parametrize('beta', BETAS)
def test_backward_twice_gives_the_same_bits(beta):
    student, teacher, shard = both(4, dtype=torch.bfloat16)
    value, weights = generalized_jsd(student, teacher, shard=shard, beta=beta), upstream(4)
    assert torch.equal(gradient(value, student, weights), gradient(value, student, weights))
    hidden, weight = (torch.randn(n, 3, dtype=F64, requires_grad=True) for n in (4, 11))
    value = generalized_jsd(LinearHead(hidden, weight), teacher, shard=shard, beta=beta)
    first, second = (torch.autograd.grad(value, [hidden, weight], weights, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize('beta', BETAS)
def test_the_value_may_be_changed_in_place(beta):
    student, teacher, shard = both(4)
    weights = upstream(4)
    value = generalized_jsd(student, teacher, shard=shard, beta=beta)
    want = gradient(value, student, weights)
    value.mul_(weights)
    torch.testing.assert_close(gradient(value, student, torch.ones(4)), want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize('beta', [0, 0.5, 1])
def test_a_second_derivative_is_refused(beta):
    student, teacher, shard = both(4)
    value = generalized_jsd(student, teacher, shard=shard, beta=beta)
    (grad,) = torch.autograd.grad(value.sum(), student, create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivative'):
        grad.sum().backward()


def test_the_teacher_gets_no_gradient_and_nothing_is_recorded_without_one():
    student, teacher, shard = both(4)
    value = generalized_jsd(student, teacher.requires_grad_(), shard=shard, beta=0.5)
    assert torch.autograd.grad(value.sum(), teacher, allow_unused=True) == (None,)
    assert not generalized_jsd(student.detach(), teacher, shard=shard, beta=0.5).requires_grad
    with torch.no_grad():
        assert not generalized_jsd(student, teacher, shard=shard, beta=0.5).requires_grad
    with torch.inference_mode():
        inside = generalized_jsd(student, teacher, shard=shard, beta=0.5)
    assert torch.equal(inside, value.detach())


def test_a_head_without_gradients_takes_no_memory_for_them():
    hidden, weight = torch.randn(4, 64), torch.randn(1 << 13, 64, requires_grad=True)
    teacher = torch.randn(4, 1 << 13)
    with torch.no_grad(), NewTensors() as new:
        generalized_jsd(LinearHead(hidden, weight), teacher, shard=VocabShard.from_group(1 << 13), beta=0.5)
    assert max(new.sizes) < weight.numel()


def test_autocast_and_checkpointing_change_no_bit():
    student, teacher, shard = both(4, dtype=torch.float32)

    def loss(x):
        return generalized_jsd(x * 2, teacher, shard=shard, beta=0.3).sum()

    (want,) = torch.autograd.grad(loss(student), student)
    with torch.autocast('cpu', torch.bfloat16):
        cast = loss(student)
    (again,) = torch.autograd.grad(checkpoint(loss, student, use_reentrant=False), student)
    assert torch.equal(torch.autograd.grad(cast, student)[0], want)
    assert torch.equal(again, want)


def test_the_logits_are_let_go_after_backward_while_the_value_lives():
    student, teacher, shard = both(3)
    logits = [student * 1, teacher * 1]
    alive = [weakref.ref(x) for x in logits]
    value = generalized_jsd(*logits, shard=shard, beta=0.5)
    del logits
    value.sum().backward()
    gc.collect()
    assert value.requires_grad
    assert [ref() for ref in alive] == [None, None]


def test_wrong_arguments_are_named():
    student, teacher, shard = both(3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    head = LinearHead(torch.zeros(3, 4, 2, dtype=F64), torch.zeros(11, 2, dtype=F64))
    for changes, words in (
        ({'beta': 1.5}, r'beta must be a number in \[0, 1\], got 1.5'),
        ({'beta': math.nan}, 'beta must be a number'),
        ({'beta': '0.5'}, 'beta must be a number'),
        ({'temperature': 0}, 'temperature must be a finite number > 0'),
        ({'temperature': math.inf}, 'temperature must be a finite number > 0'),
        ({'chunk_size': 0}, 'chunk_size must be an int >= 1'),
        ({'mask': mask[0]}, r'mask must be bool \(3, 4\), .* got torch.bool \(4,\)'),
        ({'mask': mask.long()}, 'mask must be bool .* got torch.int64'),
        ({'mask': [True]}, 'mask must be bool .* got list'),
        ({'shard': None}, 'shard must be a VocabShard'),
        ({'student': student[..., :10]}, 'logits must hold the 11 ids'),
        ({'student': student.detach().long()}, 'logits must be float16'),
        ({'teacher': teacher[0]}, r'teacher must have the leading shape of the student, \(3, 4\), got \(4,\)'),
        ({'teacher': head.transpose(0, 1)}, r'leading shape of the student, \(3, 4\), got \(4, 3\)'),
        ({'teacher': teacher[..., :10]}, r'teacher must hold the 11 ids \[0, 11\)'),
        ({'teacher': teacher.long()}, 'teacher must be float16, .* got torch.int64'),
        ({'teacher': None}, 'teacher must be a tensor or a LinearHead, got NoneType'),
        ({'teacher': teacher.to('meta')}, 'teacher must be on the device of the student, cpu, got meta'),
    ):
        arguments = {'student': student, 'teacher': teacher, 'shard': shard, 'beta': 0.5, **changes}
        with pytest.raises(ValueError, match=words):
            generalized_jsd(**arguments)


def test_recut_on_one_process_drops_and_adds_rows():
    rows = torch.randn(7, 3)
    held = VocabShard.from_group(7, vocab_size=6)
    assert torch.equal(recut(rows, held, VocabShard.from_group(6)), rows[:6])
    longer = recut(rows, held, VocabShard.from_group(9))
    assert torch.equal(longer[:7], rows)
    assert (longer[7:] == 0).all()
    assert torch.equal(recut(rows[:, 0], held, VocabShard.from_group(6)), rows[:6, 0])
    with pytest.raises(ValueError, match='rows must be the 7'):
        recut(rows[:5], held, held)


@pytest.mark.parametrize('layouts', [('contiguous', 'contiguous'), ('transposed', 'contiguous')])
def test_only_the_gradient_is_as_large_as_the_logits(layouts):
    rows, columns = 32, 1 << 17
    student, teacher = (lay_out(torch.zeros(2, rows // 2, columns, dtype=torch.bfloat16), layout) for layout in layouts)
    student.requires_grad_()
    for beta in (0, 0.5, 1):
        with NewTensors() as new:
            value = generalized_jsd(student, teacher, shard=VocabShard.from_group(columns), beta=beta)
            torch.autograd.grad(value.sum(), student)
        large = [size for size in new.sizes if size > 4 << 20]  # a tile; of a teacher that has to be gathered 8 MiB
        assert [size for size in large if size > 8 << 20] in ([], [2 * rows * columns])
        assert 4 * rows * columns not in new.sizes


@needs_peak
@pytest.mark.parametrize('kernels', ['eager', 'compiled'])
@pytest.mark.parametrize('beta', [0, 0.5])
def test_peak_memory_is_that_of_the_gradient(monkeypatch, kernels, beta):
    monkeypatch.setenv('TWINKLE_MEGATRON_KERNELS', kernels)
    rows, columns = 1024, 1 << 16
    shard = VocabShard.from_group(columns)

    def on_rank():
        student, teacher = (torch.zeros(rows, columns, dtype=torch.bfloat16).fill_(n) for n in (1, 2))
        student.requires_grad_()

        def step():
            torch.autograd.grad(generalized_jsd(student, teacher, shard=shard, beta=beta).sum(), student)

        return peak_memory(step)

    (peak,) = run_ranks(on_rank, 1, timeout=120)
    assert peak <= 1.1 * 2 * rows * columns


@needs_peak
def test_two_heads_need_no_memory_of_the_size_of_the_logits():
    rows, columns, width = 1024, 32_000, 16
    g = torch.Generator().manual_seed(0)
    hidden, weight, own, others = (torch.randn(n, width, generator=g) for n in (rows, columns, rows, columns))
    shard = VocabShard.from_group(columns)

    def on_rank():
        student, largest = [hidden.requires_grad_(), weight.requires_grad_()], []

        def sweep():
            head, teacher = LinearHead(*student, max_workspace_mb=4), LinearHead(own, others, max_workspace_mb=4)
            with NewTensors() as new:
                grads = torch.autograd.grad(generalized_jsd(head, teacher, shard=shard, beta=1).sum(), student)
            largest.append(max(new.sizes))
            return grads

        return peak_memory(sweep), max(largest)

    ((peak, largest),) = run_ranks(on_rank, 1)
    assert largest <= 4 << 20
    gradients, tiles = 4 * (columns + 6 * rows) * width, 20 << 20
    assert peak <= gradients + tiles < 4 * rows * columns / 5
