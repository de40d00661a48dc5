"""Labels that are no ids: where they go, which tokens count, and what is pooled."""

from __future__ import annotations

import pytest
import torch

from twinkle_megatron.batch import PER_SEQUENCE, PER_TOKEN_NUMBER, POOLINGS, Labelling, WholeRows, packing_of
from twinkle_megatron.batch.micro_batches import TARGETS
from twinkle_megatron.batch.pairs import collated
from twinkle_megatron.batch.targets import group_sizes, marked, pool_weights, targets_of

SEQUENCES = Labelling(kind=PER_SEQUENCE, ignore_index=None)
TOKENS = Labelling(kind=PER_TOKEN_NUMBER, ignore_index=-1)
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 0, 0, 0]])
IDS = torch.arange(20).reshape(4, 5)


def test_left_padding_goes_to_the_end_of_its_row_and_is_found_again():
    batch = {'input_ids': IDS, 'attention_mask': MASK, 'position_ids': (MASK.cumsum(1) - 1).clamp(min=0)}
    batch |= {'labels': torch.rand(4, 5), 'completion_mask': torch.tensor([[1, 1, 0, 1, 1]] * 4)}
    out, columns = marked(batch, 0, TOKENS)
    assert out['input_ids'].tolist() == [[2, 3, 4, 0, 1], [5, 6, 7, 8, 9], [14, 10, 11, 12, 13], [15, 16, 17, 18, 19]]
    assert out['attention_mask'].tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert out['position_ids'][0].tolist() == [0, 1, 2, 0, 0]
    for key in ('input_ids', 'position_ids', 'completion_mask'):
        assert torch.equal(out[key].gather(1, columns), batch[key]), key
    assert torch.equal(targets_of(out).gather(1, columns), batch['labels'])
    counted = (out['labels'] != -100).gather(1, columns)
    assert torch.equal(counted, (MASK & batch['completion_mask']).bool())


def test_what_is_not_padded_on_the_left_stays_where_it_is():
    batch = {'input_ids': IDS[1::2], 'attention_mask': MASK[1::2]}
    out, columns = marked(batch, 0, Labelling(kind=PER_SEQUENCE, needed=False))
    assert columns is None
    assert out['input_ids'] is batch['input_ids']
    nothing = {'input_ids': IDS, 'attention_mask': MASK * 0}
    assert marked(nothing, 0, Labelling(kind=PER_SEQUENCE, needed=False)).columns is None


def test_vectors_as_labels_are_not_taken_for_tokens():
    """[n, c] of the shape of input_ids must not be padded, split or moved with them."""
    vectors = torch.rand(4, 5)
    samples = {'input_ids': IDS, 'attention_mask': MASK, 'labels': vectors}
    (batch,) = collated(samples, None, SEQUENCES).batches
    out, _ = marked(batch, 0, SEQUENCES)
    assert torch.equal(targets_of(out), vectors)


@pytest.mark.parametrize('label', [1, 1.0, torch.tensor(1), torch.tensor([1]), [1]], ids=str)
def test_a_sample_has_one_entry(label):
    samples = [{'input_ids': torch.arange(n), 'labels': label} for n in (1, 3, 2)]
    batches = collated(samples, 2, SEQUENCES).batches
    assert [targets_of(marked(batch, 0, SEQUENCES).batch).tolist() for batch in batches] == [[1, 1], [1]]
    assert [batch['input_ids'].shape for batch in batches] == [(2, 3), (1, 2)]


def test_samples_of_different_labels_are_refused():
    samples = [{'input_ids': torch.arange(3), 'labels': torch.ones(n)} for n in (2, 3)]
    with pytest.raises(ValueError, match='one entry a sample, all of one shape'):
        collated(samples, 2, SEQUENCES)


@pytest.mark.parametrize(
    ('starts', 'size', 'sizes'),
    [
        ([1, 0, 0, 1, 0, 1, 0, 0, 0], 4, [3, 2, 4]),
        ([1, 0, 0, 1, 0, 1, 0, 0, 0], 5, [5, 4]),
        ([1, 0, 0, 1, 0, 1, 0, 0, 0], 2, [3, 2, 4]),
        ([1, 0, 1, 0, 1, 0], 4, [4, 2]),
        ([0, 0, 1, 0], 4, [4]),
        ([], 4, []),
    ],
)
def test_groups_are_not_cut(starts, size, sizes):
    assert group_sizes([{TARGETS: torch.tensor(start)} for start in starts], size) == sizes


@pytest.mark.parametrize('pooling', POOLINGS)
def test_pool_weights_sum_to_one_over_the_counted_tokens_of_each_sequence(pooling):
    packed = {'input_ids': torch.arange(9)[None], 'position_ids': torch.tensor([[0, 1, 2, 0, 0, 1, 0, 0, 0]])}
    packed['completion_mask'] = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1]])
    packed['cu_seqlens'] = torch.tensor([0, 3, 4, 6])
    out, _ = marked(packed, 0, Labelling(kind=PER_SEQUENCE, needed=False))
    weights = pool_weights(WholeRows(out, packing_of(out), -100), pooling)
    expected = {
        'last': [0, 0, 1, 1, 0, 1, 0, 0, 0],
        'first': [0, 1, 0, 1, 1, 0, 0, 0, 0],
        'mean': [0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0, 0],
    }
    assert weights[0].tolist() == expected[pooling]
    rows, _ = marked({'input_ids': IDS, 'attention_mask': MASK}, 0, Labelling(kind=PER_SEQUENCE, needed=False))
    weights = pool_weights(WholeRows(rows, None, -100), pooling)
    torch.testing.assert_close(weights.sum(1), torch.ones(4, dtype=torch.float64))
    assert not weights[rows['labels'] == -100].any()
