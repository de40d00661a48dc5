"""The linear head over forked ranks: the numbers of one process, bitwise alike, with few collectives."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from tests.vocab_parallel.linear_reference import (
    NAMES,
    HeadExample,
    assert_head,
    gradients,
    head_examples,
    poisoned,
    run_head,
    whole_gradients,
)
from tests.vocab_parallel.probes import counted
from tests.vocab_parallel.reference import DIFFERENTIABLE, bits, ours, plain, upstream
from twinkle_megatron.vocab_parallel import (
    LinearHead,
    VocabShard,
    argmax,
    cross_entropy,
    gather,
    log_probs,
    log_probs_and_entropy,
    token_stats,
    topk,
)

F64 = torch.float64


def assert_random_examples(seed, count, tp, timeout=60):
    drawn = head_examples(seed, count, tp)
    ranks = run_ranks(lambda: [run_head(e, dist.group.WORLD) for e in drawn], tp, timeout=timeout)
    for i, example in enumerate(drawn):
        assert_head(example, [found[i] for found in ranks])


@pytest.mark.parametrize(('tp', 'count'), [(2, 60), (3, 40), (4, 25)])
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


def example_of(widths, vocab_size=11, **changes):
    """A head in float64 with everything odd that can be in one, but for what `changes`."""
    (example,) = head_examples(0, 1, len(widths))
    base = replace(
        example.base, seed=1, lead=(6, 2), vocab_size=vocab_size, widths=widths, dtype=F64, temperature=0.7,
        scale=1.0, ignored=0.2, ignored_holds=math.nan, masked='some', padding=math.nan, label_dtype=torch.int64,
        chunk_size=2,
    )  # fmt: skip
    options = {
        'base': base, 'width': 5, 'whole_numbers': False, 'with_bias': True, 'logit_scale': 0.7,
        'sequence_parallel': False, 'transposed': True, 'max_workspace_mb': 5e-4, 'largest_tile_mb': 2e-4,
        'hidden_layout': 'sliced', 'weight_layout': 'columns first', **changes,
    }  # fmt: skip
    return HeadExample(**options)


@pytest.mark.parametrize('sequence_parallel', [False, True])
@pytest.mark.parametrize('widths', [(6, 6), (1, 11), (0, 12), (12, 0), (5, 0, 7)])
def test_gradients_equal_one_process_to_the_last_digits(widths, sequence_parallel):
    example = example_of(widths, sequence_parallel=sequence_parallel)
    ranks = run_ranks(lambda: run_head(example, dist.group.WORLD), len(widths))
    got = whole_gradients(example, ranks)
    hidden, weight, bias = (t.requires_grad_() for t in example.tensors())
    target = example.target()
    kept = (target != -100).T[..., None]
    x = ((torch.where(kept, hidden, 0) @ weight[:11].T + bias[:11]) * 0.7).transpose(0, 1)
    found = plain(x, target, 11, 0.7)
    for i, names in enumerate((DIFFERENTIABLE[:3], ('cross_entropy',))):
        if i == 0:  # the mean of logits of which some are -inf is -inf, but its gradient is 1 / V
            names = DIFFERENTIABLE
        want = gradients(found, [hidden, weight, bias], upstream(1, example.lead), names)
        for name, expected in zip(NAMES, want):
            torch.testing.assert_close(got[f'{name} {i}'], expected, rtol=1e-12, atol=1e-13)


def test_ranks_may_cut_their_tiles_differently():
    example = example_of((5, 0, 7), sequence_parallel=False)
    workspaces = (1e-9, 5e-4, 100)
    assert_head(
        example,
        run_ranks(lambda: run_head(example, dist.group.WORLD, max_workspace_mb=workspaces[dist.get_rank()]), 3),
    )


def collectives(call, tensors):
    """Of the forward and of the backward pass."""
    with counted() as forward:
        out = call()
    with counted() as backward:
        out.sum().backward(inputs=[t for t in tensors if t.requires_grad])
    return dict(forward), dict(backward)


@pytest.mark.parametrize('frozen', [(), ('weight', 'bias'), ('hidden',)])
@pytest.mark.parametrize('sequence_parallel', [False, True])
def test_collectives_do_not_depend_on_the_number_of_tiles(sequence_parallel, frozen):
    def on_rank():
        example = example_of((5, 7), sequence_parallel=sequence_parallel, max_workspace_mb=1e-4)
        tensors, target = example.local(dist.group.WORLD), example.target()
        for name, tensor in zip(NAMES, tensors):
            tensor.requires_grad_(name not in frozen)
        head, shard = example.head(tensors), example.base.shard(dist.group.WORLD)
        ids = target.clamp_min(0)[..., None]
        return [
            collectives(lambda: token_stats(head, target, shard=shard, entropy=True).entropy, tensors),
            collectives(lambda: cross_entropy(head, target, shard=shard, label_smoothing=0.1, z_loss=0.1), tensors),
            collectives(lambda: topk(head, 3, shard=shard)[0], tensors),
            collectives(lambda: gather(head, ids, shard=shard), tensors),
        ]

    gathers, sums = {'all_gather': 1}, {'all_reduce': 1}
    forward = [gathers, gathers, gathers, sums]
    backward = {} if 'hidden' in frozen else sums
    if sequence_parallel:
        forward = [{'all_gather': 2}] * 3 + [{**gathers, **sums}]
        backward = gathers if 'hidden' in frozen else {**gathers, 'reduce_scatter_tensor': 1}
    for found in run_ranks(on_rank, 2):
        assert found == [(each, backward) for each in forward]


def test_argmax_has_one_collective_and_no_tokens_need_none():
    def on_rank():
        shard = VocabShard.from_group(4, dist.group.WORLD)
        hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        with counted() as none:
            found = ours(LinearHead(hidden, weight, sequence_parallel=True), torch.zeros(0).long(), shard)
            found['cross_entropy'].sum().backward()
        with counted() as one:
            argmax(LinearHead(torch.zeros(2, 3), weight), shard=shard)
        return sum(none.values()), sum(one.values()), hidden.grad.shape, weight.grad.abs().sum()

    assert run_ranks(on_rank, 2) == [(0, 1, (0, 3), 0)] * 2


OUTPUTS = (
    'log_prob', 'log_normalizer', 'entropy', 'mean_logit', 'argmax', 'plain_log_prob', 'log probs',
    'log probs and entropy', 'smoothed', 'argmax alone', 'topk', 'topk ids', 'gather',
)  # fmt: skip
LOOKED_UP = ('argmax', 'argmax alone', 'topk', 'topk ids', 'gather')


def every_output(logits, target, ids, k, shard):
    """Of every function of the package, by the names in `OUTPUTS`."""
    asked = dict.fromkeys(OUTPUTS[2:6], True)
    stats = token_stats(logits, target, shard=shard, temperature=0.7, **asked)
    values, best = topk(logits, k, shard=shard)
    found = [
        *(getattr(stats, name) for name in OUTPUTS[:6]),
        log_probs(logits, target, shard=shard, chunk_size=3),
        torch.stack(log_probs_and_entropy(logits, target, shard=shard), -1),
        cross_entropy(logits, target, shard=shard, label_smoothing=0.1, z_loss=1e-3),
        argmax(logits, shard=shard, chunk_size=2),
        values,
        best,
        gather(logits, ids, shard=shard),
    ]
    return dict(zip(OUTPUTS, found))


def head_and_built(example, group):
    """Outputs and gradients with the head and with its logits built on this rank, whose gradient of the hidden states
    is but this rank's part."""
    g = torch.Generator().manual_seed(example.base.seed)
    target = example.target().long()
    ids = torch.randint(example.vocab_size, (*example.lead, 3), generator=g)
    k = int(torch.randint(1, example.vocab_size + 1, (), generator=g))
    shard, tensors = example.base.shard(group), example.local(group)
    whole = example.tensors()[0].requires_grad_()
    found = []
    for logits, wanted in (
        (example.head(tensors), tensors),
        (example.logits(whole, tensors[1], tensors[2] if len(tensors) > 2 else None), [whole, *tensors[1:]]),
    ):
        with poisoned():
            outs = every_output(logits, target, ids, k, shard)
            weights = {
                name: torch.randn(out.shape, generator=g.manual_seed(len(name)), dtype=F64)
                for name, out in outs.items()
                if out.requires_grad
            }
            statistics = [name for name in weights if name not in LOOKED_UP]
            for together in (statistics, ['topk'], ['gather']):
                for name, grad in zip(NAMES, gradients(outs, wanted, weights, together)):
                    outs[f'{name} {together[0]}'] = grad
        found.append({name: out.detach() for name, out in outs.items()})
    return found


@pytest.mark.parametrize('tp', [1, 2, 3])
@pytest.mark.parametrize('dtype', [F64, torch.bfloat16])
def test_every_function_gives_what_it_gives_for_built_logits(tp, dtype):
    """Products of small whole numbers are the same in any order, so what is looked up is the same bit by bit."""
    drawn = []
    for e in head_examples(50 + tp, 10, tp):
        # built logits pass an infinite weight of the padding on to the gradient of the hidden states: 0 · inf
        base = replace(e.base, dtype=dtype, ignored=0.0, scale=1.0, padding=100.0)
        drawn.append(replace(e, base=base, whole_numbers=e.whole_numbers or dtype != F64))
    if tp == 1:
        ranks = [[head_and_built(e, None) for e in drawn]]
    else:
        ranks = run_ranks(lambda: [head_and_built(e, dist.group.WORLD) for e in drawn], tp)
    close = {'rtol': 1e-12, 'atol': 1e-12} if dtype == F64 else {'rtol': 1e-5, 'atol': 1e-4}
    # in half precision every term of a gradient is rounded, in another order
    close_grad = {'rtol': 1e-12, 'atol': 1e-12} if dtype == F64 else {'rtol': 2e-2, 'atol': 0.1}
    for i, example in enumerate(drawn):
        parts = [rank[i] for rank in ranks]
        for got, want in parts:
            for name in OUTPUTS:
                assert got[name].dtype == want[name].dtype
                if name in LOOKED_UP and example.whole_numbers:
                    assert torch.equal(bits(got[name]), bits(want[name])), (name, example)
                assert_near(got[name], want[name], close, name, example)
        for name in [name for name in parts[0][0] if name.split()[0] in NAMES]:
            for rank, (got, want) in enumerate(parts):
                expected = want[name]
                if name.startswith('hidden'):
                    expected = sum(part[name].double() for _, part in parts).to(dtype)
                    if example.sequence_parallel and expected.shape[0]:
                        expected = expected.chunk(tp)[rank]
                assert_near(got[name], expected, close_grad, name, example)


def assert_near(got, want, close, name, example):
    torch.testing.assert_close(got, want, **close, msg=lambda message: f'{name}: {message}\n{example}')


def test_case_09_a_label_of_another_shard_meets_no_column_of_the_last_block():
    hidden = torch.randn(10, 3, dtype=F64, generator=torch.Generator().manual_seed(9)).requires_grad_()
    weight = torch.randn(10, 3, dtype=F64, generator=torch.Generator().manual_seed(10)).requires_grad_()
    labels, upstream_gradient = torch.arange(10), upstream(9, (10,))['log_prob']

    def on_rank():
        shard = VocabShard.from_group(5, dist.group.WORLD)
        own = weight.detach()[shard.start : shard.stop].clone().requires_grad_()
        with poisoned():
            loss = cross_entropy(LinearHead(hidden, own), labels, shard=shard, chunk_size=4)
            return loss, *torch.autograd.grad(loss, [hidden, own], upstream_gradient)

    want = -(hidden @ weight.T).log_softmax(-1).diagonal()
    d_hidden, d_weight = torch.autograd.grad(want, [hidden, weight], upstream_gradient)
    ranks = run_ranks(on_rank, 2)
    for loss, grad, _ in ranks:
        assert loss.isfinite().all()
        torch.testing.assert_close(loss, want.detach())
        torch.testing.assert_close(grad, d_hidden)
    torch.testing.assert_close(torch.cat([grad for *_, grad in ranks]), d_weight)


@pytest.mark.parametrize('dtype', [F64, torch.float32, torch.bfloat16])
def test_case_10_the_hidden_gradient_is_that_of_the_whole_vocabulary_on_every_rank(dtype):
    hidden = torch.randn(7, 4, dtype=F64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    weight = torch.randn(12, 4, dtype=F64, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    labels, upstream_gradient = torch.tensor([0, 5, 6, 11, 3, 8, -100]), upstream(10, (7,))['log_prob']

    def on_rank():
        shard = VocabShard.from_group(6, dist.group.WORLD)
        loss = cross_entropy(LinearHead(hidden, weight[shard.start : shard.stop]), labels, shard=shard)
        return torch.autograd.grad(loss, hidden, upstream_gradient.to(loss.dtype))[0]

    loss = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, labels, reduction='none')
    (want,) = torch.autograd.grad(loss, hidden, upstream_gradient)
    first, second = run_ranks(on_rank, 2)
    assert torch.equal(first, second)
    tolerance = {F64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(first, want, rtol=tolerance, atol=tolerance)


def test_half_precision_gradients_are_summed_in_float32_over_tiles_and_ranks():
    """Of 848 ones, 500 of them on the first rank: bfloat16 does not hold every number beyond 256 on the way."""
    widths, tile_mb = (500, 348), 106 * 2 / 2**20  # 53 terms a tile

    def on_rank():
        columns = widths[dist.get_rank()]
        shard = VocabShard.from_group(columns, dist.group.WORLD)
        hidden, weight = (torch.ones(n, 1, dtype=torch.bfloat16, requires_grad=True) for n in (2, columns))
        picked = gather(
            LinearHead(hidden, weight, max_workspace_mb=tile_mb), torch.arange(848).expand(2, -1), shard=shard
        )
        over_columns = torch.autograd.grad(picked.sum(), [hidden, weight])
        hidden, weight = (torch.ones(n, 1, dtype=torch.bfloat16, requires_grad=True) for n in (848, 2))
        head = LinearHead(hidden, weight, max_workspace_mb=tile_mb)
        picked = gather(head, torch.zeros(848, 1, dtype=torch.long), shard=VocabShard.from_group(2))
        return *over_columns, torch.autograd.grad(picked.sum(), weight)[0]

    for hidden, weight, over_rows in run_ranks(on_rank, 2):
        assert hidden.tolist() == [[848]] * 2
        assert (weight == 2).all()
        assert over_rows.tolist() == [[848], [0]]


def test_a_bad_number_shows_on_every_rank():
    def on_rank():
        hidden, weight = torch.ones(2, 3, requires_grad=True), torch.zeros(4, 3)
        if dist.get_rank() == 1:
            weight[2, 0] = math.nan
        shard = VocabShard.from_group(4, dist.group.WORLD)
        found = ours(LinearHead(hidden, weight.requires_grad_()), torch.tensor([1, -100]), shard)
        d_hidden, d_weight = torch.autograd.grad(found['log_prob'].sum(), [hidden, weight])
        return found['log_prob'], found['argmax'], d_hidden, d_weight

    for log_prob, best, d_hidden, d_weight in run_ranks(on_rank, 2):
        assert log_prob.isnan().tolist() == [True, False]
        assert best.tolist() == [6, -1]
        assert d_hidden.isnan().any(-1).tolist() == [True, False]
        assert d_weight.isnan().all()


@pytest.mark.parametrize('sequence_parallel', [False, True])
def test_wrong_labels_are_an_error_on_every_rank_and_the_group_goes_on(sequence_parallel):
    cases = [
        ([1, 8, 2, 3], [1, 8, 2, 3], r'\[0, 8\) or ignore_index -100.*got \[8\] at \[\(1,\)\]'),
        ([1, 2, 2, 3], [1, 3, 2, 3], 'another rank was given another label'),
        ([1, -100, 2, 3], [1, 2, 2, 3], 'another rank was given another label'),
        ([-100] * 4, [1, 2, 2, 3], 'another rank was given another label'),
    ]

    def on_rank():
        shard = VocabShard.from_group(4, dist.group.WORLD)
        hidden = torch.randn(2 if sequence_parallel else 4, 3, requires_grad=True)
        head = LinearHead(hidden, torch.randn(4, 3, requires_grad=True), sequence_parallel=sequence_parallel)
        for *targets, pattern in cases:
            with pytest.raises(ValueError, match=pattern):
                log_probs(head, torch.tensor(targets[dist.get_rank()]), shard=shard)
        log_probs(head, torch.tensor([1, -100, 7, 0]), shard=shard).sum().backward()
        return hidden.grad.isfinite().all().item()

    assert run_ranks(on_rank, 2) == [True, True]


def test_wrong_calls_enter_no_collective():
    def on_rank():
        shard = VocabShard.from_group(4, dist.group.WORLD)
        hidden, weight, labels = torch.randn(3, 5), torch.randn(4, 5), torch.tensor([1, 2, 3])
        head = LinearHead(hidden, weight, sequence_parallel=True)
        wrong = [
            lambda: log_probs(LinearHead(hidden, torch.randn(8, 5)), labels, shard=shard),
            lambda: log_probs(head, labels, shard=shard),
            lambda: log_probs(head, labels.repeat(2).float(), shard=shard),
            lambda: log_probs(head, labels.repeat(2), shard=shard, temperature=0),
            lambda: log_probs(head, labels.repeat(2), shard=shard, chunk_size=0),
            lambda: topk(head, 9, shard=shard),
            lambda: gather(head, labels[:, None], shard=shard),
        ]
        with counted() as calls:
            for call in wrong:
                with pytest.raises(ValueError):  # noqa: PT011
                    call()
        return sum(calls.values())

    assert run_ranks(on_rank, 2) == [0, 0]


def test_a_group_of_some_ranks_works_beside_another():
    hidden = torch.randn(2, 4, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(8, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    target = torch.randint(8, (2, 4), generator=torch.Generator().manual_seed(2))

    def on_rank():
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine, place = dist.get_rank() % 2, dist.get_rank() // 2
        shard = VocabShard.from_group(4, groups[mine])
        own = hidden[mine].chunk(2)[place].clone().requires_grad_()
        head = LinearHead(own, weight[shard.start : shard.stop], sequence_parallel=True)
        log_prob = log_probs(head, target[mine], shard=shard)
        return log_prob, torch.autograd.grad(log_prob.sum(), own)[0]

    found = run_ranks(on_rank, 4)
    for i in range(2):
        whole = hidden[i].clone().requires_grad_()
        want = plain(whole @ weight.T, target[i], 8)['log_prob']
        (grad,) = torch.autograd.grad(want.sum(), whole)
        torch.testing.assert_close(torch.cat([found[i][1], found[i + 2][1]]), grad)
        for rank in (i, i + 2):
            torch.testing.assert_close(found[rank][0], want.detach())
