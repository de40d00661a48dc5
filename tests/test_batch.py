"""Collation, padding, the context parallel split, packed boundaries, extras: plain tensors, one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twinkle_megatron.batch import (
    Counts,
    TokenBatch,
    as_micro_batches,
    join_context,
    packing_of,
    pad_micro_batch,
    split_context,
    split_extra,
    trained_labels,
    zigzag,
)


def test_case_49_labels_shifted_before_the_split_stay_with_their_tokens():
    """Tokens 10..17 on two context parallel ranks."""
    ids = torch.arange(10, 18)[None]
    labels = torch.cat([ids[:, 1:], torch.tensor([[-100]])], 1)
    parts = [split_context({'input_ids': ids, 'labels': labels}, 2, rank) for rank in range(2)]
    assert [part['labels'].tolist() for part in parts] == [[[11, 12, 17, -100]], [[13, 14, 15, 16]]]


@pytest.mark.parametrize('cp', [1, 2, 3, 4])
def test_joining_the_parts_gives_the_whole_in_order(cp):
    whole = torch.randn(3, 12 * cp if cp > 1 else 7)
    parts = torch.stack([split_context({'input_ids': whole}, cp, rank)['input_ids'] for rank in range(cp)])
    assert torch.equal(join_context(parts), whole)


def test_the_zigzag_is_a_partition_with_equal_causal_work():
    shares = [zigzag(16, 4, rank) for rank in range(4)]
    assert sorted(torch.cat(shares).tolist()) == list(range(16))
    assert len({int(share.sum()) for share in shares}) == 1
    with pytest.raises(ValueError, match='multiple of 2 · cp = 8'):
        zigzag(12, 4, 0)


def test_samples_are_collated_at_the_end_and_lists_and_arrays_become_tensors():
    samples = [
        {'input_ids': [1, 2, 3], 'labels': [2, 3, -100]},
        {'input_ids': np.array([4, 5]), 'labels': np.array([5, 6])},
        {'input_ids': torch.tensor([7]), 'labels': torch.tensor([8])},
    ]
    first, second = as_micro_batches(samples, 2)
    assert first['input_ids'].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert first['labels'].tolist() == [[2, 3, -100], [5, 6, -100]]
    assert first['attention_mask'].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert second['input_ids'].tolist() == [[7]]
    assert len(as_micro_batches(samples, None)) == 2
    assert len(as_micro_batches({'input_ids': torch.zeros(2, 3).long()}, None)) == 1
    assert as_micro_batches([], None) == []


def test_padding_adds_ignored_rows_and_tokens_and_leaves_the_input_alone():
    batch = {'input_ids': torch.ones(1, 2).long(), 'labels': torch.ones(1, 2).long(), 'length': 2}
    out = pad_micro_batch(batch, 2, 4, -100)
    assert out['labels'].tolist() == [[1, 1, -100, -100], [-100] * 4]
    assert out['input_ids'].tolist() == [[1, 1, 0, 0], [0] * 4]
    assert out['length'] == 2
    assert batch['labels'].shape == (1, 2)


def test_completion_mask_and_labels_both_take_tokens_out():
    inputs = {'labels': torch.tensor([[3, -100, 4, 5]]), 'completion_mask': torch.tensor([[1, 1, 0, 1]])}
    assert trained_labels(inputs).tolist() == [[3, -100, -100, 5]]
    batch = TokenBatch.of(inputs)
    assert int(batch.count) == 2
    assert int(batch.tokens) == 2
    assert TokenBatch.of(inputs, counts=Counts(11, 2)).tokens == 11
    assert int(TokenBatch.of({'labels': torch.tensor([-100])}).tokens) == 1
    assert inputs['labels'].tolist() == [[3, -100, 4, 5]]


def test_packed_rows_are_known_by_boundaries_or_restarting_positions():
    ids = torch.zeros(1, 5).long()
    assert packing_of({'input_ids': ids}) is None
    assert packing_of({'input_ids': ids, 'position_ids': torch.arange(5)[None]}) is None
    packed = {'input_ids': ids, 'position_ids': torch.tensor([[0, 1, 0, 1, 2]])}
    assert packing_of(packed).boundaries.tolist() == [0, 2, 5]
    assert packing_of({'input_ids': ids, 'cu_seqlens': torch.tensor([0, 3, 4])}).boundaries.tolist() == [0, 3, 4]
    padded_rows = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]])
    assert packing_of({'input_ids': torch.zeros(2, 5).long(), 'position_ids': padded_rows}) is None


@pytest.mark.parametrize('bad', [[0, 3, 2], [1, 5], [0, 6], [0]])
def test_wrong_boundaries_are_refused(bad):
    with pytest.raises(ValueError, match='cu_seqlens must rise from 0'):
        packing_of({'input_ids': torch.zeros(1, 5).long(), 'cu_seqlens': torch.tensor(bad)})


def test_extras_with_one_entry_a_sample_are_split_and_others_go_everywhere():
    batches = [{'input_ids': torch.zeros(2, 3)}, {'input_ids': torch.zeros(1, 3)}]
    extra = {
        'advantages': torch.tensor([1.0, 2.0, 3.0]),
        'names': ['a', 'b', 'c'],
        'power': 2,
        'other': [1, 2],
        'word': 'abc',
    }
    first, second = split_extra(extra, batches)
    assert first['advantages'].tolist() == [1.0, 2.0]
    assert second['advantages'].tolist() == [3.0]
    assert (first['names'], second['names']) == (['a', 'b'], ['c'])
    assert all((part['power'], part['other'], part['word']) == (2, [1, 2], 'abc') for part in (first, second))


WRONG = [
    ('text', None, 'list of InputFeature dicts, got str'),
    ([torch.zeros(2)], None, 'got a list of Tensor'),
    ([{'labels': torch.zeros(2)}], None, "'input_ids'] must be"),
    ([{'input_ids': torch.zeros(2)}, {'input_ids': torch.zeros(2, 2)}], None, r'got input_ids with \[1, 2\] dims'),
    ([{'input_ids': torch.zeros(2)}], 0, 'micro_batch_size must be an int >= 1'),
    ([{'input_ids': torch.zeros(2), 'labels': torch.zeros(3)}], None, 'length of its input_ids'),
    ([{'input_ids': torch.zeros(2)}, {'input_ids': torch.zeros(2), 'labels': torch.zeros(2)}], None, 'same keys'),
]


@pytest.mark.parametrize(('inputs', 'size', 'words'), WRONG, ids=[w for *_, w in WRONG])
def test_wrong_inputs_are_named(inputs, size, words):
    with pytest.raises(ValueError, match=words):
        as_micro_batches(inputs, size)
