"""`TokenStats.plain_log_prob`: the log-prob at temperature 1 beside statistics at another one, from the same sweep."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ranks import device, run_ranks

from tests.vocab_parallel.probes import counted
from twinkle_megatron.groups import group_rank, group_size
from twinkle_megatron.vocab_parallel import LinearHead, VocabShard, token_stats

F64 = torch.float64
TEMPERATURES = (0.05, 0.8, 1.0, 2.5, 40.0)
VOCAB, PADDED, WIDTH = 21, 24, 5


def data(lead=(3, 7), seed=0, scale=3.0):
    """Hidden states, weight and labels; some labels are ignored, and their hidden states are garbage."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*lead, WIDTH, generator=generator, dtype=F64)
    weight = scale * torch.randn(PADDED, WIDTH, generator=generator, dtype=F64)
    weight[VOCAB:] = 9.0  # padding of the vocabulary
    target = torch.randint(0, VOCAB, lead, generator=generator)
    target[torch.rand(lead, generator=generator) < 0.2] = -100
    return hidden.masked_fill((target == -100)[..., None], torch.nan), weight, target


def plain(logits, target):
    """log softmax at the target, plainly, 0 where ignored."""
    kept = target != -100
    rows = logits[..., :VOCAB].double().masked_fill(~kept[..., None], 0)
    picked = rows.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return torch.where(kept, picked, 0)


def whole_shard(size=PADDED):
    return VocabShard(0, size, VOCAB, None)


@pytest.mark.parametrize('temperature', TEMPERATURES)
@pytest.mark.parametrize('head', ['tensor', 'transposed', 'linear'])
def test_it_is_the_log_prob_at_temperature_1(temperature, head):
    """Whatever the memory layout and the tiles; the other statistics stay at their temperature."""
    hidden, weight, target = data()
    logits = hidden @ weight.T
    given = {
        'tensor': logits,
        'transposed': logits.transpose(0, 1).contiguous().transpose(0, 1),
        'linear': LinearHead(hidden, weight),
    }[head]
    want = plain(logits, target)
    for chunk_size in (1, 5, 24, None):
        stats = token_stats(given, target, shard=whole_shard(), temperature=temperature, entropy=True,
                            plain_log_prob=True, chunk_size=chunk_size)  # fmt: skip
        torch.testing.assert_close(stats.plain_log_prob, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(stats.log_prob, plain(logits / temperature, target), rtol=1e-11, atol=1e-11)
        assert (stats.plain_log_prob[target == -100] == 0).all()


@pytest.mark.long
@pytest.mark.parametrize('temperature', TEMPERATURES)
def test_compiled_kernels_find_the_same(temperature, monkeypatch):
    monkeypatch.setenv('TWINKLE_MEGATRON_KERNELS', 'compiled')
    hidden, weight, target = data((40,))
    logits = hidden @ weight.T
    for given in (logits, LinearHead(hidden, weight)):
        stats = token_stats(given, target, shard=whole_shard(), temperature=temperature, plain_log_prob=True)
        torch.testing.assert_close(stats.plain_log_prob, plain(logits, target), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_are_as_exact_as_the_log_prob_itself(dtype):
    hidden, weight, target = data()
    logits = (hidden @ weight.T).to(dtype)
    stats = token_stats(logits, target, shard=whole_shard(), temperature=0.7, plain_log_prob=True)
    alone = token_stats(logits, target, shard=whole_shard())
    assert stats.plain_log_prob.dtype == torch.float32
    torch.testing.assert_close(stats.plain_log_prob.double(), plain(logits, target), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.plain_log_prob, alone.log_prob, rtol=1e-6, atol=1e-6)


def test_at_temperature_1_it_is_the_log_prob_without_its_history():
    hidden, weight, target = data()
    logits = (hidden @ weight.T).requires_grad_()
    stats = token_stats(logits, target, shard=whole_shard(), plain_log_prob=True)
    assert torch.equal(stats.plain_log_prob, stats.log_prob)
    assert stats.log_prob.requires_grad
    assert not stats.plain_log_prob.requires_grad


@pytest.mark.parametrize('head', ['tensor', 'linear'])
def test_asking_for_it_changes_no_other_value_and_no_gradient(head):
    hidden, weight, target = data()
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(target.shape, generator=generator, dtype=F64) for _ in range(2)]
    found = []
    for asked in (False, True):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = (hidden @ weight.T).requires_grad_()
        stats = token_stats(LinearHead(x, w) if head == 'linear' else logits, target, shard=whole_shard(),
                            temperature=0.7, entropy=True, argmax=True, plain_log_prob=asked)  # fmt: skip
        assert (stats.plain_log_prob is not None) == asked
        if asked:
            assert not stats.plain_log_prob.requires_grad
            assert stats.detach().plain_log_prob is not None
        (stats.log_prob * upstream[0] + stats.entropy * upstream[1]).sum().backward()
        found.append([stats.log_prob, stats.entropy, stats.argmax, x.grad, w.grad, logits.grad])
    for mine, want in zip(*found):
        assert (mine is None) == (want is None)
        assert mine is None or torch.equal(mine, want)


def test_infinite_logits():
    """−∞ takes no probability, at the target it gives −∞; a whole tile or row start of −∞ is no NaN."""
    inf = math.inf
    logits = torch.tensor(
        [[-inf, -inf, -inf, -inf, 1.0, 2.0], [0.0, -inf, 1.0, -inf, -inf, -inf], [5.0, 1.0, -inf, -inf, 2.0, -inf]],
        dtype=F64,
    )
    target, shard = torch.tensor([5, 0, 3]), VocabShard(0, 6, 6, None)
    want = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    for chunk_size in (1, 2, 6):
        stats = token_stats(logits, target, shard=shard, temperature=3.0, plain_log_prob=True, chunk_size=chunk_size)
        torch.testing.assert_close(stats.plain_log_prob, want, rtol=1e-13, atol=0)
    assert stats.plain_log_prob[2] == -inf


@pytest.mark.parametrize('far', [1e3, 1e30, -1e30])
def test_large_logits_do_not_overflow(far):
    logits = torch.tensor([[far, far - 1.0, far + 2.0]], dtype=F64)
    stats = token_stats(logits, torch.tensor([1]), shard=VocabShard(0, 3, 3, None), temperature=0.01,
                        plain_log_prob=True)  # fmt: skip
    want = logits.log_softmax(-1)[:, 1]
    torch.testing.assert_close(stats.plain_log_prob, want, rtol=1e-12, atol=0)


def test_without_labels_or_tokens():
    logits = torch.randn(2, 3, PADDED, dtype=F64)
    assert token_stats(logits, shard=whole_shard(), temperature=0.5, plain_log_prob=True).plain_log_prob is None
    empty = token_stats(logits[:0], torch.zeros(0, 3).long(), shard=whole_shard(), temperature=0.5, plain_log_prob=True)
    assert empty.plain_log_prob.shape == (0, 3)
    assert not empty.plain_log_prob.requires_grad


@pytest.mark.parametrize('bad', [VOCAB, PADDED, -1, 10**6])
def test_a_label_outside_the_vocabulary_is_an_error(bad):
    hidden, weight, target = data()
    target[1, 2] = bad
    with pytest.raises(ValueError, match=str(bad)):
        token_stats(LinearHead(hidden, weight), target, shard=whole_shard(), temperature=0.5, plain_log_prob=True)


# ---- on tensor parallel ranks


def on_ranks(temperature, bad=None):
    """Statistics of built and of unbuilt logits on this rank's shard, and how many collectives each took with and
    without the plain log-prob."""
    hidden, weight, target = data()
    if bad is not None:
        target[0, 0] = bad
    group = dist.group.WORLD
    size = PADDED // group_size(group)
    shard = VocabShard(group_rank(group) * size, (group_rank(group) + 1) * size, VOCAB, group)
    mine = weight[shard.start : shard.stop].to(device())
    hidden, target = hidden.to(device()), target.to(device())
    found, collectives = [], []
    for given in (hidden @ mine.T, LinearHead(hidden, mine)):
        for chunk_size in (None, 2):
            counts = []
            for asked in (False, True):
                with counted() as seen:
                    stats = token_stats(given, target, shard=shard, temperature=temperature, entropy=True,
                                        plain_log_prob=asked, chunk_size=chunk_size)  # fmt: skip
                counts.append(dict(seen))
            found.append(stats.plain_log_prob)
            collectives.append(counts)
    return found, collectives


@pytest.mark.parametrize('temperature', [0.8, 1.0, 2.5])
@pytest.mark.parametrize('tp', [2, 4])
def test_shards_give_the_whole_and_it_costs_no_further_collective(tp, temperature):
    """The last shard ends in padding of the vocabulary."""
    hidden, weight, target = data()
    want = plain(hidden @ weight.T, target)
    results = run_ranks(on_ranks, tp, temperature)
    for found, collectives in results:
        for mine, first in zip(found, results[0][0]):
            torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-12)
            assert torch.equal(mine, first), 'bitwise the same on all ranks'
        for without, asked in collectives:
            assert without == asked
            assert sum(asked.values()) == 1


def test_a_shard_of_padding_alone():
    """The last of eight."""
    results = run_ranks(on_ranks, 8, 0.8)
    hidden, weight, target = data()
    for found, _ in results:
        for mine in found:
            torch.testing.assert_close(mine, plain(hidden @ weight.T, target), rtol=1e-12, atol=1e-12)


def test_case_6_a_bad_label_is_raised_on_every_rank():
    outcomes = run_ranks(on_ranks, 2, 0.8, VOCAB + 1, collect_errors=True)
    assert [o.error for o in outcomes] == ['ValueError', 'ValueError']
    assert all(str(VOCAB + 1) in o.message for o in outcomes)


def infinite_shard():
    """The whole shard of the first rank is −∞."""
    rank = dist.get_rank()
    logits = torch.tensor([[-math.inf] * 3, [1.0, 0.0, 2.0]][rank], dtype=F64)[None]
    shard = VocabShard(3 * rank, 3 * rank + 3, 6, dist.group.WORLD)
    stats = token_stats(logits, torch.tensor([5]), shard=shard, temperature=0.5, plain_log_prob=True)
    return stats.plain_log_prob.item()


def test_a_shard_that_takes_no_probability():
    want = 2.0 - math.log(math.exp(1) + 1 + math.exp(2))
    assert run_ranks(infinite_shard, 2) == [pytest.approx(want, rel=1e-14)] * 2
