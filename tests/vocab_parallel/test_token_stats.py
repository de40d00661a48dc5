"""The statistic operation on one process: values, gradients, memory and manners."""

import gc
import math
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint

from tests.vocab_parallel.probes import NewTensors, needs_peak, peak_memory
from tests.vocab_parallel.reference import (
    DIFFERENTIABLE,
    Example,
    assert_example,
    bits,
    examples,
    gradient,
    lay_out,
    ours,
    plain,
    run_example,
    upstream,
)
from twinkle_megatron.vocab_parallel import (
    VocabShard,
    argmax,
    cross_entropy,
    log_probs,
    log_probs_and_entropy,
    token_stats,
)

FLAGS = {'entropy': True, 'mean_logit': True, 'argmax': True}


def batch(*lead, vocab_size=11, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*lead, vocab_size, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return x, torch.randint(vocab_size, lead, generator=g), VocabShard.from_group(vocab_size)


def assert_drawn(data):
    example = Example.draw(lambda options: data.draw(st.sampled_from(options)), 1)
    assert_example(example, [run_example(example, None)])


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_values_and_gradients_equal_the_definitions(data):
    assert_drawn(data)


@pytest.mark.long
@settings(deadline=None, max_examples=5000, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_values_and_gradients_equal_the_definitions_on_a_long_list(data):
    assert_drawn(data)


def test_compiled_kernels_equal_the_definitions(monkeypatch):
    monkeypatch.setenv('TWINKLE_MEGATRON_KERNELS', 'compiled')
    x, target, shard = batch(3, 4, dtype=torch.bfloat16)
    target[1, 2] = -100
    want, weights = plain(x, target, 11, 0.7, torch.float32), upstream(1, (3, 4))
    stats = token_stats(x, target, shard=shard, temperature=0.7, **FLAGS)
    found = {name: getattr(stats, name) for name in (*DIFFERENTIABLE, 'argmax')}
    for name, value in found.items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*(gradient(y, x, weights, DIFFERENTIABLE) for y in (found, want)), rtol=8e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_compiled_kernels_equal_the_definitions_on_a_long_list(monkeypatch, dtype):
    monkeypatch.setenv('TWINKLE_MEGATRON_KERNELS', 'compiled')
    for example in [e for e in examples(3, 400, 1) if e.dtype == dtype]:
        assert_example(example, [run_example(example, None)])


@pytest.mark.parametrize(('chunk_size', 'temperature'), [(None, 1.0), (2, 0.6), (100, 3.0)])
def test_gradcheck(chunk_size, temperature):
    x, target, shard = batch(2, 2, vocab_size=5)
    target[0, 1] = -100
    options = {'temperature': temperature, 'chunk_size': chunk_size}

    def statistics(logits):
        found = ours(logits, target, shard, **options)
        return tuple(found[name] for name in (*DIFFERENTIABLE, 'cross_entropy'))

    assert torch.autograd.gradcheck(statistics, x)


@pytest.mark.parametrize('name', [*DIFFERENTIABLE, 'cross_entropy'])
def test_each_output_may_be_the_only_one_that_is_differentiated(name):
    x, target, shard = batch(4)
    weights = upstream(1, (4,))
    want = gradient(plain(x, target, 11), x, weights, [name])
    torch.testing.assert_close(gradient(ours(x, target, shard), x, weights, [name]), want, rtol=1e-12, atol=1e-14)


def test_an_output_may_be_used_twice():
    x, target, shard = batch(4)
    grads = []
    for found in (plain(x, target, 11), ours(x, target, shard)):
        loss = (found['log_prob'].exp() * found['entropy'] + found['log_prob'] ** 2).sum()
        grads += torch.autograd.grad(loss, x)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


def test_backward_twice_gives_the_same_bits():
    x, target, shard = batch(4, dtype=torch.bfloat16)
    found, weights = ours(x, target, shard), upstream(1, (4,))
    first, second = (gradient(found, x, weights, DIFFERENTIABLE) for _ in range(2))
    assert torch.equal(first, second)


def test_outputs_may_be_changed_in_place():
    x, target, shard = batch(4)
    weights = upstream(1, (4,))
    found = ours(x, target, shard)
    want = gradient(found, x, weights, DIFFERENTIABLE)
    for name in DIFFERENTIABLE:
        found[name].mul_(weights[name])
    torch.testing.assert_close(gradient(found, x, dict.fromkeys(weights, torch.ones(4)), DIFFERENTIABLE), want)


def test_activation_checkpointing_and_offloading_change_no_bit():
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    _, target, shard = batch(4)
    weight = torch.randn(11, 3, dtype=torch.float64)

    def loss(hidden):
        return cross_entropy(hidden @ weight.T, target, shard=shard, label_smoothing=0.1).sum()

    (want,) = torch.autograd.grad(loss(hidden), hidden)
    (again,) = torch.autograd.grad(checkpoint(loss, hidden, use_reentrant=False), hidden)
    with torch.autograd.graph.save_on_cpu():
        offloaded = loss(hidden)
    assert torch.equal(again, want)
    assert torch.equal(torch.autograd.grad(offloaded, hidden)[0], want)


def test_two_runs_give_the_same_bits():
    for example in examples(7, 30, 1):
        first, second = run_example(example, None), run_example(example, None)
        assert all(torch.equal(bits(first[name]), bits(second[name])) for name in first), example


def test_a_second_derivative_is_refused():
    x, target, shard = batch(4)
    (grad,) = torch.autograd.grad(log_probs(x, target, shard=shard).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivative'):
        grad.sum().backward()


def test_nothing_is_recorded_without_gradients():
    x, target, shard = batch(4)
    with torch.no_grad():
        assert not log_probs(x, target, shard=shard).requires_grad
    with torch.inference_mode():
        inside = token_stats(x, target, shard=shard, **FLAGS)
    assert torch.equal(inside.log_prob, log_probs(x.detach(), target, shard=shard))
    assert not log_probs(x.detach(), target, shard=shard).requires_grad
    assert not argmax(x, shard=shard).requires_grad


def test_what_was_not_asked_for_is_none():
    x, target, shard = batch(4)
    stats = token_stats(x, target, shard=shard)
    assert (stats.entropy, stats.mean_logit, stats.argmax) == (None, None, None)
    only = token_stats(x, shard=shard, argmax=True)
    assert (only.log_prob, only.log_normalizer, only.entropy, only.mean_logit) == (None,) * 4
    assert torch.equal(only.argmax, x.argmax(-1))


def test_statistics_need_no_target():
    x, target, shard = batch(2, 3)
    stats, want = token_stats(x, shard=shard, **FLAGS, temperature=0.5), plain(x, target, 11, 0.5)
    assert stats.log_prob is None
    for name in ('log_normalizer', 'entropy', 'mean_logit', 'argmax'):
        torch.testing.assert_close(getattr(stats, name), want[name], rtol=1e-12, atol=1e-12)
    weights = upstream(1, (2, 3))
    names = ('log_normalizer', 'entropy', 'mean_logit')
    found = {name: getattr(stats, name) for name in names}
    torch.testing.assert_close(gradient(found, x, weights, names), gradient(want, x, weights, names))


def test_the_short_forms_are_the_statistics():
    x, target, shard = batch(2, 3)
    stats = token_stats(x, target, shard=shard, entropy=True, temperature=0.5)
    assert torch.equal(log_probs(x, target, shard=shard, temperature=0.5), stats.log_prob)
    both = log_probs_and_entropy(x, target, shard=shard, temperature=0.5)
    assert torch.equal(both[0], stats.log_prob)
    assert torch.equal(both[1], stats.entropy)
    assert torch.equal(cross_entropy(x, target, shard=shard, temperature=0.5), -stats.log_prob)


@pytest.mark.parametrize('lead', [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_no_tokens_still_have_a_gradient_path(lead, dtype):
    x, target, shard = batch(*lead, dtype=dtype)
    found = ours(x, target, shard)
    assert all(out.shape == lead for out in found.values())
    assert found['argmax'].dtype == torch.int64
    sum(found[name].sum() for name in (*DIFFERENTIABLE, 'cross_entropy')).backward()
    assert x.grad is not None
    assert x.grad.shape == (*lead, 11)
    assert x.grad.dtype == dtype


def test_all_ignored_is_zero_with_a_gradient_path():
    x, target, shard = batch(3)
    loss = cross_entropy(x, torch.full_like(target, -100), shard=shard, label_smoothing=0.1, z_loss=0.1).sum()
    loss.backward()
    assert loss == 0
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize('ignore_index', [-1, 0, 5, 1 << 40])
def test_any_id_may_be_the_ignored_one(ignore_index):
    x, target, shard = batch(6)
    target[::2] = ignore_index
    target[1::2] = torch.tensor([1, 2, 3])
    found = cross_entropy(x, target, shard=shard, ignore_index=ignore_index)
    want = torch.nn.functional.cross_entropy(x, target, ignore_index=ignore_index, reduction='none')
    torch.testing.assert_close(found, want)
    weight = torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, weight)[0] for y in (found, want)))


@pytest.mark.parametrize('dtype', [torch.int64, torch.int32, torch.int16, torch.int8])
def test_labels_of_any_integer_type(dtype):
    x, target, shard = batch(4)
    target[1] = -100
    assert torch.equal(log_probs(x, target.to(dtype), shard=shard), log_probs(x, target, shard=shard))


@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_a_bad_logit_of_a_trained_token_shows(bad):
    x, target, shard = batch(3)
    x = x.detach().index_put((torch.tensor(1), torch.tensor(4)), torch.tensor(bad, dtype=x.dtype)).requires_grad_()
    found = ours(x, target, shard)
    for name in ('log_prob', 'entropy', 'cross_entropy'):
        assert found[name].isnan().tolist() == [False, True, False], name
        (grad,) = torch.autograd.grad(found[name].sum(), x, retain_graph=True)
        assert grad[1].isnan().any()
        assert grad[[0, 2]].isfinite().all()
    assert found['argmax'][1] == 4


def test_a_zero_upstream_gradient_shuts_out_a_bad_row():
    x, target, shard = batch(3)
    x = x.detach()
    x[1] = math.nan
    x.requires_grad_()
    weight = torch.tensor([1.0, 0.0, 2.0], dtype=x.dtype)
    for name, out in ours(x, target, shard).items():
        if name not in ('argmax', 'cross_entropy'):
            (grad,) = torch.autograd.grad(out, x, weight, retain_graph=True)
            assert torch.equal(grad[1], torch.zeros(11, dtype=x.dtype)), name


def test_huge_logits_neither_overflow_nor_lose_the_target():
    for dtype, big in ((torch.float32, 1e38), (torch.float64, 1e300), (torch.bfloat16, 1e38)):
        x = torch.tensor([[big, -big, 0.0], [-big, -big, -big]], dtype=dtype, requires_grad=True)
        found = log_probs(x, torch.tensor([0, 2]), shard=VocabShard.from_group(3))
        torch.testing.assert_close(found.double(), torch.tensor([0.0, -math.log(3)], dtype=torch.float64))
        (grad,) = torch.autograd.grad(found.sum(), x)
        want = torch.tensor([[0, 0, 0], [-1 / 3, -1 / 3, 2 / 3]], dtype=dtype)
        torch.testing.assert_close(grad, want)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize('layout', ['contiguous', 'transposed', 'sliced', 'stepped', 'columns first'])
def test_reused_storage_changes_no_gradient_and_touches_nothing_else(dtype, layout):
    x, target, _ = batch(3, 4, vocab_size=9, dtype=dtype)
    target[1] = -100
    shard = VocabShard.from_group(9, vocab_size=7)
    target %= 7
    weights = upstream(3, (3, 4))
    grads = []
    for reuse in (False, True):
        logits = lay_out(x.detach(), layout).requires_grad_()
        memory = torch.empty(0, dtype=dtype).set_(logits.untyped_storage())
        inside = torch.zeros(memory.shape, dtype=torch.bool)
        inside.as_strided(logits.shape, logits.stride(), logits.storage_offset()).fill_(True)
        found, before = token_stats_of(logits, target, shard, reuse), bits(memory).clone()
        grads.append(gradient(found, logits, weights, DIFFERENTIABLE).clone())
        assert torch.equal(bits(memory)[~inside], before[~inside])
        assert torch.equal(bits(memory)[inside], before[inside]) is not reuse
    assert torch.equal(*grads)


def token_stats_of(logits, target, shard, reuse):
    stats = token_stats(logits, target, shard=shard, temperature=0.7, reuse_storage=reuse, **FLAGS)
    return {name: getattr(stats, name) for name in DIFFERENTIABLE}


def test_a_second_backward_after_reuse_says_what_happened():
    x, target, shard = batch(3)
    found = log_probs(x * 1, target, shard=shard, reuse_storage=True)
    found.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='reuse_storage=False'):
        found.sum().backward()


def test_another_user_of_reused_logits_fails_instead_of_reading_the_gradient():
    x, target, shard = batch(3)
    logits = x * 1
    other = (logits**2).sum()
    log_probs(logits, target, shard=shard, reuse_storage=True).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        other.backward()


def test_storage_is_reused_for_a_non_leaf_and_reaches_what_made_it():
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    _, target, shard = batch(5)
    grads = [
        torch.autograd.grad(
            log_probs(hidden @ weight.T, target, shard=shard, reuse_storage=reuse).sum(), [hidden, weight]
        )
        for reuse in (False, True)
    ]
    assert all(torch.equal(*pair) for pair in zip(*grads))


def test_the_logits_are_let_go_after_backward_while_the_outputs_live():
    x, target, shard = batch(3)
    logits = x * 1
    alive = weakref.ref(logits)
    kept = log_probs(logits, target, shard=shard)
    del logits
    kept.sum().backward()
    gc.collect()
    assert kept.requires_grad
    assert alive() is None


@pytest.mark.parametrize('layout', ['contiguous', 'sliced'])
@pytest.mark.parametrize('chunk_size', [None, 9000])
@pytest.mark.parametrize('reuse', [False, True])
def test_only_the_gradient_is_as_large_as_the_logits(layout, chunk_size, reuse):
    rows, vocab_size = 24, 1 << 17
    leaf = lay_out(torch.zeros(2, rows // 2, vocab_size, dtype=torch.bfloat16), layout).requires_grad_()
    target, shard = torch.zeros(2, rows // 2, dtype=torch.long), VocabShard.from_group(vocab_size)
    with NewTensors() as new:
        sweep_and_back(leaf, target, shard, chunk_size=chunk_size, reuse_storage=reuse)
    float32_tile = 4 << 20
    large = [size for size in new.sizes if size > float32_tile]
    assert large in ([], [2 * rows * vocab_size])  # none where the gradient's memory comes from elsewhere
    assert not (large and reuse)


@needs_peak
@pytest.mark.parametrize('reuse', [False, True])
def test_peak_memory_is_the_gradient_and_a_few_tiles(reuse):
    rows, vocab_size = 256, 1 << 17

    def on_rank():
        leaf = torch.zeros(rows, vocab_size, dtype=torch.bfloat16).fill_(1).requires_grad_()
        target, shard = torch.zeros(rows, dtype=torch.long), VocabShard.from_group(vocab_size)
        return peak_memory(lambda: sweep_and_back(leaf, target, shard, reuse_storage=reuse))

    gradient_bytes, tiles = 2 * rows * vocab_size, 6 << 20
    (peak,) = run_ranks(on_rank, 1)
    assert peak <= (0 if reuse else gradient_bytes) + tiles


def sweep_and_back(logits, target, shard, **options):
    stats = token_stats(logits, target, shard=shard, **FLAGS, **options)
    outs = [getattr(stats, name) for name in DIFFERENTIABLE]
    return torch.autograd.grad(outs, logits, [torch.ones_like(out) for out in outs])


@pytest.mark.parametrize('columns', [[1.0, 1.0000001, 0.0], [1e38, 2e38, 3e38], [-3e38, -2e38, -2.5e38]])
@pytest.mark.parametrize('temperature', [0.1, 0.7, 1.0, 3.0])
def test_argmax_does_not_depend_on_the_temperature(columns, temperature):
    """Scaling rounds neighbours together, and large ones to inf: the largest logit stays the largest."""
    logits = torch.tensor([columns])
    for chunk_size in (1, None):
        best = token_stats(
            logits, shard=VocabShard(0, 3, 3), argmax=True, entropy=True, temperature=temperature, chunk_size=chunk_size
        ).argmax
        assert best.tolist() == [int(logits.argmax())]
