"""Which tokens belong to which sequence, their shifted labels, their split over context parallel ranks, and sums and
means over them, on real context parallel groups too."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import device, run_ranks

from twinkle_megatron.batch import (
    Counts,
    TokenBatch,
    WholeRows,
    context_positions,
    join_context,
    packing_of,
    sequence_ids,
    shift_labels,
    split_context,
    spread_out,
    trained_labels,
)

F64 = torch.float64
LENGTHS = [3, 1, 5, 2]
"""Of the sequences of the packed row that most tests use: 11 tokens."""
CPU = torch.device('cpu')


def positions(lengths):
    """`position_ids [1, T]` that restart at 0."""
    return torch.cat([torch.arange(n) for n in lengths])[None]


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def row(length, **keys):
    return {'input_ids': torch.arange(length)[None], **keys}


# ---- how a row is packed


FORMS = {
    'positions': lambda: {'position_ids': positions(LENGTHS)},
    'cu_seqlens': lambda: {'cu_seqlens': starts(LENGTHS)},
    'int64': lambda: {'cu_seqlens': starts(LENGTHS).long()},
    'list': lambda: {'cu_seqlens': starts(LENGTHS).tolist()},
    'array': lambda: {'cu_seqlens': starts(LENGTHS).numpy()},
    '2-D': lambda: {'cu_seqlens': starts(LENGTHS)[None]},
    'last one repeated': lambda: {'cu_seqlens': torch.cat([starts(LENGTHS), torch.full((4,), 11, dtype=torch.int32)])},
    'an empty one inside': lambda: {'cu_seqlens': torch.tensor([0, 3, 4, 4, 4, 9, 11])},
    'an empty one first': lambda: {'cu_seqlens': torch.tensor([0, 0, 3, 4, 9, 11])},
    'params': lambda: {'packed_seq_params': SimpleNamespace(cu_seqlens_q=starts(LENGTHS))},
    'params without padding': lambda: {
        'packed_seq_params': SimpleNamespace(cu_seqlens_q=starts(LENGTHS), cu_seqlens_q_padded=None)
    },
}


@pytest.mark.parametrize('form', FORMS)
def test_every_form_tells_the_same_packing(form):
    batch = row(11, **FORMS[form]())
    packing = packing_of(batch)
    assert packing.boundaries.tolist() == [0, 3, 4, 9, 11]
    assert packing.lengths.tolist() == LENGTHS
    assert sequence_ids((1, 11), packing, CPU).tolist() == [[0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3]]
    assert WholeRows.of({'labels': batch['input_ids'], **FORMS[form]()}, -100).lengths == LENGTHS


def test_megatron_s_own_params():
    from megatron.core.packed_seq_params import PackedSeqParams

    true, stored = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])
    params = PackedSeqParams(qkv_format='thd', cu_seqlens_q=true, cu_seqlens_kv=true, cu_seqlens_q_padded=stored)
    packing = packing_of(row(8, packed_seq_params=params))
    assert packing.boundaries.tolist() == [0, 4, 8]
    assert packing.lengths.tolist() == [3, 2]
    bare = PackedSeqParams(qkv_format='thd', cu_seqlens_q=true, cu_seqlens_kv=true)
    assert packing_of(row(8, packed_seq_params=bare)).lengths.tolist() == [3, 2]
    with pytest.raises(ValueError, match='packed_seq_params must hold cu_seqlens_q'):
        packing_of(row(8, packed_seq_params=PackedSeqParams(qkv_format='thd')))


@pytest.mark.parametrize('keys', [('cu_seqlens', 'cu_seqlens_padded'), 'params'], ids=['plain', 'params'])
def test_padding_of_each_sequence_belongs_to_it_and_is_never_trained(keys):
    """Rows of 4, 4 and 4 tokens, of which 3, 1 and 2 are real, and one more token behind."""
    true, stored = torch.tensor([0, 3, 4, 6]), torch.tensor([0, 4, 8, 12])
    if keys == 'params':
        told = {'packed_seq_params': SimpleNamespace(cu_seqlens_q=true, cu_seqlens_q_padded=stored)}
    else:
        told = dict(zip(keys, (true, stored)))
    packing = packing_of(row(13, **told))
    assert packing.boundaries.tolist() == [0, 4, 8, 12]
    assert packing.lengths.tolist() == [3, 1, 2]
    inputs = {'labels': torch.full((1, 13), 7), **told}
    want = [7, 7, 7, -100, 7, -100, -100, -100, 7, 7, -100, -100, -100]
    assert trained_labels(inputs).tolist() == [want]
    assert trained_labels({**inputs, 'labels': inputs['labels'][0]}).tolist() == want
    batch = TokenBatch.of(inputs)
    assert batch.sequence_ids.tolist() == [[0] * 4 + [1] * 4 + [2] * 5]
    assert batch.sequence_tokens.tolist() == [3, 1, 2]
    assert inputs['labels'].eq(7).all(), 'the labels of the caller are not written to'


def test_what_follows_the_last_sequence_is_not_trained():
    inputs = {'labels': torch.full((1, 6), 7), 'cu_seqlens': torch.tensor([0, 2, 4])}
    assert trained_labels(inputs).tolist() == [[7, 7, 7, 7, -100, -100]]
    assert TokenBatch.of(inputs).sequence_tokens.tolist() == [2, 2]


WRONG = [
    ({'cu_seqlens': [0, 3, 2, 11]}, 'cu_seqlens must rise from 0 to at most T'),
    ({'cu_seqlens': [1, 11]}, 'cu_seqlens must rise from 0'),
    ({'cu_seqlens': [0, 12]}, r'got \[0, 12\] for input_ids \(1, 11\)'),
    ({'cu_seqlens': [0, 3, 5], 'cu_seqlens_padded': [0, 2, 6]}, 'cu_seqlens_padded must have room for every sequence'),
    ({'cu_seqlens': [0, 3, 5], 'cu_seqlens_padded': [0, 8]}, 'cu_seqlens_padded must have room'),
    ({'cu_seqlens': [0, 0, 3], 'cu_seqlens_padded': [0, 4, 8]}, 'no room before the first'),
    ({'cu_seqlens': [0, 0]}, 'must hold a sequence with tokens'),
    ({'position_ids': torch.tensor([[3, 4, 0, 1, 0, 1, 2, 3, 4, 5, 6]])}, 'must start at 0, got 3 first'),
]


@pytest.mark.parametrize(('keys', 'words'), WRONG, ids=[words for _, words in WRONG])
def test_boundaries_that_are_none_are_refused(keys, words):
    with pytest.raises(ValueError, match=words):
        packing_of(row(11, **keys))


def test_rows_are_not_packed():
    ids = torch.zeros(2, 4).long()
    assert packing_of({'input_ids': ids}) is None
    assert packing_of({'input_ids': ids, 'position_ids': torch.tensor([[0, 1, 2, 3], [0, 1, 0, 0]])}) is None
    mask = torch.tensor([[1, 1, 0, 0]])  # padding has position 0
    one = {'input_ids': ids[:1], 'position_ids': torch.tensor([[0, 1, 0, 0]]), 'attention_mask': mask}
    assert packing_of(one) is None
    restarted = {'input_ids': ids, 'position_ids': torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])}
    with pytest.raises(ValueError, match=r'restart at 0 inside a row.*but there are 2 rows'):
        packing_of(restarted)
    assert sequence_ids((2, 4), None, CPU).tolist() == [[0] * 4, [1] * 4]


# ---- labels


def tokens(*shape):
    """Ids that tell where they stand."""
    return torch.arange(10, 10 + int(np.prod(shape))).view(shape)


def test_labels_are_the_next_token_and_end_with_each_row():
    assert shift_labels({'input_ids': tokens(4)}).tolist() == [11, 12, 13, -100]
    assert shift_labels({'input_ids': tokens(2, 3)}).tolist() == [[11, 12, -100], [14, 15, -100]]
    given = {'input_ids': tokens(4), 'labels': torch.tensor([-100, -100, 12, 13])}
    assert shift_labels(given).tolist() == [-100, 12, 13, -100]
    assert given['labels'].tolist() == [-100, -100, 12, 13]
    assert shift_labels({'input_ids': tokens(3)}, ignore_index=-1).tolist() == [11, 12, -1]
    assert shift_labels({'input_ids': [5, 6, 7]}).tolist() == [6, 7, -100]


@pytest.mark.parametrize('form', FORMS)
def test_labels_never_cross_a_packed_boundary(form):
    want = [11, 12, -100, -100, 15, 16, 17, 18, -100, 20, -100]
    packed = {'input_ids': tokens(1, 11), **FORMS[form]()}
    assert shift_labels(packed).tolist() == [want]
    assert shift_labels({'input_ids': tokens(11), **FORMS[form]()}).tolist() == want
    flat = {key: x[0] if key == 'position_ids' else x for key, x in FORMS[form]().items()}
    assert shift_labels({'input_ids': tokens(11), **flat}).tolist() == want


def test_labels_of_padding_inside_a_packed_row_are_ignored():
    packed = {'input_ids': tokens(1, 9), 'cu_seqlens': [0, 3, 5], 'cu_seqlens_padded': [0, 4, 8]}
    assert shift_labels(packed).tolist() == [[11, 12, -100, -100, 15, -100, -100, -100, -100]]


def test_padding_that_the_attention_mask_tells_is_no_label():
    batch = {'input_ids': tokens(2, 4), 'attention_mask': torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])}
    assert shift_labels(batch).tolist() == [[11, -100, -100, -100], [15, 16, 17, -100]]
    assert shift_labels({'input_ids': tokens(4), 'attention_mask': [1, 1, 1, 0]}).tolist() == [11, 12, -100, -100]


def test_case_49_labels_are_shifted_before_the_context_parallel_split():
    batch = {'input_ids': tokens(1, 8)}
    batch['labels'] = shift_labels(batch)
    parts = [split_context(batch, 2, rank)['labels'].tolist() for rank in range(2)]
    assert parts == [[[11, 12, 17, -100]], [[13, 14, 15, 16]]]


def test_case_49_in_a_packed_row():
    """Two sequences of 4 and 8 tokens, each split by itself."""
    batch = {'input_ids': tokens(1, 12), 'cu_seqlens': torch.tensor([0, 4, 12])}
    batch['labels'] = shift_labels(batch)
    parts = [split_context(batch, 2, rank, batch['cu_seqlens'])['labels'].tolist() for rank in range(2)]
    assert parts == [[[11, -100, 15, 16, 21, -100]], [[12, 13, 17, 18, 19, 20]]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 3))
def test_shifting_a_packed_row_is_shifting_its_sequences(lengths, behind):
    """Also with padding behind the last one."""
    total = sum(lengths)
    ids = tokens(1, total + behind)
    alone = [shift_labels({'input_ids': part}) for part in ids[0, :total].split(lengths)]
    want = torch.cat([*alone, torch.full((behind,), -100)])[None]
    assert torch.equal(shift_labels({'input_ids': ids, 'cu_seqlens': starts(lengths)}), want)
    if len(lengths) > 1 and behind == 0:
        assert torch.equal(shift_labels({'input_ids': ids, 'position_ids': positions(lengths)}), want)


# ---- the context parallel split of packed rows


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 2))
def test_the_split_of_a_packed_row_is_a_partition_of_each_sequence(units, cp, behind):
    lengths = [2 * cp * unit for unit in units]
    total = sum(lengths) + 2 * cp * behind
    bounds = starts(lengths)
    shares = [context_positions(total, cp, rank, bounds) for rank in range(cp)]
    assert sorted(torch.cat(shares).tolist()) == list(range(total))
    assert {len(share) for share in shares} == {total // cp}
    for first, last in zip(bounds.tolist(), bounds.tolist()[1:]):
        inside = [share[(share >= first) & (share < last)] for share in shares]
        assert {len(x) for x in inside} == {(last - first) // cp}
        assert all(x.tolist() == sorted(x.tolist()) for x in inside)
        assert len({int((x - first).sum()) for x in inside}) == 1, 'equal causal work'
    whole = torch.randn(1, total)
    parts = torch.stack([split_context({'input_ids': whole}, cp, rank, bounds)['input_ids'] for rank in range(cp)])
    assert torch.equal(join_context(parts, bounds), whole)


def test_a_row_split_over_one_rank_stays_as_it_is():
    assert context_positions(5, 1, 0, torch.tensor([0, 3])).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match='multiple of 2 · cp = 4'):
        context_positions(12, 2, 0, torch.tensor([0, 3, 12]))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 2)), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4, 6]),
    st.integers(0, 3),
)
def test_spreading_out_keeps_every_token_in_its_sequence(sizes, multiple, behind):
    """Sequences of n tokens with some padding of their own, and some behind the last."""
    lengths, room = [n for n, _ in sizes], [n + extra for n, extra in sizes]
    total = sum(room) + behind
    told = {'cu_seqlens': starts(lengths), 'cu_seqlens_padded': starts(room)}
    batch = {'input_ids': tokens(1, total), 'labels': tokens(1, total), 'weights': torch.rand(1, total), **told}
    batch['labels'] = trained_labels(batch)
    packing = packing_of(batch)
    out, moved, columns = spread_out(batch, packing, multiple, -100)
    assert (moved.boundaries.diff() % multiple == 0).all()
    assert torch.equal(moved.lengths, packing.lengths)
    assert (moved.boundaries.diff() >= moved.lengths).all()
    if columns is None:
        assert torch.equal(moved.boundaries, packing.boundaries)
        assert torch.equal(out['labels'], batch['labels'])
        return
    used = int(packing.boundaries[-1])
    for key in ('input_ids', 'labels', 'weights'):
        assert torch.equal(out[key][:, columns], batch[key][:, :used]), key
        rest = torch.ones(out[key].shape[1], dtype=torch.bool).index_fill(0, columns, False)
        assert (out[key][0, rest] == (-100 if key == 'labels' else 0)).all()
    before = sequence_ids((1, total), packing, CPU)[0, :used]
    after = sequence_ids(tuple(out['input_ids'].shape), moved, CPU)[0, columns]
    assert torch.equal(before, after)


# ---- sums and means over sequences

LABELS = torch.tensor([[1, 2, -100, 3, -100], [-100] * 5, [4, -100, -100, -100, -100]])
PACKED = {'labels': LABELS.reshape(1, -1), 'cu_seqlens': torch.tensor([0, 5, 10, 15])}
VALUES = torch.tensor([[0.5, 2.0, torch.nan, -1.0, torch.inf], [torch.nan] * 5, [3.0, torch.inf, 0, 0, 0]], dtype=F64)


@pytest.mark.parametrize('packed', [False, True])
def test_sums_and_means_of_sequences_by_hand(packed):
    """Garbage at tokens that do not count is never read, in the gradient neither."""
    batch = TokenBatch.of(PACKED if packed else {'labels': LABELS})
    values = VALUES.view(batch.labels.shape).clone().requires_grad_()
    assert batch.sequence_tokens.tolist() == [3, 0, 1]
    assert int(batch.count) == 4
    assert int(batch.tokens) == 4
    assert int(batch.sequences) == 2
    assert batch.sequence_sum(values).tolist() == [1.5, 0, 3.0]
    assert batch.sequence_mean(values).tolist() == [0.5, 0, 3.0]
    assert batch.mean(values).item() == pytest.approx(4.5 / 4, rel=1e-15)
    assert batch.mean(values, over='sequences').item() == pytest.approx((0.5 + 3.0) / 2, rel=1e-15)
    (batch.sequence_mean(values) * torch.tensor([2.0, 5.0, 7.0], dtype=F64)).sum().backward()
    want = torch.zeros(3, 5, dtype=F64)
    want[0, [0, 1, 3]], want[2, 0] = 2 / 3, 7.0
    torch.testing.assert_close(values.grad.view(3, 5), want, rtol=1e-15, atol=0)
    spread = batch.spread(torch.tensor([1.0, 2.0, 3.0])).view(3, 5)
    assert torch.equal(spread, torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 5))


@pytest.mark.parametrize('over', ['tokens', 'sequences'])
@pytest.mark.parametrize('packed', [False, True])
def test_gradients_of_means(over, packed):
    batch = TokenBatch.of(PACKED if packed else {'labels': LABELS}, counts=Counts(8, 5))
    values = VALUES.view(batch.labels.shape).clone().requires_grad_()
    batch.mean(values, over).mul(3).backward()
    want = torch.zeros(3, 5, dtype=F64)
    want[0, [0, 1, 3]], want[2, 0] = (3 / 8, 3 / 8) if over == 'tokens' else (3 / 3 / 5, 3 / 5)
    torch.testing.assert_close(values.grad.view(3, 5), want, rtol=1e-15, atol=0)


def test_a_mean_of_nothing_is_0_with_a_gradient_path():
    batch = TokenBatch.of({'labels': torch.full((2, 3), -100)})
    for over in ('tokens', 'sequences'):
        values = torch.full((2, 3), torch.nan, dtype=F64, requires_grad=True)
        mean = batch.mean(values, over)
        mean.backward()
        assert mean.item() == 0
        assert torch.equal(values.grad, torch.zeros(2, 3, dtype=F64))
    assert batch.sequence_mean(torch.full((2, 3), torch.nan)).tolist() == [0, 0]
    empty = TokenBatch.of({'labels': torch.zeros(0, 4).long()})
    assert empty.sequence_tokens.tolist() == []
    assert empty.mean(torch.zeros(0, 4), 'sequences').item() == 0


def test_one_dimensional_labels_are_one_sequence():
    batch = TokenBatch.of({'labels': torch.tensor([4, -100, 5])})
    assert batch.sequence_ids.tolist() == [0, 0, 0]
    assert batch.sequence_mean(torch.tensor([1.0, 9.0, 2.0])).tolist() == [1.5]
    packed = TokenBatch.of({'labels': torch.tensor([4, -100, 5]), 'position_ids': torch.tensor([0, 0, 1])})
    assert packed.sequence_ids.tolist() == [0, 1, 1]


def test_completion_mask_takes_tokens_out_of_sequences():
    inputs = {'labels': LABELS, 'completion_mask': torch.tensor([[1, 0, 1, 1, 1], [1] * 5, [0] * 5])}
    batch = TokenBatch.of(inputs)
    assert batch.sequence_tokens.tolist() == [2, 0, 0]
    assert int(batch.sequences) == 1
    with pytest.raises(ValueError, match='completion_mask must have the shape of labels'):
        TokenBatch.of({'labels': LABELS, 'completion_mask': torch.ones(3, 4)})


def test_a_mean_over_something_else_is_refused():
    with pytest.raises(ValueError, match="over must be 'tokens', 'sequences' or 'pairs', got 'token'"):
        TokenBatch.of({'labels': LABELS}).mean(torch.zeros(3, 5), over='token')
    with pytest.raises(ValueError, match="must hold 'labels'"):
        TokenBatch.of({'input_ids': LABELS})


# ---- on real context parallel groups

ROWS = {'labels': torch.where(torch.rand(3, 16, generator=torch.Generator().manual_seed(1)) < 0.6, 1, -100)}
ROWS['labels'][1] = -100
SPANS = [6, 3, 16, 5, 9]
SEQUENCES = {
    'padded': ROWS,
    'packed': {
        'labels': torch.where(torch.rand(1, 39, generator=torch.Generator().manual_seed(2)) < 0.6, 1, -100),
        'cu_seqlens': starts(SPANS),
    },
}
SEQUENCES['packed']['labels'][:, 6:9] = -100


def of_kind(kind):
    """The whole batch, values `[b, s]` and weights of its sequences and tokens."""
    inputs = SEQUENCES[kind]
    generator = torch.Generator().manual_seed(3)
    shape = inputs['labels'].shape
    values, weights = (torch.randn(shape, generator=generator, dtype=F64) for _ in range(2))
    count = 3 if kind == 'padded' else len(SPANS)
    return inputs, values, weights, torch.randn(count, generator=generator, dtype=F64)


def objective(batch, values, weights, per_sequence, shared):
    """What losses do with a sequence's value: they use it at each token, as GSPO does; beside their own at tokens; and
    once for each sequence, as a replicated term of which each rank has its share."""
    value = torch.tanh(batch.sequence_mean(values))
    at_tokens = torch.where(batch.mask, batch.spread(value) * weights + values * weights, 0).sum()
    replicated = (per_sequence * torch.sin(batch.sequence_sum(values))).sum() / shared
    means = batch.mean(values * weights, 'sequences') + 2 * batch.mean(values**2)
    return at_tokens + replicated + means


def whole_batch(kind):
    inputs, values, weights, per_sequence = of_kind(kind)
    leaf = values.clone().requires_grad_()
    batch = TokenBatch.of(inputs)
    found = objective(batch, leaf, weights, per_sequence, 1)
    found.backward()
    return found.item(), leaf.grad, batch.sequence_sum(values), batch.sequence_mean(values)


def slice_of(kind):
    """On one context parallel rank: its share of the objective, its gradient, and the sums and means it sees."""
    size, rank = dist.get_world_size(), dist.get_rank()
    inputs, values, weights, per_sequence = of_kind(kind)
    whole = TokenBatch.of(inputs)
    counts = Counts(int(whole.count), int((whole.sequence_tokens > 0).sum()))
    batch = {'input_ids': whole.labels, 'labels': whole.labels, 'values': values, 'weights': weights,
             'sequence_ids': whole.sequence_ids}  # fmt: skip
    packing = packing_of({**inputs, 'input_ids': whole.labels})
    columns, bounds = None, None
    if packing is not None:
        batch, packing, columns = spread_out(batch, packing, 2 * size, -100)
        bounds = packing.boundaries
    local = {key: x.to(device()) for key, x in split_context(batch, size, rank, bounds).items()}
    local['sequence_tokens'] = whole.sequence_tokens.to(device())
    leaf = local['values'].clone().requires_grad_()
    mine = TokenBatch.of(local, counts=counts, cp=dist.group.WORLD)
    found = objective(mine, leaf, local['weights'], per_sequence.to(device()), size)
    found.backward()
    grads = [torch.empty_like(leaf) for _ in range(size)]
    dist.all_gather(grads, leaf.grad)
    grad = join_context(torch.stack(grads), bounds)
    grad = grad if columns is None else grad[:, columns]
    return found.item(), grad, mine.sequence_sum(leaf), mine.sequence_mean(leaf)


@pytest.mark.parametrize('cp', [1, 2, 4])
@pytest.mark.parametrize('kind', SEQUENCES)
def test_sums_over_context_parallel_ranks_are_those_of_one_process(kind, cp):
    """Values and gradients; a replicated term counts once."""
    total, grad, sums, means = whole_batch(kind)
    results = run_ranks(slice_of, cp, kind)
    assert sum(value for value, *_ in results) == pytest.approx(total, rel=1e-13)
    for _, found, seen_sums, seen_means in results:
        torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-14)
        assert torch.equal(seen_sums, results[0][2]), 'bitwise the same on all ranks'
        torch.testing.assert_close(seen_sums, sums, rtol=1e-13, atol=1e-15)
        torch.testing.assert_close(seen_means, means, rtol=1e-13, atol=1e-15)


def means_without_counts():
    """Counts of the micro-batch alone: tokens are summed over the ranks, replicas of sequences are not."""
    inputs, values, _, _ = of_kind('padded')
    whole = TokenBatch.of(inputs)
    batch = {'input_ids': whole.labels, 'labels': whole.labels, 'values': values, 'sequence_ids': whole.sequence_ids}
    local = split_context(batch, 2, dist.get_rank())
    mine = TokenBatch.of({**local, 'sequence_tokens': whole.sequence_tokens}, cp=dist.group.WORLD)
    return mine.mean(local['values']).item(), mine.mean(local['values'], 'sequences').item()


def test_means_of_a_micro_batch_over_context_parallel_ranks():
    inputs, values, _, _ = of_kind('padded')
    whole = TokenBatch.of(inputs)
    by_tokens, by_sequences = (sum(parts) for parts in zip(*run_ranks(means_without_counts, 2)))
    assert by_tokens == pytest.approx(whole.mean(values).item(), rel=1e-13)
    assert by_sequences == pytest.approx(whole.mean(values, 'sequences').item(), rel=1e-13)


def without_sequence_tokens():
    batch = TokenBatch.of({'labels': torch.ones(1, 4).long()}, cp=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"must bring inputs\['sequence_tokens'\]"):
        batch.mean(torch.zeros(1, 4), 'sequences')
    return batch.mean(torch.ones(1, 4)).item()


def test_a_slice_has_to_bring_the_tokens_of_its_whole_sequences():
    """Its own would be too few. A mean over tokens does without."""
    assert run_ranks(without_sequence_tokens, 2) == [0.5, 0.5]
