"""Log-probs at some ids and of all the others together: against the definition, on one process and on shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from twinkle_megatron.vocab_parallel import LinearHead, VocabShard, log_probs_and_tail

F64 = torch.float64
PRECISE = {'rtol': 1e-11, 'atol': 1e-12}
V, H = 23, 6


def plain(logits, ids, temperature):
    """From whole logits; the tail is summed."""
    logp = (logits / temperature).log_softmax(-1)
    others = torch.ones_like(logp, dtype=torch.bool).scatter(-1, ids, False)
    return logp.gather(-1, ids), logp.masked_fill(~others, -torch.inf).logsumexp(-1)


def problem(lead=(3, 4), k=3, seed=0, vocab=V):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*lead, vocab, generator=generator, dtype=F64)
    ids = torch.rand(*lead, vocab, generator=generator).argsort(-1)[..., :k]
    upstream = torch.randn(*lead, k + 1, generator=generator, dtype=F64)
    return logits, ids, upstream


def found(logits, leaves, ids, upstream, shard, temperature=1.0):
    at, tail = log_probs_and_tail(logits, ids, shard=shard, temperature=temperature)
    grads = torch.autograd.grad((torch.cat([at, tail[..., None]], -1) * upstream).sum(), leaves)
    return at.detach(), tail.detach(), *grads


def wanted(logits, leaves, ids, upstream, temperature=1.0):
    at, tail = plain(logits, ids, temperature)
    grads = torch.autograd.grad((torch.cat([at, tail[..., None]], -1) * upstream).sum(), leaves)
    return at.detach(), tail.detach(), *grads


@pytest.mark.parametrize('temperature', [1.0, 0.4])
@pytest.mark.parametrize(('lead', 'k'), [((3, 4), 3), ((5,), 1), ((2, 3), V - 1), ((0, 4), 2)])
def test_values_and_gradients_equal_the_definition(lead, k, temperature):
    logits, ids, upstream = problem(lead, k)
    leaf = logits.requires_grad_()
    shard = VocabShard(0, V, V)
    results = found(leaf, [leaf], ids, upstream, shard, temperature), wanted(leaf, [leaf], ids, upstream, temperature)
    torch.testing.assert_close(*results, **PRECISE)
    hidden = torch.randn(*lead, H, dtype=F64, requires_grad=True)
    weight, bias = torch.randn(V, H, dtype=F64, requires_grad=True), torch.randn(V, dtype=F64, requires_grad=True)
    leaves = [hidden, weight, bias]
    head = LinearHead(hidden, weight, bias=bias)
    torch.testing.assert_close(
        found(head, leaves, ids, upstream, shard, temperature),
        wanted(hidden @ weight.T + bias, leaves, ids, upstream, temperature), **PRECISE,
    )  # fmt: skip


def on_shards(sizes, vocab, temperature):
    """Uneven shards and padding, whose columns hold garbage."""
    logits, ids, upstream = problem(vocab=vocab)
    start = sum(sizes[: dist.get_rank()])
    shard = VocabShard(start, start + sizes[dist.get_rank()], vocab, dist.group.WORLD)
    whole = torch.nn.functional.pad(logits, (0, sum(sizes) - vocab), value=77.0)
    leaf = whole[..., shard.start : shard.stop].clone().requires_grad_()
    return found(leaf, [leaf], ids, upstream, shard, temperature)


@pytest.mark.parametrize(('sizes', 'vocab'), [((12, 11), V), ((4, 0, 19), V), ((8, 8, 8), 17), ((3, 3), 5)])
def test_shards_give_what_the_whole_gives(sizes, vocab):
    logits, ids, upstream = problem(vocab=vocab)
    leaf = logits.requires_grad_()
    at, tail, grad = wanted(leaf, [leaf], ids, upstream, 0.7)
    every = run_ranks(on_shards, len(sizes), sizes, vocab, 0.7)
    for mine in every:
        torch.testing.assert_close(mine[:2], (at, tail), **PRECISE)
        assert all(torch.equal(a, b) for a, b in zip(mine[:2], every[0][:2])), 'bitwise the same on all ranks'
    joined = torch.cat([mine[2] for mine in every], -1)
    torch.testing.assert_close(joined[..., :vocab], grad, **PRECISE)
    assert (joined[..., vocab:] == 0).all(), 'padding gets exactly 0'


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes_are_summed_in_float32(dtype):
    logits, ids, upstream = problem()
    leaf = logits.to(dtype).requires_grad_()
    at, tail, grad = found(leaf, [leaf], ids, upstream.float(), VocabShard(0, V, V))
    exact = leaf.detach().double().requires_grad_()
    want = wanted(exact, [exact], ids, upstream)
    assert at.dtype == tail.dtype == torch.float32
    assert grad.dtype == dtype
    torch.testing.assert_close((at.double(), tail.double()), want[:2], rtol=1e-5, atol=1e-5)
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(grad.double(), want[2], rtol=bound, atol=bound)


def test_a_small_tail_keeps_its_digits():
    """1 − Σ p would be 0 in float32, or less."""
    logits = torch.tensor([[30.0, 29.0, 0.0, -1.0]])
    _, tail = log_probs_and_tail(logits, torch.tensor([[0, 1]]), shard=VocabShard(0, 4, 4))
    right = torch.tensor([0.0, -1.0], dtype=F64).logsumexp(0) - logits.double().logsumexp(-1)
    assert tail.item() == pytest.approx(right.item(), rel=1e-6)


def test_nothing_else_and_ids_of_nobody():
    """A tail without columns is −inf with a gradient of 0; an id outside the vocabulary has no probability."""
    logits, _, _ = problem(lead=(2,), vocab=3)
    leaf = logits.requires_grad_()
    shard = VocabShard(0, 3, 3)
    at, tail = log_probs_and_tail(leaf, torch.tensor([[0, 1, 2]] * 2), shard=shard)
    assert (tail == -torch.inf).all()
    (grad,) = torch.autograd.grad(at.sum() + tail.sum(), leaf)
    torch.testing.assert_close(grad, torch.autograd.grad(leaf.log_softmax(-1).sum(), leaf)[0], **PRECISE)
    at, tail = log_probs_and_tail(leaf, torch.tensor([[0, -1, 3]] * 2), shard=shard)
    assert (at[:, 1:] == -torch.inf).all()
    torch.testing.assert_close(torch.logaddexp(at[:, 0], tail), torch.zeros(2, dtype=F64), **PRECISE)


def test_a_second_derivative_is_refused():
    logits, ids, _ = problem()
    leaf = logits.requires_grad_()
    at, _ = log_probs_and_tail(leaf, ids, shard=VocabShard(0, V, V))
    (grad,) = torch.autograd.grad((at**2).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivative'):
        grad.sum().backward()


def test_gradcheck():
    logits, ids, _ = problem(lead=(2, 2), vocab=7)
    assert torch.autograd.gradcheck(
        lambda x: log_probs_and_tail(x, ids, shard=VocabShard(0, 7, 7), temperature=0.6), logits.requires_grad_()
    )


@pytest.mark.parametrize(
    ('ids', 'temperature', 'message'),
    [
        (torch.zeros(3, 4, 2), 1.0, r'ids must be int64 \(3, 4, .k.\), got torch.float32'),
        (torch.zeros(3, 2).long(), 1.0, r'ids must be int64 \(3, 4, .k.\)'),
        ([[0]], 1.0, 'ids must be int64'),
        (torch.zeros(3, 4, 2).long(), 0.0, 'temperature must be a finite number > 0'),
    ],
)
def test_wrong_calls(ids, temperature, message):
    with pytest.raises(ValueError, match=message):
        log_probs_and_tail(problem()[0], ids, shard=VocabShard(0, V, V), temperature=temperature)
