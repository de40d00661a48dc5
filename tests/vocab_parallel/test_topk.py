"""`topk`, `gather` and `argmax` over shards against a plain sort of the whole row."""

import math
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from tests.vocab_parallel.reference import Example, bits
from twinkle_megatron.groups import group_rank
from twinkle_megatron.vocab_parallel import VocabShard, argmax, gather, topk


def run(example, k, group):
    """Values, ids and gradients of all three on this rank."""
    whole, _ = example.tensors()
    x = example.local(whole, group_rank(group)).detach().requires_grad_()
    shard = example.shard(group)
    g = torch.Generator().manual_seed(example.seed)
    values, ids = topk(x, k, shard=shard)
    weight = torch.randn(values.shape, generator=g, dtype=torch.float64).to(x.dtype)
    (grad,) = torch.autograd.grad(values, x, weight)
    wanted = torch.randint(example.vocab_size, (*example.lead, 3), generator=g)
    picked = gather(x, wanted.to(torch.int32), shard=shard)
    picked_weight = torch.randn(picked.shape, generator=g, dtype=torch.float64).to(x.dtype)
    (picked_grad,) = torch.autograd.grad(picked, x, picked_weight)
    best = argmax(x, shard=shard, chunk_size=example.chunk_size)
    return [t.detach() for t in (values, ids, grad, weight, wanted, picked, picked_grad, picked_weight, best)]


def check(example, k, ranks):
    whole, _ = example.tensors()
    x = whole[..., : example.vocab_size].double().requires_grad_()
    for other in ranks[1:]:
        for i in (0, 1, 5, 8):
            assert torch.equal(bits(other[i]), bits(ranks[0][i])), example
    values, ids, _, weight, wanted, picked, _, picked_weight, best = ranks[0]
    key = torch.where(x.isnan(), math.inf, x).detach()
    want_ids = torch.sort(key, dim=-1, descending=True, stable=True).indices[..., :k]
    assert torch.equal(ids, want_ids), example
    assert values.dtype == picked.dtype == whole.dtype
    for found, at, upstream, grad_index in ((values, want_ids, weight, 2), (picked, wanted, picked_weight, 6)):
        want = x.gather(-1, at)
        assert torch.equal(bits(found.double()), bits(want.detach())) or torch.equal(
            found.double().nan_to_num(7), want.nan_to_num(7)
        )
        (want_grad,) = torch.autograd.grad(want, x, upstream.double())
        grad = torch.cat([r[grad_index] for r in ranks], -1)
        assert grad.dtype == whole.dtype
        assert (grad[..., example.vocab_size :] == 0).all(), example
        # a sum of at most three upstream gradients in the dtype of the logits
        rounding = 2 * torch.finfo(whole.dtype).eps * (want_grad.abs() + upstream.abs().double().sum(-1, keepdim=True))
        assert ((grad[..., : example.vocab_size].double() - want_grad).abs() <= rounding).all(), example
    hit = x.isnan() | (x == x.amax(-1, keepdim=True)) & ~x.isnan().any(-1, keepdim=True)
    assert torch.equal(best, torch.where(hit, torch.arange(example.vocab_size), example.vocab_size).amin(-1)), example


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_one_process_equals_a_sort(data):
    example = Example.draw(lambda options: data.draw(st.sampled_from(options)), 1)
    k = data.draw(st.integers(1, example.vocab_size))
    check(example, k, [run(example, k, None)])


@pytest.mark.parametrize('tp', [2, 3])
def test_ranks_equal_a_sort(tp):
    rng = random.Random(tp)
    drawn = [Example.draw(rng.choice, tp) for _ in range(40)]
    cases = [(e, rng.randint(1, e.vocab_size)) for e in drawn]
    ranks = run_ranks(lambda: [run(e, k, dist.group.WORLD) for e, k in cases], tp)
    for i, (example, k) in enumerate(cases):
        check(example, k, [r[i] for r in ranks])


def test_columns_of_minus_infinity_are_found_where_a_short_shard_has_none_left():
    def on_rank():
        widths, row = (1, 2), torch.tensor([1.0, -math.inf, 0.0])
        start = sum(widths[: dist.get_rank()])
        shard = VocabShard.from_group(widths[dist.get_rank()], dist.group.WORLD)
        values, ids = topk(row[start : shard.stop], 3, shard=shard)
        return values.tolist(), ids.tolist()

    assert run_ranks(on_rank, 2) == [([1.0, 0.0, -math.inf], [0, 2, 1])] * 2


def test_equal_logits_take_the_lowest_ids_on_every_layout():
    def on_rank():
        shard = VocabShard.from_group(4, dist.group.WORLD, 7)
        x = torch.zeros(2, 4)
        return topk(x, 5, shard=shard)[1].tolist(), argmax(x, shard=shard).tolist()

    assert run_ranks(on_rank, 2) == [([[0, 1, 2, 3, 4]] * 2, [0, 0])] * 2


def test_a_repeated_id_collects_every_gradient():
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[1, 1, 4], [0, 3, 3]])
    weight = torch.randn(2, 3, dtype=torch.float64)
    (grad,) = torch.autograd.grad(gather(x, ids, shard=VocabShard.from_group(5)), x, weight)
    assert torch.equal(grad, torch.zeros_like(x).scatter_add(-1, ids, weight))


def test_gradcheck():
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    ids, shard = torch.randint(5, (2, 3, 2)), VocabShard.from_group(6, vocab_size=5)
    assert torch.autograd.gradcheck(lambda t: topk(t, 3, shard=shard)[0], x)
    assert torch.autograd.gradcheck(lambda t: gather(t, ids, shard=shard), x)


def test_one_collective_forward_and_none_backward():
    def on_rank():
        from tests.vocab_parallel.probes import counted

        shard = VocabShard.from_group(4, dist.group.WORLD)
        x = torch.randn(3, 4, requires_grad=True)
        counts = []
        for call in (lambda: topk(x, 3, shard=shard)[0], lambda: gather(x, torch.zeros(3, 2).long(), shard=shard)):
            with counted() as forward:
                found = call()
            with counted() as backward:
                found.sum().backward()
            counts.append((sum(forward.values()), sum(backward.values())))
        with counted() as forward:
            argmax(x, shard=shard)
        return [*counts, (sum(forward.values()), 0)]

    assert run_ranks(on_rank, 2) == [[(1, 0), (1, 0), (1, 0)]] * 2


def test_lookups_of_a_tensor_are_linear_and_may_be_differentiated_through():
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    ids, shard = torch.tensor([[1, 4], [0, 0]]), VocabShard.from_group(5)
    lookups = (
        (lambda y: gather(y, ids, shard=shard), lambda y: y.gather(-1, ids)),
        (
            lambda y: topk(y, 2, shard=shard)[0],
            lambda y: y.topk(2).values,
        ),
    )
    for found in lookups:
        second = []
        for lookup in found:
            (first,) = torch.autograd.grad(lookup(x**2).sum(), x, create_graph=True)
            second.append(torch.autograd.grad((first**2).sum(), x)[0])
        torch.testing.assert_close(*second)
