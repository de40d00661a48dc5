"""The CPU attention is the plain formula, whoever holds which tokens, and packed rows are separate sequences."""

import math

import pytest
import ranks
import stock
import torch
import torch.distributed as dist
from gradients import collect_grads, compare
from megatron.core import parallel_state as ps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from ranks import device, run_ranks
from tiny_gpt import Layout, Spec, build, initialize, transformer_config, unwrapped, wrap

from twinkle_megatron.megatron.cpu_attention import CpuCoreAttention, zigzag_positions

LENGTHS = (8, 16, 4)  # the packed sequences, each a multiple of 2 * cp
TOKENS = sum(LENGTHS)
BOUNDS = torch.tensor([0, 8, 24, 28])


def inputs(groups=4, width=8):
    """Query, key, value `[tokens, 2, heads, width]` and an upstream gradient, float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, 2, 4, width), (TOKENS, 2, groups, width), (TOKENS, 2, groups, width), (TOKENS, 2, 4 * width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def formula(query, key, value, upstream, visible, scale):
    """`softmax(scale q k) v` written out, and its three gradients; `visible` is `[b or 1, 1, s, s]`."""
    query, key, value = (x.clone().requires_grad_() for x in (query, key, value))
    repeat = query.size(2) // key.size(2)
    keys, values = (x.repeat_interleave(repeat, 2) for x in (key, value))
    scores = torch.einsum('qbnd,kbnd->bnqk', query, keys) * scale
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)
    out = torch.einsum('bnqk,kbnd->qbnd', weights, values).flatten(2)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), upstream)]


def attention(layout, mask_type=AttnMaskType.causal, scale=None, **config):
    initialize(layout)
    values = transformer_config(Spec(config=config), layout)
    return CpuCoreAttention(values, 1, mask_type, 'self', softmax_scale=scale).double()


def run(core, tensors, positions=slice(None), **kwargs):
    """The module on this rank's tokens: output and gradients of query, key and value."""
    query, key, value, upstream = (x[positions].to(device()) for x in tensors)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = core(*leaves, kwargs.pop('attention_mask', None), **kwargs)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def assert_ranks_hold(results, positions, expected):
    """Each rank's tensors are its rows of the expected ones."""
    for result, rows in zip(results, positions):
        for have, want in zip(result, expected):
            torch.testing.assert_close(have, want[rows], rtol=1e-12, atol=1e-12)


def causal(tokens=TOKENS):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]


def same_sequence():
    number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return (number[:, None] == number)[None, None]


def dense_case(cp, groups, scale, mask_type):
    core = attention(Layout(cp=cp), mask_type, scale)
    positions = zigzag_positions(torch.tensor([0, TOKENS]), cp, dist.get_rank())
    return run(core, inputs(groups), positions)


@pytest.mark.parametrize('cp', [1, 2])
@pytest.mark.parametrize(
    ('groups', 'scale', 'mask_type'), [(4, None, 'causal'), (2, 0.7, 'causal'), (1, None, 'no_mask')]
)
def test_dense_rows_are_the_formula_under_context_parallelism(cp, groups, scale, mask_type):
    results = run_ranks(dense_case, cp, cp, groups, scale, AttnMaskType[mask_type])
    visible = causal() if mask_type == 'causal' else torch.ones_like(causal())
    expected = formula(*inputs(groups), visible, scale or 8**-0.5)
    assert_ranks_hold(results, [zigzag_positions(torch.tensor([0, TOKENS]), cp, r) for r in range(cp)], expected)


def packed_case(cp, mask_type):
    core = attention(Layout(cp=cp), mask_type)
    positions = zigzag_positions(BOUNDS, cp, dist.get_rank())
    row = [x[:, 0] for x in inputs(2)]
    return run(core, row, positions, packed_seq_params=PackedSeqParams(qkv_format='thd', cu_seqlens_q=BOUNDS))


@pytest.mark.parametrize('cp', [1, 2])
@pytest.mark.parametrize('mask_type', ['causal', 'padding_causal', 'no_mask'])
def test_packed_rows_see_their_own_sequence_under_context_parallelism(cp, mask_type):
    results = run_ranks(packed_case, cp, cp, AttnMaskType[mask_type])
    visible = same_sequence() & (causal() if 'causal' in mask_type else True)
    expected = [x[:, 0] for x in formula(*(x[:, :1] for x in inputs(2)), visible, 8**-0.5)]
    assert_ranks_hold(results, [zigzag_positions(BOUNDS, cp, r) for r in range(cp)], expected)


def padded_case(cp, mask_type):
    core = attention(Layout(cp=cp), mask_type)
    positions = zigzag_positions(torch.tensor([0, 8, 24, TOKENS]), cp, dist.get_rank())
    row = [x[:, 0] for x in inputs()]
    params = PackedSeqParams(
        qkv_format='thd', cu_seqlens_q=torch.tensor([0, 5, 18]), cu_seqlens_q_padded=torch.tensor([0, 8, 24])
    )
    return run(core, row, positions, packed_seq_params=params)


@pytest.mark.parametrize('cp', [1, 2])
@pytest.mark.parametrize('mask_type', ['causal', 'no_mask'])
def test_padding_of_packed_sequences_is_never_seen(cp, mask_type):
    """Sequences of 5 and 13 tokens stored in 8 and 16, and 4 tokens after the last."""
    results = run_ranks(padded_case, cp, cp, AttnMaskType[mask_type])
    real = torch.tensor([*range(5), *range(8, 21)])
    visible = same_sequence() & (causal() if mask_type == 'causal' else True)
    hidden = torch.ones(TOKENS, dtype=torch.bool)
    hidden[real] = False
    hidden[24:] = False  # what follows the last sequence is its own
    expected = formula(*(x[:, :1] for x in inputs()), visible & ~hidden, 8**-0.5)
    out = torch.zeros(TOKENS, 32, dtype=torch.float64)
    for rank, result in enumerate(results):
        out[zigzag_positions(torch.tensor([0, 8, 24, TOKENS]), cp, rank)] = result[0]
    torch.testing.assert_close(out[real], expected[0][real, 0], rtol=1e-12, atol=1e-12)
    assert out.isfinite().all()


def masked_case(cp, mask):
    core = attention(Layout(cp=cp))
    positions = zigzag_positions(torch.tensor([0, TOKENS]), cp, dist.get_rank())
    return run(core, inputs(), positions, attention_mask=mask[:, :, positions].to(device()))


@pytest.mark.parametrize('cp', [1, 2])
def test_an_explicit_mask_is_combined_with_the_causal_one(cp):
    """Row 0 hides its first three keys, so that its first queries see nothing and give zeros."""
    mask = torch.zeros(2, 1, TOKENS, TOKENS, dtype=torch.bool)
    mask[0, ..., :3] = True
    mask[1, ..., 10:, 5] = True
    results = run_ranks(masked_case, cp, cp, mask)
    expected = formula(*inputs(), causal() & ~mask, 8**-0.5)
    assert_ranks_hold(results, [zigzag_positions(torch.tensor([0, TOKENS]), cp, r) for r in range(cp)], expected)
    assert expected[0][:3, 0].abs().max() == 0


def refused_case(change):
    core = attention(Layout())
    query, key, value, _ = inputs()
    if change == 'bias':
        core(query, key, value, None, attention_bias=torch.zeros(1))
    elif change == 'mask of another length':
        core(query, key, value, torch.zeros(2, 1, TOKENS, TOKENS - 1, dtype=torch.bool))
    elif change == 'float mask':
        core(query, key, value, torch.zeros(2, 1, TOKENS, TOKENS))
    elif change == 'mask with packed rows':
        core(query[:, 0], key[:, 0], value[:, 0], torch.ones(1), packed_seq_params=PackedSeqParams(cu_seqlens_q=BOUNDS))
    elif change == 'too many tokens':
        core(query[:9, 0], key[:9, 0], value[:9, 0], None, packed_seq_params=PackedSeqParams(cu_seqlens_q=BOUNDS))
    elif change == 'cross attention':
        CpuCoreAttention(core.config, 1, AttnMaskType.causal, 'cross')
    else:
        zigzag_positions(torch.tensor([0, 8, 14]), 2, 0)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ('bias', 'attention_bias must be None'),
        ('mask of another length', r'broadcastable to \[b, heads, s, s \* cp\] = \[2, 4, 28, 28\].*\[2, 1, 28, 27\]'),
        ('float mask', r'attention_mask must be boolean.*got torch\.float32'),
        ('mask with packed rows', 'attention_mask must be None for packed rows'),
        ('too many tokens', 'at most the 9 tokens of the packed row, got 28'),
        ('cross attention', "attention_type must be 'self'.*'cross'"),
        ('odd length', r'multiple of 2 \* context_parallel_size = 4 tokens, got 6 tokens in \[8, 14\)'),
    ],
)
def test_what_it_cannot_do_is_a_clear_error(change, message):
    (outcome,) = run_ranks(refused_case, 1, change, collect_errors=True)
    assert outcome.error == 'ValueError'
    with pytest.raises(ValueError, match=message):
        raise ValueError(outcome.message)


def dropout_case():
    core = attention(Layout(), attention_dropout=0.5)
    row = inputs()[:3]
    torch.manual_seed(0)
    first, second = core(*row, None), core(*row, None)
    kept = core.eval()(*row, None)
    return first, second, kept


@pytest.mark.skipif(ranks.DEVICE == 'cuda', reason='compares CPU tensors')
def test_dropout_acts_in_training_only_and_keeps_the_mean():
    first, second, kept = run_ranks(dropout_case, 1)[0]
    assert not torch.equal(first, second)
    torch.testing.assert_close(kept, formula(*inputs(), causal(), 8**-0.5)[0])
    assert abs((first.mean() - kept.mean()).item()) < 0.05


GPT = Spec(layers=2, position='rope', query_groups=2, max_length=TOKENS)


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, GPT.vocab_size, (2, TOKENS), generator=generator).to(device())


def sequences_case():
    """The sum of the weighted token losses of the sequences one by one."""
    initialize()
    chunks = build(GPT)
    stock.plain_loss(unwrapped(chunks[0]), GPT)
    ids, labels = tokens()
    weights = 1 + torch.arange(TOKENS, device=device()) % 3
    for start, stop in zip(BOUNDS.tolist()[:-1], BOUNDS.tolist()[1:]):
        row = slice(start, stop)
        positions = torch.arange(stop - start, device=device())[None]
        losses = chunks[0](ids[None, row], positions, None, labels=labels[None, row])
        (losses * weights[row]).sum().backward()
    return collect_grads(chunks)


def packed_row_case(layout):
    """The same from one packed row; under CP each rank adds its tokens' losses."""
    initialize(layout)
    chunks = wrap(build(GPT, layout))
    stock.plain_loss(unwrapped(chunks[0]), GPT)
    mine = zigzag_positions(BOUNDS, layout.cp, ps.get_context_parallel_rank()).to(device())
    ids, labels = tokens()
    weights = 1 + torch.arange(TOKENS, device=device()) % 3
    bounds = BOUNDS.to(device(), torch.int32)
    params = PackedSeqParams('thd', bounds, bounds, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))
    losses = chunks[0](ids[None, mine], mine[None], None, labels=labels[None, mine], packed_seq_params=params)
    (losses * weights[mine]).sum().backward()
    chunks[0].config.finalize_model_grads_func(chunks)
    return collect_grads(chunks)


@pytest.mark.parametrize('layout', [Layout(), Layout(tp=2, sp=True), Layout(cp=2)], ids=str)
def test_a_packed_row_trains_as_its_sequences_do(layout):
    (expected,) = run_ranks(sequences_case, 1)
    worst = compare(run_ranks(packed_row_case, layout.world, layout), expected)
    assert worst.error < 1e-12, worst
