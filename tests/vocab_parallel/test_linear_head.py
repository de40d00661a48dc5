"""The linear head on one process: values, gradients and manners, against logits that are built."""

import gc
import itertools
import math
import shutil
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.vocab_parallel.linear_reference import (
    HeadExample,
    assert_head,
    gradients,
    head_examples,
    largest_tile,
    poisoned,
    run_head,
)
from tests.vocab_parallel.reference import DIFFERENTIABLE, bits, ours, plain, upstream
from twinkle_megatron.vocab_parallel import (
    LinearHead,
    VocabShard,
    argmax,
    cross_entropy,
    gather,
    linear_source,
    log_probs,
    log_probs_and_entropy,
    token_stats,
    topk,
)

V, H = 11, 5
SHARD = VocabShard.from_group(V)
FLAGS = {'entropy': True, 'mean_logit': True, 'argmax': True}


def parts(*lead, seed=0, dtype=torch.float64):
    """Hidden, weight and bias, which want gradients, and labels."""
    g = torch.Generator().manual_seed(seed)
    shapes = (*lead, H), (V, H), (V,)
    drawn = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    return (*drawn, torch.randint(V, lead, generator=g))


def built(hidden, weight, bias):
    return hidden @ weight.T + bias


def assert_drawn(data):
    example = HeadExample.draw(lambda options: data.draw(st.sampled_from(options)), 1)
    assert_head(example, [run_head(example, None)])


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_values_and_gradients_equal_the_definitions(data):
    assert_drawn(data)


@pytest.mark.long
@settings(deadline=None, max_examples=4000, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_values_and_gradients_equal_the_definitions_on_a_long_list(data):
    assert_drawn(data)


needs_compiler = pytest.mark.skipif(shutil.which('g++') is None, reason='no C++ compiler')


@needs_compiler
def test_compiled_kernels_equal_the_eager_ones(monkeypatch):
    hidden, weight, bias, target = parts(3, 7, dtype=torch.bfloat16)
    target[1, 2] = -100
    found = []
    for kernels in ('eager', 'compiled'):
        monkeypatch.setenv('TWINKLE_MEGATRON_KERNELS', kernels)
        with poisoned():
            head = LinearHead(hidden, weight, bias=bias, max_workspace_mb=5e-4)
            stats = token_stats(head, target, shard=SHARD, temperature=0.7, **FLAGS)
            outs = {name: getattr(stats, name) for name in (*DIFFERENTIABLE, 'argmax')}
            grads = gradients(outs, [hidden, weight, bias], upstream(1, (3, 7)), DIFFERENTIABLE)
        found.append((list(outs.values()), grads))
    torch.testing.assert_close(*(outs for outs, _ in found), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*(grads for _, grads in found), rtol=2e-2, atol=2e-2)


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_compiled_kernels_equal_the_definitions_on_a_long_list(monkeypatch, dtype):
    monkeypatch.setenv('TWINKLE_MEGATRON_KERNELS', 'compiled')
    for example in [e for e in head_examples(3, 300, 1) if e.dtype == dtype]:
        assert_head(example, [run_head(example, None)])


@pytest.mark.parametrize('options', [{}, {'max_workspace_mb': 1e-4, 'logit_scale': 0.3}, {'max_workspace_mb': 100}])
def test_gradcheck(options):
    hidden, weight, bias, target = parts(2, 2)
    target[0, 1] = -100
    shard = VocabShard.from_group(V, vocab_size=V - 2)
    target = target.clamp_max(V - 3)

    def statistics(*tensors):
        found = ours(LinearHead(*tensors[:2], bias=tensors[2], **options), target, shard, temperature=0.6)
        return tuple(found[name] for name in (*DIFFERENTIABLE, 'cross_entropy'))

    assert torch.autograd.gradcheck(statistics, (hidden, weight, bias))
    ids = torch.randint(V - 2, (2, 2, 3), generator=torch.Generator().manual_seed(3))
    for lookup in (lambda head: gather(head, ids, shard=shard), lambda head: topk(head, 3, shard=shard)[0]):
        assert torch.autograd.gradcheck(
            lambda h, w, b, f=lookup: f(LinearHead(h, w, bias=b, **options)), (hidden, weight, bias)
        )


@pytest.mark.parametrize('name', [*DIFFERENTIABLE, 'cross_entropy'])
def test_each_output_may_be_the_only_one_that_is_differentiated(name):
    *tensors, target = parts(4)
    weights = upstream(1, (4,))
    want = gradients(plain(built(*tensors), target, V), tensors, weights, [name])
    hidden, weight, bias = tensors
    found = ours(LinearHead(hidden, weight, bias=bias), target, SHARD)
    torch.testing.assert_close(gradients(found, tensors, weights, [name]), want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize('options', [{}, {'max_workspace_mb': 1e-4}, {'max_workspace_mb': 100}])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
def test_backward_twice_gives_the_same_bits(options, dtype):
    hidden, weight, bias, target = parts(40, dtype=dtype)
    found = ours(LinearHead(hidden, weight, bias=bias, **options), target, SHARD)
    first, second = (gradients(found, (hidden, weight, bias), upstream(1, (40,)), DIFFERENTIABLE) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second))


def test_two_runs_give_the_same_bits():
    for example in head_examples(7, 30, 1):
        first, second = run_head(example, None), run_head(example, None)
        assert all(torch.equal(bits(first[name]), bits(second[name])) for name in first), example


def test_reuse_storage_means_nothing_to_a_head():
    hidden, weight, bias, target = parts(4)
    head = LinearHead(hidden, weight, bias=bias)
    grads = []
    for reuse in (False, True):
        loss = log_probs(head, target, shard=SHARD, reuse_storage=reuse).sum()
        grads += [torch.autograd.grad(loss, [hidden, weight], retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for again in grads[1:] for a, b in zip(grads[0], again))


def test_the_short_forms_are_the_statistics():
    hidden, weight, bias, target = parts(2, 3)
    head = LinearHead(hidden, weight, bias=bias)
    stats = token_stats(head, target, shard=SHARD, temperature=0.5, **FLAGS)
    both = log_probs_and_entropy(head, target, shard=SHARD, temperature=0.5)
    assert torch.equal(log_probs(head, target, shard=SHARD, temperature=0.5), stats.log_prob)
    assert torch.equal(cross_entropy(head, target, shard=SHARD, temperature=0.5), -stats.log_prob)
    assert torch.equal(torch.stack(both), torch.stack([stats.log_prob, stats.entropy]))
    assert torch.equal(argmax(head, shard=SHARD), stats.argmax)
    best = token_stats(head, shard=SHARD, argmax=True)
    assert torch.equal(best.argmax, stats.argmax)
    assert (best.log_prob, best.log_normalizer, best.entropy, best.mean_logit) == (None,) * 4


def test_activation_checkpointing_and_offloading_change_no_bit():
    hidden, weight, bias, target = parts(6)

    def loss(hidden):
        head = LinearHead(hidden * 1, weight, bias=bias)
        return cross_entropy(head, target, shard=SHARD, label_smoothing=0.1).sum()

    wanted = [hidden, weight, bias]
    want = torch.autograd.grad(loss(hidden), wanted)
    again = torch.autograd.grad(checkpoint(loss, hidden, use_reentrant=False), wanted)
    with torch.autograd.graph.save_on_cpu():
        offloaded = torch.autograd.grad(loss(hidden), wanted)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, again, offloaded))


def test_two_heads_on_one_weight_that_is_the_embedding_too():
    hidden, weight, bias, target = parts(4)
    ids = torch.tensor([1, 7, 7, 0])
    grads = []
    for make in (built, lambda h, w, b: LinearHead(h, w, bias=b)):
        embedded = torch.nn.functional.embedding(ids, weight)
        one, two = make(hidden * embedded, weight, bias), make(embedded, weight, bias)
        found = [ours(x, target, SHARD)['cross_entropy'] for x in (one, two)]
        grads.append(torch.autograd.grad(found, [hidden, weight, bias], [torch.arange(4.0).double(), target.double()]))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-13)


def test_hidden_states_may_be_the_weight_itself():
    _, weight, _, _ = parts(1)
    target = torch.arange(V)
    upstream_gradient = torch.randn(V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = [
        torch.autograd.grad(log_probs(x, target, shard=SHARD), weight, upstream_gradient)
        for x in (weight @ weight.T, LinearHead(weight, weight))
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-13)


def test_expanded_tensors_get_the_gradient_of_what_was_expanded():
    hidden, weight, bias, target = parts(1)
    target = target.expand(6)
    grads = []
    for make in (built, lambda h, w, b: LinearHead(h, w, bias=b)):
        x = make(hidden.expand(6, H), weight[:1].expand(V, H), bias[:1].expand(V))
        found = ours(x, target, SHARD)['cross_entropy']
        grads.append(torch.autograd.grad(found, [hidden, weight, bias], upstream(1, (6,))['cross_entropy']))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_a_second_derivative_is_refused():
    hidden, weight, bias, target = parts(4)
    loss = log_probs(LinearHead(hidden, weight, bias=bias), target, shard=SHARD).sum()
    for tensor in (hidden, weight, bias):
        (grad,) = torch.autograd.grad(loss, tensor, create_graph=True)
        with pytest.raises(RuntimeError, match='no second derivative'):
            grad.sum().backward(retain_graph=True)


def test_a_second_derivative_of_a_lookup_is_refused():
    hidden, weight, _, target = parts(4)
    head = LinearHead(hidden, weight)
    for found in (topk(head, 2, shard=SHARD)[0], gather(head, target[:, None], shard=SHARD)):
        (grad,) = torch.autograd.grad(found.sum(), hidden, create_graph=True)  # rows of the weight: it depends on it
        with pytest.raises(RuntimeError, match=r'derivative|differentiate'):
            (grad.sum() + weight.sum()).backward()


def test_nothing_is_recorded_or_kept_without_gradients(monkeypatch):
    hidden, weight, bias, target = parts(4)
    head = LinearHead(hidden, weight, bias=bias, max_workspace_mb=100)
    want = log_probs(head, target, shard=SHARD).detach()
    monkeypatch.setattr(linear_source, '_empty_weight', None)  # whoever makes room for a gradient fails
    ids = target[:, None]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            inside = [token_stats(head, target, shard=SHARD, **FLAGS).log_prob, gather(head, ids, shard=SHARD)]
            inside += topk(head, 2, shard=SHARD)
        assert torch.equal(inside[0], want)
        assert not any(x.requires_grad for x in inside)
    detached = head.detach()
    assert not detached.requires_grad
    assert not log_probs(detached, target, shard=SHARD).requires_grad
    assert not argmax(head, shard=SHARD).requires_grad


def test_autocast_changes_nothing():
    hidden, weight, bias, target = parts(4, dtype=torch.float32)
    ids = target[:, None]
    found = []
    for enabled in (False, True):
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=enabled):
            head = LinearHead(hidden, weight, bias=bias)
            outs = {**ours(head, target, SHARD), 'gather': gather(head, ids, shard=SHARD)}
            outs['topk'] = topk(head, 2, shard=SHARD)[0].sum(-1)
            names = [name for name in outs if name != 'argmax']
            weights = {**upstream(1, (4,)), 'topk': torch.ones(4), 'gather': torch.ones(4, 1)}
            found.append([*outs.values(), *gradients(outs, (hidden, weight, bias), weights, names)])
    assert all(torch.equal(*pair) for pair in zip(*found))


class Products(TorchDispatchMode):
    """How many products of matrices there are."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix('aten::').rstrip('_')
        if name in ('mm', 'addmm', 'bmm', 'baddbmm', 'mv', 'addmv', 'matmul', 'einsum', '_scaled_mm'):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self):
        return sum(self.calls.values())


@pytest.mark.parametrize('wanted', list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize('workspace', [None, 100])
def test_what_is_frozen_is_not_computed(wanted, workspace):
    """One product forward; backward one for the logits unless they are kept, and one each for hidden and weight."""
    *tensors, target = parts(6)
    for tensor, trains in zip(tensors, wanted):
        tensor.requires_grad_(trains)
    head = LinearHead(*tensors[:2], bias=tensors[2], max_workspace_mb=workspace)
    assert head.requires_grad is any(wanted)
    with Products() as forward, largest_tile(1):
        loss = cross_entropy(head, target, shard=SHARD, label_smoothing=0.1).sum()
    assert forward.count == 1
    assert loss.requires_grad is any(wanted)
    if any(wanted):
        with Products() as backward, largest_tile(1):
            loss.backward()
        assert backward.count == (workspace is None) + sum(wanted[:2])
    trained = [t for t in tensors if t.requires_grad]
    want = cross_entropy(built(*tensors), target, shard=SHARD, label_smoothing=0.1).sum()
    if trained:
        torch.testing.assert_close([t.grad for t in trained], list(torch.autograd.grad(want, trained)))
    assert all((t.grad is not None) is trains for t, trains in zip(tensors, wanted))


@pytest.mark.parametrize('wanted', [(True, False), (False, True)])
def test_lookups_compute_no_gradient_of_what_is_frozen(wanted):
    hidden, weight, _, target = parts(6)
    hidden.requires_grad_(wanted[0]), weight.requires_grad_(wanted[1])
    for lookup in (gather(LinearHead(hidden, weight), target[:, None], shard=SHARD),
                   topk(LinearHead(hidden, weight), 2, shard=SHARD)[0]):  # fmt: skip
        with Products() as backward:
            lookup.sum().backward()
        assert backward.count == 1


def test_the_tensors_and_the_kept_tiles_are_let_go_after_backward_while_the_outputs_live(monkeypatch):
    leaf, weight, _, target = parts(6)
    storages = []

    def tracked(*args):
        storages.append(weakref.ref(made := torch.empty(args[0], dtype=args[1])))
        return made

    monkeypatch.setattr(linear_source, '_empty_weight', tracked)
    for backward in (True, False):
        hidden = leaf * 1
        storages.append(weakref.ref(hidden))
        with largest_tile(1e-4):
            kept = log_probs(LinearHead(hidden, weight, max_workspace_mb=1), target, shard=SHARD)
        del hidden
        if backward:
            kept.sum().backward()
            weight.grad = None
            assert kept.requires_grad
        else:
            del kept
        gc.collect()
        assert len(storages) == 2
        assert [alive() for alive in storages] == [None, None]
        storages.clear()


@pytest.mark.parametrize('lead', [(0,), (2, 0), (0, 3)])
def test_no_tokens_still_have_a_gradient_path(lead):
    hidden, weight, bias, target = parts(*lead, dtype=torch.bfloat16)
    weight.data[3] = math.nan
    head = LinearHead(hidden, weight, bias=bias)
    found = ours(head, target, SHARD)
    assert all(out.shape == lead for out in found.values())
    lookups = [topk(head, 3, shard=SHARD)[0], gather(head, torch.zeros(*lead, 2, dtype=torch.long), shard=SHARD)]
    assert [x.shape for x in lookups] == [(*lead, 3), (*lead, 2)]
    outs = [found[name] for name in (*DIFFERENTIABLE, 'cross_entropy')] + lookups
    sum(out.sum() for out in outs).backward()
    for tensor in (hidden, weight, bias):
        assert tensor.grad.dtype == torch.bfloat16
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_ids_may_be_none_at_all():
    hidden, weight, _, _ = parts(3)
    for logits in (hidden @ weight.T, LinearHead(hidden, weight)):
        found = gather(logits, torch.zeros(3, 0, dtype=torch.long), shard=SHARD)
        assert found.shape == (3, 0)
        assert all((grad == 0).all() for grad in torch.autograd.grad(found.sum(), [hidden, weight]))


def test_all_ignored_is_zero_with_a_gradient_path():
    hidden, weight, bias, target = parts(3)
    hidden.data[1] = math.nan
    head = LinearHead(hidden, weight, bias=bias)
    loss = cross_entropy(head, torch.full_like(target, -100), shard=SHARD, label_smoothing=0.1, z_loss=0.1).sum()
    loss.backward()
    assert loss == 0
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in (hidden, weight, bias))


@pytest.mark.parametrize('where', ['hidden', 'weight', 'bias'])
@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_a_bad_number_of_a_trained_token_shows(where, bad):
    tensors = dict(zip(('hidden', 'weight', 'bias'), parts(3)[:3]))
    tensors[where].data[(1, 4)[: tensors[where].dim()]] = bad
    target = torch.tensor([1, 2, 3])
    *outs, grads = [], [], []
    for make in (built, lambda h, w, b: LinearHead(h, w, bias=b, max_workspace_mb=1e-4)):
        found = ours(make(*tensors.values()), target, SHARD)
        outs.append([found[name].isnan() for name in (*DIFFERENTIABLE, 'cross_entropy')])
        grads.append([g.isnan() for g in gradients(found, [*tensors.values()], upstream(1, (3,)), DIFFERENTIABLE)])
    assert all(torch.equal(*pair) for pair in zip(*outs))
    assert all(torch.equal(*pair) for pair in zip(*grads))


@pytest.mark.parametrize('mb', [None, 1e-9, 2e-4])
def test_lookups_order_odd_logits_as_those_of_a_tensor(mb):
    hidden = torch.tensor([[1.0, 2, 0], [0, 0, 0], [-1, 3, 1], [math.nan, 0, 0]])
    weight = torch.tensor([[1.0, 0, 1]]).repeat(V, 1)
    for odd in ([math.nan, math.inf, -math.inf, math.inf, math.nan], [-math.inf] * V, [0, -0.0], []):
        bias = torch.zeros(V)
        bias[V - len(odd) :] = torch.tensor(odd)
        x, head = built(hidden, weight, bias), LinearHead(hidden, weight, bias=bias, max_workspace_mb=mb)
        for k in (1, 4, V):
            for got, want in zip(topk(head, k, shard=SHARD), topk(x, k, shard=SHARD)):
                assert torch.equal(bits(got), bits(want))
        ids = torch.arange(V).expand(4, V)
        assert torch.equal(bits(gather(head, ids, shard=SHARD)), bits(gather(x, ids, shard=SHARD)))
        assert torch.equal(argmax(head, shard=SHARD), argmax(x, shard=SHARD))


@pytest.mark.parametrize('swaps', [[(0, 1)], [(-4, -3)], [(0, 1), (1, 2)], [(0, 2), (1, 0)], [(1, 1)]])
def test_a_head_may_be_transposed_as_its_logits(swaps):
    *tensors, _ = parts(2, 3, 4)
    hidden, weight, bias = tensors
    head = LinearHead(hidden, weight, bias=bias, logit_scale=0.5, max_workspace_mb=1e-3)
    x, turned = built(*tensors) * 0.5, head
    for swap in swaps:
        x, turned = x.transpose(*swap), turned.transpose(*swap)
    assert turned.lead(1) == x.shape[:-1]
    assert head.lead(1) == (2, 3, 4)
    assert turned.detach().lead(1) == x.shape[:-1]
    target = torch.randint(V, x.shape[:-1], generator=torch.Generator().manual_seed(1))
    target[1, 1, 1] = -100
    want, weights = plain(x, target, V), upstream(1, x.shape[:-1])
    found = ours(turned, target, SHARD)
    for name in (*DIFFERENTIABLE, 'cross_entropy', 'argmax'):
        torch.testing.assert_close(found[name], want[name])
    torch.testing.assert_close(*(gradients(outs, tensors, weights, DIFFERENTIABLE) for outs in (found, want)))
    ids = target.clamp_min(0)[..., None]
    assert torch.equal(topk(turned, 3, shard=SHARD)[1], x.topk(3).indices)
    torch.testing.assert_close(gather(turned, ids, shard=SHARD), x.gather(-1, ids))


def test_a_head_tells_what_its_logits_would():
    hidden, weight, bias, _ = parts(2, 3, dtype=torch.float32)
    head = LinearHead(hidden, weight, bias=bias)
    assert (head.local_size, head.dtype, head.device) == (V, torch.float32, torch.device('cpu'))
    assert repr(head) == 'LinearHead(hidden (2, 3, 5), weight (11, 5), torch.float32)'
    assert LinearHead(hidden, weight, sequence_parallel=True).lead(4) == (8, 3)
