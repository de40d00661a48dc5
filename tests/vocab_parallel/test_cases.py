"""Faults met in the field, each reduced to its smallest input: values and gradients of the operation."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from tests.vocab_parallel.probes import NewTensors
from tests.vocab_parallel.reference import DIFFERENTIABLE, gradient, ours, plain, upstream
from twinkle_megatron.vocab_parallel import (
    LinearHead,
    VocabShard,
    cross_entropy,
    log_probs,
    log_probs_and_entropy,
    token_stats,
)

F64 = torch.float64


def tensor(values, dtype=F64):
    return torch.tensor(values, dtype=dtype)


def close(got, want, digits=6):
    """Equal to the printed digits of a value that was computed in float64."""
    torch.testing.assert_close(got.double(), tensor(want), rtol=0, atol=0.6 * 10**-digits)


def on_two_ranks(logits, target, function, vocab_size=None):
    """`function(local logits, target, shard)` on both ranks: the values of each, the joined gradient of their weighted
    sum, and the weights. The same as a linear head, whose hidden states are the logits, has to agree."""
    whole, labels = tensor(logits), torch.tensor(target)
    weight = torch.randn(labels.shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    true = whole.shape[-1] if vocab_size is None else vocab_size

    def on_rank():
        width = whole.shape[-1] // 2
        shard = VocabShard.from_group(width, dist.group.WORLD, vocab_size)
        x = whole[..., shard.start : shard.stop].clone().requires_grad_()
        hidden = whole[..., :true].clone().requires_grad_()
        identity = torch.eye(whole.shape[-1], true, dtype=F64)
        identity[true:] = math.nan
        found = []
        for leaf, given in ((x, x), (hidden, LinearHead(hidden, identity[shard.start : shard.stop]))):
            value = function(given, labels, shard)
            found += [value, *torch.autograd.grad((value * weight).sum(), leaf)]
        return found

    ranks = run_ranks(on_rank, 2)
    grad = torch.cat([grad for _, grad, *_ in ranks], -1)
    for value, _, *of_head in ranks:
        torch.testing.assert_close(of_head, [value, grad[..., :true]], rtol=1e-12, atol=1e-13)
    return [value for value, *_ in ranks], grad, weight


def plain_grad(logits, function, weight):
    x = tensor(logits).requires_grad_()
    return torch.autograd.grad((function(x) * weight).sum(), x)[0]


def test_case_01_label_smoothing_over_the_global_vocabulary():
    row, label = [float(i) for i in range(8)], 2
    values, grad, weight = on_two_ranks(row, label, lambda x, y, s: cross_entropy(x, y, shard=s, label_smoothing=0.1))
    for value in values:
        close(value, 5.308340)
    torch_loss = lambda x: torch.nn.functional.cross_entropy(x, torch.tensor(label), label_smoothing=0.1)  # noqa: E731
    torch.testing.assert_close(grad, plain_grad(row, torch_loss, weight))


def test_case_03_gathered_logits_are_no_shard():
    row = tensor([2.0, 0.0, 1.0, -1.0])

    def on_rank():
        with pytest.raises(ValueError, match='gathered logits'):
            VocabShard.from_group(4, dist.group.WORLD, vocab_size=4)
        with pytest.raises(ValueError, match='gather_output=True'):
            log_probs(row, torch.tensor(3), shard=VocabShard.from_group(2, dist.group.WORLD))
        x = row.clone().requires_grad_()
        loss = cross_entropy(x, torch.tensor(3), shard=VocabShard.from_group(4))
        return loss, torch.autograd.grad(loss, x)[0]

    for loss, grad in run_ranks(on_rank, 2):
        close(loss, 3.440190)
        torch.testing.assert_close(grad, row.softmax(0) - tensor([0.0, 0, 0, 1]))


def test_case_04_shards_without_the_target_keep_their_gradient():
    values, grad, weight = on_two_ranks([1.0, 2.0, 0.0, -1.0], 0, lambda x, y, s: cross_entropy(x, y, shard=s))
    for value in values:
        close(value, 1.440190)
    close(grad / weight, [-0.763117, 0.643914, 0.087144, 0.032059])


@pytest.mark.parametrize('label', [8, -1])
def test_case_06_a_label_out_of_range_is_an_error_on_every_rank(label):
    def on_rank():
        shard = VocabShard.from_group(4, dist.group.WORLD)
        x = torch.randn(1, 4, requires_grad=True)
        with pytest.raises(ValueError, match=rf'ids in \[0, 8\).* got \[{label}\]'):
            cross_entropy(x, torch.tensor([label]), shard=shard)
        return 'raised'

    assert run_ranks(on_rank, 2, timeout=20) == ['raised', 'raised']


def test_case_07_ignored_tokens_are_no_part_of_a_mean():
    rows = [[0.0, 1, 2, 3], [5.0] * 4, [9.0, 0, 0, 0], [1.0] * 4]
    labels = [1, -100, -100, 3]
    kept = torch.tensor(labels) != -100
    values, grad, weight = on_two_ranks(rows, labels, lambda x, y, s: cross_entropy(x, y, shard=s))
    for value in values:
        close(value.sum() / kept.sum(), 1.913242)
        assert torch.equal(value[~kept], torch.zeros(2, dtype=F64))
    assert torch.equal(grad[~kept], torch.zeros(2, 4, dtype=F64))
    reference = lambda x: torch.nn.functional.cross_entropy(x, torch.tensor(labels), reduction='none')  # noqa: E731
    torch.testing.assert_close(grad, plain_grad(rows, reference, weight))


def test_case_09_a_label_of_another_shard_meets_no_column_of_the_last_block():
    rows = torch.randn(10, 10, dtype=F64, generator=torch.Generator().manual_seed(9)).tolist()
    values, grad, weight = on_two_ranks(
        rows, list(range(10)), lambda x, y, s: cross_entropy(x, y, shard=s, chunk_size=4)
    )
    reference = lambda x: -x.log_softmax(-1).diagonal()  # noqa: E731
    for value in values:
        assert value.isfinite().all()
        torch.testing.assert_close(value, reference(tensor(rows)))
    torch.testing.assert_close(grad, plain_grad(rows, reference, weight))


@pytest.mark.parametrize('pad', [0.0, 10.0, math.nan, math.inf])
def test_case_12_padded_vocabulary_takes_no_probability(pad):
    row = [1.0, 2.0, 0.0, 1.0, 3.0]
    values, grad, weight = on_two_ranks([*row, pad], 4, lambda x, y, s: cross_entropy(x, y, shard=s), vocab_size=5)
    for value in values:
        close(value, 0.523744)
    torch.testing.assert_close(grad[:5], plain_grad(row, lambda x: -x.log_softmax(-1)[4], weight))
    assert grad[5] == 0


def test_case_14_log_prob_and_entropy_of_views_of_one_tensor():
    whole = torch.randn(2, 6, 8, dtype=F64, generator=torch.Generator().manual_seed(14))
    labels = torch.randint(8, (2, 5), generator=torch.Generator().manual_seed(15))

    def on_rank():
        shard = VocabShard.from_group(4, dist.group.WORLD)
        x = whole[..., shard.start : shard.stop].clone().requires_grad_()
        log_prob = log_probs(x[:, :-1], labels, shard=shard, temperature=0.5)
        entropy = token_stats(x[:, 1:], shard=shard, entropy=True).entropy
        (log_prob.sum() + 0.3 * (entropy**2).sum()).backward()
        return x.grad

    x = whole.clone().requires_grad_()
    log_prob = (x[:, :-1] / 0.5).log_softmax(-1).gather(-1, labels[..., None])
    p = x[:, 1:].softmax(-1)
    (log_prob.sum() + 0.3 * ((p * p.log()).sum(-1) ** 2).sum()).backward()
    torch.testing.assert_close(torch.cat(run_ranks(on_rank, 2), -1), x.grad)


def test_case_15_chunks_of_packed_rows_change_nothing():
    x = torch.randn(6, 7, dtype=F64, generator=torch.Generator().manual_seed(15)).requires_grad_()
    labels, shard, weights = torch.tensor([0, 6, 3, -100, 4, 2]), VocabShard.from_group(7), upstream(15, (6,))
    want = plain(x, labels, 7)
    for chunk_size in (2, 4, 7):
        found = ours(x, labels, shard, chunk_size=chunk_size)
        for name in (*DIFFERENTIABLE, 'cross_entropy'):
            assert found[name].shape == (6,)
            torch.testing.assert_close(found[name], want[name])
        torch.testing.assert_close(*(gradient(y, x, weights, DIFFERENTIABLE) for y in (found, want)))


def test_case_17_entropy_is_at_the_temperature_and_the_logits_stay():
    whole = [2.0, 0.0]
    original = tensor(whole)

    def twice(x, y, shard):
        first = log_probs_and_entropy(x, y, shard=shard, temperature=0.5)
        second = log_probs_and_entropy(x, y, shard=shard, temperature=0.5)
        assert all(torch.equal(a, b) for a, b in zip(first, second))
        assert torch.equal(x.detach(), original[shard.start : shard.stop])
        return torch.stack(second)

    def on_rank():
        shard = VocabShard.from_group(1, dist.group.WORLD)
        x = original[shard.start : shard.stop].clone().requires_grad_()
        found = twice(x, torch.tensor(0), shard)
        return found, torch.autograd.grad((found * tensor([1.0, 2.0])).sum(), x)[0]

    ranks = run_ranks(on_rank, 2)
    x = original.clone().requires_grad_()
    log_p = (x / 0.5).log_softmax(-1)
    (grad,) = torch.autograd.grad(log_p[0] - 2 * (log_p.exp() * log_p).sum(), x)
    for found, _ in ranks:
        close(found, [-0.018150, 0.090095])
    torch.testing.assert_close(torch.cat([grad for _, grad in ranks]), grad)


def test_case_18_the_ratio_to_the_rollout_is_one_at_step_zero():
    def ratio(x, y, shard):
        return (log_probs(x, y, shard=shard, temperature=0.5) + 0.018150).exp()

    values, grad, weight = on_two_ranks([2.0, 0.0], 0, ratio)
    for value in values:
        close(value, 1.0, digits=5)
    torch.testing.assert_close(
        grad, plain_grad([2.0, 0.0], lambda x: ((x / 0.5).log_softmax(-1)[0] + 0.018150).exp(), weight)
    )


def test_case_20_bf16_logits_are_summed_in_float32():
    row = tensor([36.25, 0.3125, 35.5, 0, 0, 0, 0, 0], torch.bfloat16).requires_grad_()
    loss = cross_entropy(row, torch.tensor(1), shard=VocabShard.from_group(8))
    assert loss.dtype == torch.float32
    close(loss, 36.324371, digits=5)
    (grad,) = torch.autograd.grad(loss, row)
    want = row.detach().double().softmax(-1)
    want[1] -= 1
    assert torch.equal(grad, want.bfloat16())


def test_case_22_nan_at_a_masked_position_stays_out():
    x = tensor([[0.0, math.log(math.e - 1)], [math.nan, math.nan]]).requires_grad_()
    labels, mask = torch.tensor([0, -100]), tensor([1.0, 0.0])
    losses = cross_entropy(x, labels, shard=VocabShard.from_group(2), label_smoothing=0.0, z_loss=0.0)
    loss = (losses * mask).sum() / mask.sum()
    close(loss, 1.0)
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad[0], x[0].detach().softmax(-1) - tensor([1.0, 0.0]))
    assert torch.equal(grad[1], tensor([0.0, 0.0]))


def test_case_25_memory_follows_the_chunk_and_the_values_do_not():
    vocab_size, rows = 1 << 20, 4
    x = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(25)).bfloat16().requires_grad_()
    labels, shard = torch.tensor([0, vocab_size - 1, 5000, 77_777]), VocabShard.from_group(vocab_size)
    names, weights = ('log_prob', 'entropy'), {n: w.float() for n, w in upstream(25, (rows,)).items()}
    found, grads, peaks = {}, {}, {}
    for chunk_size in (1 << 21, 300_007, 1 << 14):
        with NewTensors() as new:
            stats = token_stats(x, labels, shard=shard, entropy=True, chunk_size=chunk_size)
            found[chunk_size] = {name: getattr(stats, name) for name in names}
            grads[chunk_size] = gradient(found[chunk_size], x, weights, names)
        peaks[chunk_size] = max(size for size in new.sizes if size != 2 * x.numel())  # the gradient aside
        for name in names:
            torch.testing.assert_close(found[chunk_size][name], found[1 << 21][name])
        torch.testing.assert_close(grads[chunk_size], grads[1 << 21])
    assert all(peak <= 4 * rows * min(chunk_size, vocab_size) for chunk_size, peak in peaks.items())  # float32 tiles
    assert peaks[1 << 21] > peaks[300_007] > peaks[1 << 14]


@pytest.mark.parametrize('chunk_size', [1, 3, 8, 100])
def test_case_25_chunks_of_one_of_no_divisor_and_of_more_than_all_agree(chunk_size):
    rows = torch.randn(5, 16, dtype=F64, generator=torch.Generator().manual_seed(25)).tolist()
    labels = [0, 7, 8, 15, -100]
    values, grad, weight = on_two_ranks(
        rows,
        labels,
        lambda x, y, s: cross_entropy(x, y, shard=s, label_smoothing=0.1, z_loss=1e-3, chunk_size=chunk_size),
    )
    reference = lambda x: plain(x, torch.tensor(labels), 16)['cross_entropy']  # noqa: E731
    for value in values:
        torch.testing.assert_close(value, reference(tensor(rows)))
    torch.testing.assert_close(grad, plain_grad(rows, reference, weight))


def test_case_35_all_labels_ignored_give_zero_and_zero_gradients():
    rows, labels = [[0.0, 1, 2, 3], [math.nan, 1, 2, 3]], [-100, -100]
    values, grad, _ = on_two_ranks(
        rows, labels, lambda x, y, s: cross_entropy(x, y, shard=s, label_smoothing=0.1, z_loss=0.1)
    )
    for value in values:
        assert torch.equal(value, tensor([0.0, 0.0]))
    assert torch.equal(grad, torch.zeros(2, 4, dtype=F64))


@pytest.mark.parametrize('requires_grad', [True, False])
def test_case_45_inputs_are_unchanged_and_gradcheck_holds_twice(requires_grad):
    whole = torch.randn(2, 3, 8, dtype=F64, generator=torch.Generator().manual_seed(45))
    labels = torch.tensor([[0, 7, -100], [3, 4, 2]])

    def on_rank():
        shard = VocabShard.from_group(4, dist.group.WORLD)
        x = whole[..., shard.start : shard.stop].clone().requires_grad_(requires_grad)
        version, before, labels_before = x._version, x.detach().clone(), labels.clone()
        grads = []
        for _ in range(2):
            found = ours(x, labels, shard, temperature=0.5)
            if requires_grad:
                grads.append(gradient(found, x, upstream(45, (2, 3)), DIFFERENTIABLE))
        assert x._version == version
        assert torch.equal(x.detach(), before)
        assert torch.equal(labels, labels_before)
        return grads

    ranks = run_ranks(on_rank, 2)
    if requires_grad:
        x = whole.clone().requires_grad_()
        want = gradient(plain(x, labels, 8, 0.5), x, upstream(45, (2, 3)), DIFFERENTIABLE)
        for i in range(2):
            torch.testing.assert_close(torch.cat([grads[i] for grads in ranks], -1), want)

        def all_of_them(y):
            found = ours(y, labels, VocabShard.from_group(8), temperature=0.5)
            return tuple(found[name] for name in DIFFERENTIABLE)

        assert torch.autograd.gradcheck(all_of_them, x)
        assert torch.autograd.gradcheck(all_of_them, x)
