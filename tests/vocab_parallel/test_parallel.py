"""The statistic operation over forked ranks: the same numbers as one process, bitwise alike, with one collective."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from tests.vocab_parallel.probes import counted
from tests.vocab_parallel.reference import (
    DIFFERENTIABLE,
    GROUPS,
    Example,
    assert_example,
    bits,
    examples,
    gradient,
    ours,
    plain,
    run_example,
    upstream,
)
from twinkle_megatron.vocab_parallel import VocabShard, cross_entropy, log_probs, token_stats

FLAGS = {'entropy': True, 'mean_logit': True, 'argmax': True}


def assert_random_examples(seed, count, tp, timeout=60):
    drawn = examples(seed, count, tp)
    ranks = run_ranks(lambda: [run_example(e, dist.group.WORLD) for e in drawn], tp, timeout=timeout)
    for i, example in enumerate(drawn):
        assert_example(example, [found[i] for found in ranks])


@pytest.mark.parametrize(('tp', 'count'), [(2, 80), (3, 50), (4, 30)])
def test_values_and_gradients_equal_the_definitions(tp, count):
    assert_random_examples(100 + tp, count, tp)


@pytest.mark.long
@pytest.mark.parametrize('tp', [2, 3, 4])
@pytest.mark.parametrize('seed', range(5))
def test_values_and_gradients_equal_the_definitions_on_a_long_list(tp, seed):
    assert_random_examples(1000 + seed, 300, tp, timeout=400)


@pytest.mark.long
def test_compiled_kernels_equal_the_definitions(monkeypatch):
    monkeypatch.setenv('TWINKLE_MEGATRON_KERNELS', 'compiled')
    assert_random_examples(11, 60, 2, timeout=500)


@pytest.mark.parametrize('widths', [(6, 6), (1, 11), (0, 12), (12, 0), (5, 0, 7), (3, 3, 3, 3)])
def test_gradients_equal_one_process_to_the_last_digits(widths):
    example = Example(
        seed=1, lead=(3, 4), vocab_size=11, widths=widths, dtype=torch.float64, temperature=0.7, scale=2.0, offset=0.0,
        layouts=('contiguous',) * len(widths), ignored=0.2, ignored_holds=math.nan, masked='', padding=math.nan,
        label_dtype=torch.int64, chunk_size=2,
    )  # fmt: skip
    ranks = run_ranks(lambda: run_example(example, dist.group.WORLD), len(widths))
    whole, target = example.tensors()
    x = whole.requires_grad_()
    found = plain(x, target, 11, 0.7)
    for i, names in enumerate(GROUPS):
        want = gradient(found, x, upstream(1, (3, 4)), names)
        got = torch.cat([rank[f'grad {i}'] for rank in ranks], -1)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize('chunk_size', [None, 1, 3])
def test_one_collective_forward_and_none_backward(chunk_size):
    def on_rank():
        shard = VocabShard.from_group(8, dist.group.WORLD, 15)
        x, target = torch.randn(2, 5, 8, requires_grad=True), torch.randint(15, (2, 5), generator=torch.manual_seed(0))
        with counted() as forward:
            stats = token_stats(x, target, shard=shard, chunk_size=chunk_size, **FLAGS)
        with counted() as backward:
            sum(getattr(stats, name).sum() for name in DIFFERENTIABLE).backward()
        with counted() as short:
            cross_entropy(
                x, target, shard=shard, label_smoothing=0.1, z_loss=0.1, chunk_size=chunk_size
            ).sum().backward()
        return dict(forward), dict(backward), sum(short.values())

    for forward, backward, short in run_ranks(on_rank, 2):
        assert sum(forward.values()) == 1
        assert next(iter(forward)).startswith('all_gather')
        assert backward == {}
        assert short == 1


def test_ranks_whose_logits_lie_differently_in_memory_agree():
    x = torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.randint(8, (3, 2), generator=torch.Generator().manual_seed(1))

    def on_rank():
        shard = VocabShard.from_group((8, 0)[dist.get_rank()], dist.group.WORLD)
        # contiguous() leaves an empty transposed tensor as it lies
        local = x.transpose(0, 1)[..., shard.start : shard.stop].contiguous().transpose(0, 1)
        other = x[..., 4 * dist.get_rank() :][..., :4]
        other = other.contiguous() if dist.get_rank() else other.transpose(0, 1).contiguous().transpose(0, 1)
        return log_probs(local, target, shard=shard), log_probs(
            other, target, shard=VocabShard.from_group(4, dist.group.WORLD)
        )

    want = plain(x, target, 8)['log_prob']
    for found in run_ranks(on_rank, 2):
        for log_prob in found:
            torch.testing.assert_close(log_prob, want)


def test_a_shard_of_minus_infinity_is_finite_everywhere_else():
    def on_rank():
        x = torch.full((2, 4), -math.inf) if dist.get_rank() == 0 else torch.tensor([[0.0, 1, 2, 3], [3, 2, 1, 0]])
        x.requires_grad_()
        found = ours(x, torch.tensor([4, 7]), VocabShard.from_group(4, dist.group.WORLD))
        grad = gradient(found, x, upstream(0, (2,)), ('log_prob', 'log_normalizer', 'entropy'))
        return found['log_prob'], found['entropy'], grad

    row = torch.tensor([0.0, 1, 2, 3]).softmax(0)
    for log_prob, entropy, grad in run_ranks(on_rank, 2):
        torch.testing.assert_close(log_prob, row.log()[[0, 0]])
        torch.testing.assert_close(entropy, -(row * row.log()).sum().expand(2))
        assert grad.isfinite().all()


def test_a_bad_logit_shows_on_every_rank():
    def on_rank():
        x = torch.zeros(2, 4)
        if dist.get_rank() == 1:
            x[0, 2] = math.nan
        found = ours(x.requires_grad_(), torch.tensor([1, 1]), VocabShard.from_group(4, dist.group.WORLD))
        (grad,) = torch.autograd.grad(found['log_prob'].sum(), x)
        return found['log_prob'], found['argmax'], grad

    for log_prob, best, grad in run_ranks(on_rank, 2):
        assert log_prob.isnan().tolist() == [True, False]
        assert best.tolist() == [6, 0]
        assert grad.isnan().any(-1).tolist() == [True, False]


WRONG_LABELS = {
    'past the end': ([1, 8], [1, 8], r'\[0, 8\) or ignore_index -100.*got \[8\] at \[\(1,\)\]'),
    'negative': ([1, -1], [1, -1], r'got \[-1\] at \[\(1,\)\]'),
    'far outside': ([1, 1 << 40], [1, 1 << 40], 'got .1099511627776.'),
    'outside on one rank': ([1, 8], [1, 1], 'same on every rank'),
    'both in one shard': ([1, 2], [1, 3], 'got .* another rank was given another label'),
    'each claims its own': ([1, 2], [1, 6], 'another rank was given another label'),
    'nobody claims': ([1, 6], [1, 2], 'another rank was given another label'),
    'ignored on one rank': ([1, -100], [1, 2], 'another rank was given another label'),
    'ignored where it is held': ([1, 2], [1, -100], 'another rank was given another label'),
}


def test_wrong_labels_are_an_error_on_every_rank_and_the_group_goes_on():
    def on_rank():
        shard, found = VocabShard.from_group(4, dist.group.WORLD), {}
        x = torch.randn(2, 4, requires_grad=True)
        for name, (*targets, _) in WRONG_LABELS.items():
            with pytest.raises(ValueError) as error:  # noqa: PT011
                log_probs(x, torch.tensor(targets[dist.get_rank()]), shard=shard)
            found[name] = str(error.value)
        log_probs(x, torch.tensor([1, -100]), shard=shard).sum().backward()
        return found

    for found in run_ranks(on_rank, 2):
        for name, (*_, pattern) in WRONG_LABELS.items():
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(found[name])


def test_labels_of_a_large_vocabulary_are_told_apart():
    vocab_size = 1 << 24

    def on_rank():
        half = vocab_size // 2
        shard = VocabShard.from_group(half, dist.group.WORLD)
        x = torch.zeros(2, half, dtype=torch.bfloat16)
        ids = torch.tensor([vocab_size - 1, vocab_size - 2])
        with pytest.raises(ValueError, match='another label'):
            log_probs(x, ids + torch.tensor([0, dist.get_rank()]), shard=shard)
        return log_probs(x, ids, shard=shard)

    for found in run_ranks(on_rank, 2):
        torch.testing.assert_close(found, torch.full((2,), -math.log(vocab_size)))


def test_no_tokens_need_no_collective():
    def on_rank():
        x = torch.zeros(0, 4, requires_grad=True)
        with counted() as calls:
            found = log_probs(x, torch.zeros(0, dtype=torch.long), shard=VocabShard(*_half(), 8, dist.group.WORLD))
            found.sum().backward()
        return sum(calls.values()), x.grad.shape

    def _half():
        return 4 * dist.get_rank(), 4 * dist.get_rank() + 4

    assert run_ranks(on_rank, 2) == [(0, (0, 4))] * 2


def test_a_group_of_some_ranks_works_beside_another():
    whole = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.randint(8, (2, 3), generator=torch.Generator().manual_seed(1))

    def on_rank():
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = dist.get_rank() % 2
        shard = VocabShard.from_group(4, groups[mine])
        return log_probs(whole[mine, :, shard.start : shard.stop], target[mine], shard=shard)

    found = run_ranks(on_rank, 4)
    for rank in range(4):
        torch.testing.assert_close(found[rank], plain(whole[rank % 2], target[rank % 2], 8)['log_prob'])
        assert torch.equal(bits(found[rank]), bits(found[rank % 2]))
