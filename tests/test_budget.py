"""Samples packed into micro-batches by a budget of tokens: what is cut, how evenly, and the way there and back."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from twinkle_megatron.batch import WholeRows, packing_of
from twinkle_megatron.batch.budget import (
    Units,
    agreed_bins,
    balanced,
    check_budget,
    in_input_order,
    least_bins,
    lengths_of,
    packed_row,
    samples_of_bins,
    units_of,
)
from twinkle_megatron.batch.micro_batches import TARGETS
from twinkle_megatron.groups import Groups

quickly = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@st.composite
def packings(draw):
    """Units, a budget in which each fits, and a number of bins in which all of them do; or units that fill some bins to
    the brim, which longest first does not find."""
    if draw(st.booleans()):
        units = draw(st.lists(st.integers(0, 30), max_size=25))
        budget = draw(st.integers(max([*units, 1]), max([*units, 1]) + 40))
    else:
        budget = draw(st.integers(6, 30))
        cuts = draw(st.lists(st.sets(st.integers(1, budget - 1), max_size=3), min_size=1, max_size=6))
        ends = [[0, *sorted(one), budget] for one in cuts]
        units = draw(st.permutations([b - a for one in ends for a, b in itertools.pairwise(one)]))
    return units, budget, least_bins(units, budget) + draw(st.integers(0, 6) if draw(st.booleans()) else st.just(0))


def loads(units, found):
    return [sum(units[i] for i in one) for one in found]


@quickly
@given(packings())
def test_every_unit_is_in_one_bin_of_so_many_and_none_is_above_the_budget(drawn):
    units, budget, bins = drawn
    found = balanced(units, bins, budget)
    assert len(found) == bins
    assert sorted(i for one in found for i in one) == list(range(len(units)))
    assert all(load <= budget for load in loads(units, found))
    assert sum(not one for one in found) == max(bins - len(units), 0)


@quickly
@given(packings())
def test_units_and_bins_are_in_input_order_and_always_the_same(drawn):
    units, budget, bins = drawn
    found = balanced(units, bins, budget)
    assert all(one == sorted(one) for one in found)
    firsts = [one[0] for one in found if one]
    assert firsts == sorted(firsts)
    assert [bool(one) for one in found] == sorted((bool(one) for one in found), reverse=True)
    assert found == balanced(tuple(units), bins, budget)


@quickly
@given(packings())
def test_where_the_budget_does_not_bind_bins_differ_by_a_unit_at_most(drawn):
    units, _, bins = drawn
    full = loads(units, balanced(units, bins, sum(units)))
    if full:
        assert max(full) - min(full) <= max(units, default=0)


def best(units, bins):
    """The smallest largest load of all divisions, tried one by one."""
    every = itertools.product(range(bins), repeat=len(units))
    return min(max(sum(u for u, k in zip(units, where) if k == b) for b in range(bins)) for where in every)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_bin_keeps_the_bound_of_longest_processing_time(units, bins):
    found = loads(units, balanced(units, bins, sum(units)))
    assert 3 * bins * max(found) <= (4 * bins - 1) * best(units, bins)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 20))
def test_so_many_bins_are_near_the_least_possible(units, more):
    budget = max(units) + more
    least = next(bins for bins in range(1, 7) if best(units, bins) <= budget)
    assert least <= least_bins(units, budget)
    assert 9 * least_bins(units, budget) <= 11 * least + 6


def test_where_longest_first_breaks_the_budget_bins_are_packed_first_fit_and_cut():
    units, budget = [3, 3, 2, 2, 2], 6  # longest first gives [3, 2, 2] and [3, 2]
    assert least_bins(units, budget) == 2
    assert balanced(units, 2, budget) == [[0, 1], [2, 3, 4]]
    assert balanced(units, 2, 7) == [[0, 2, 4], [1, 3]]
    units = [6, 6, 4, 4, 4, 12, 12]
    found = balanced(units, 4, 12)
    assert loads(units, found) == [12, 12, 12, 12]


def longest_first(units, bins):
    """The largest load of the plain greedy division."""
    full = [0] * bins
    for unit in sorted(units, reverse=True):
        full[full.index(min(full))] += unit
    return max(full)


def test_the_budget_is_kept_wherever_longest_first_would_break_it():
    draw, broken = random.Random(0), 0
    for _ in range(3000):
        budget, units = draw.randint(6, 30), []
        for _ in range(draw.randint(2, 6)):
            ends = [0, *sorted(draw.sample(range(1, budget), draw.randint(0, 3))), budget]
            units += [b - a for a, b in itertools.pairwise(ends)]
        bins = least_bins(units, budget)
        if longest_first(units, bins) > budget:
            broken += 1
            found = balanced(units, bins, budget)
            assert len(found) == bins
            assert sorted(i for one in found for i in one) == list(range(len(units)))
            assert max(loads(units, found)) <= budget
            assert all(found)
    assert broken > 50


def test_bins_left_over_are_filled_by_cutting_the_fullest():
    units, budget = [3, 3, 2, 2, 2] * 2 + [1, 5], 6  # five bins are needed, in six longest first keeps the budget
    for bins in range(least_bins(units, budget), 15):
        found = balanced(units, bins, budget)
        assert len(found) == bins
        assert max(loads(units, found)) <= budget
        assert sum(not one for one in found) == max(bins - 12, 0)


def test_a_unit_above_the_budget_is_refused_and_so_are_too_few_bins():
    with pytest.raises(ValueError, match=re.escape('at least the largest unit, 7 (number 1), got 6')):
        least_bins([2, 7], 6)
    with pytest.raises(ValueError, match='2 bins are needed for a budget of 6, got 1'):
        balanced([5, 5], 1, 6)
    assert (least_bins([], 4), balanced([], 0, 4), balanced([], 2, 4)) == (0, [], [[], []])


# ---- what is not cut


def samples(*lengths, **values):
    whole = [{'input_ids': torch.arange(n) + 10 * i, 'labels': torch.arange(n) + 10 * i} for i, n in enumerate(lengths)]
    return [{**one, **{key: value[i] for key, value in values.items()}} for i, one in enumerate(whole)]


def test_pairs_and_groups_are_units():
    given_ = samples(1, 2, 3, 4, 5, 6)
    assert units_of(given_, None, False) == Units([[i] for i in range(6)], [1, 2, 3, 4, 5, 6], 'sample')
    assert units_of(given_, 'interleaved', False) == Units([[0, 1], [2, 3], [4, 5]], [3, 7, 11], 'pair')
    assert units_of(given_, 'separated', False) == Units([[0, 3], [1, 4], [2, 5]], [5, 7, 9], 'pair')
    starts = [{**one, TARGETS: torch.tensor(s)} for one, s in zip(given_, (1, 0, 1, 0, 0, 1))]
    assert units_of(starts, None, True) == Units([[0, 1], [2, 3, 4], [5]], [3, 12, 6], 'group')
    assert units_of([], 'interleaved', False) == Units([], [], 'pair')
    assert units_of([], None, True) == Units([], [], 'group')


def test_a_sample_takes_a_multiple_of_tokens_and_at_least_one():
    assert units_of(samples(0, 1, 4, 5), None, False).tokens == [1, 1, 4, 5]
    assert units_of(samples(0, 1, 4, 5), None, False, multiple=4).tokens == [4, 4, 4, 8]
    assert units_of(samples(1, 3, 4, 5), 'separated', False, multiple=4).tokens == [8, 12]


def test_a_row_of_separated_pairs_has_its_chosen_samples_first():
    units = units_of(samples(*range(1, 9)), 'separated', False)
    assert samples_of_bins(units, [[0, 3], [1, 2]], 'separated') == [[0, 3, 4, 7], [1, 2, 5, 6]]
    units = units_of(samples(*range(1, 9)), 'interleaved', False)
    assert samples_of_bins(units, [[0, 3], [1, 2]], 'interleaved') == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert samples_of_bins(Units([[0, 1], [2]], [2, 1], 'group'), [[1, 0]], None) == [[2, 0, 1]]


@pytest.mark.parametrize('ids', [[1, 2, 3], np.arange(3), torch.arange(3)], ids=['list', 'array', 'tensor'])
def test_lengths_are_those_of_lists_arrays_and_tensors(ids):
    assert lengths_of([{'input_ids': ids}, {'input_ids': ids[:0]}]) == [3, 0]
    assert lengths_of({'input_ids': ids}) == [3]
    assert lengths_of([]) == []


@pytest.mark.parametrize(
    ('inputs', 'message'),
    [
        ([{'input_ids': torch.zeros(2, 3)}], r'inputs\[0\] must be one then.*got input_ids of shape \(2, 3\)'),
        ([{'input_ids': [1]}, {'input_ids': [[1], [2]]}], r'inputs\[1\] .*shape \(2, 1\)'),
        ([{'input_ids': [[1], [2, 3]]}], r'inputs\[0\] .*got a list of list'),
        ([{'labels': [1]}], r'inputs\[0\] .*got dict'),
        ([torch.zeros(3)], r'inputs\[0\] .*got a tensor of shape \(3,\)'),
        (torch.zeros(3), r'inputs must be a list of InputFeature dicts, got a tensor'),
        ('text', 'inputs must be a list'),
    ],
)
def test_what_is_no_sample_is_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        lengths_of(inputs)


def test_pairs_need_an_even_number_of_samples():
    with pytest.raises(ValueError, match=re.escape('a chosen and a rejected sample (separated), got 3 samples')):
        units_of(samples(1, 2, 3), 'separated', False)


@pytest.mark.parametrize(
    ('budget', 'units', 'message'),
    [
        (
            6,
            Units([[0], [1]], [3, 7], 'sample'),
            'at least the longest sample, 7 tokens (sample 1), got 6; shorten it,',
        ),
        (6, Units([[0, 2], [1, 3]], [3, 7], 'pair'), 'at least the longest pair, 7 tokens (samples 1, 3), got 6'),
        (6, Units([[0, 1, 2]], [7], 'group'), 'the longest group, 7 tokens (samples 0, 1, 2), got 6; shorten its samp'),
        (0, Units([], [], 'sample'), 'max_tokens_per_micro_batch must be an int >= 1, got 0'),
        (8.0, Units([], [], 'sample'), 'must be an int >= 1, got 8.0'),
        (True, Units([], [], 'sample'), 'must be an int >= 1, got True'),
    ],
)
def test_a_wrong_budget_says_which_sample_it_lacks_room_for(budget, units, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_budget(budget, units)


def test_a_budget_of_just_the_longest_unit_is_enough():
    check_budget(7, Units([[0], [1]], [3, 7], 'sample'))
    check_budget(np.int64(1), Units([], [], 'sample'))


# ---- packed rows


def test_a_packed_row_joins_what_belongs_to_tokens_and_lists_the_rest():
    weights = [torch.rand(3), torch.rand(1), torch.rand(2)]
    row = packed_row(samples(3, 1, 2, weight=weights, name=['a', 'b', 'c'], vector=[torch.zeros(5)] * 3))
    assert row['input_ids'].tolist() == row['labels'].tolist() == [[0, 1, 2, 10, 20, 21]]
    assert row['position_ids'].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert (row['cu_seqlens'].tolist(), row['cu_seqlens'].dtype) == ([0, 3, 4, 6], torch.int32)
    assert torch.equal(row['weight'], torch.cat(weights)[None])
    assert row['name'] == ['a', 'b', 'c']
    assert len(row['vector']) == 3
    assert set(row) == {'input_ids', 'labels', 'position_ids', 'cu_seqlens', 'weight', 'name', 'vector'}
    assert packing_of(row).lengths.tolist() == [3, 1, 2]


def test_samples_keep_their_own_positions_and_masks_of_labels():
    own = [torch.tensor([5, 6]), torch.tensor([0, 2, 4])]
    masks = [torch.tensor([0, 1]), torch.tensor([1, 1, 0])]
    row = packed_row(
        samples(2, 3, position_ids=own, completion_mask=masks, attention_mask=[own[0] * 0 + 1, own[1] * 0 + 1])
    )
    assert row['position_ids'].tolist() == [[5, 6, 0, 2, 4]]
    assert row['completion_mask'].tolist() == [[0, 1, 1, 1, 0]]
    assert 'attention_mask' not in row
    assert packing_of(row).boundaries.tolist() == [0, 2, 5]


@pytest.mark.parametrize('given_', [False, True])
def test_a_sample_without_tokens_is_one_sequence_without_a_trained_token(given_):
    masks = {'completion_mask': [torch.ones(n).long() for n in (2, 0, 1, 0)]} if given_ else {}
    row = packed_row(samples(2, 0, 1, 0, **masks), ignore_index=-7)
    assert row['labels'].tolist() == [[0, 1, -7, 20, -7]]
    assert row['completion_mask'].tolist() == [[1, 1, 0, 1, 0]]
    whole = WholeRows.of(row, -7)
    assert whole.count == 4
    assert whole.tokens.tolist() == [2, 0, 1, 0]
    only = packed_row(samples(0, 0))
    assert WholeRows.of(only, -100).tokens.tolist() == [0, 0]
    assert only['input_ids'].shape == (1, 2)


def test_labels_of_whole_sequences_are_stacked_and_never_taken_for_those_of_tokens():
    for entry in (torch.tensor(1), torch.rand(3)):
        row = packed_row([{'input_ids': torch.arange(3), TARGETS: entry + i} for i in range(2)])
        assert row['input_ids'].shape == (1, 6)
        assert torch.equal(row[TARGETS], torch.stack([entry, entry + 1]))


@pytest.mark.parametrize(
    ('changed', 'message'),
    [
        ({'attention_mask': [torch.ones(2), torch.tensor([1, 1, 0])]}, 'of 3 tokens masks 1; leave its padding out'),
        ({'labels': [torch.arange(2), torch.arange(2)]}, "'labels' of each sample must have the length"),
        ({'cu_seqlens': [torch.arange(2), torch.arange(2)]}, r"must be 2-D, \[1, T\], beside its 'cu_seqlens'"),
    ],
)
def test_samples_that_cannot_be_packed_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        packed_row(samples(2, 3, **changed))


def test_samples_of_a_row_have_the_same_keys():
    first, second = samples(2, 3)
    with pytest.raises(ValueError, match='must have the same keys'):
        packed_row([first, {**second, 'weight': torch.rand(3)}])


@quickly
@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(6, 30), st.integers(0, 3), st.data())
def test_what_is_found_comes_back_sample_by_sample_in_input_order(lengths, budget, more, data):
    half = len(lengths) // 2
    layout = data.draw(st.sampled_from([None] + ['interleaved', 'separated'] * (len(lengths) % 2 == 0)))
    given_ = samples(*lengths)
    units = units_of(given_, layout, False)
    budget = max([budget, *units.tokens])
    bins = balanced(units.tokens, least_bins(units.tokens, budget) + more, budget)
    order = [one for one in samples_of_bins(units, bins, layout) if one]
    rows = [packed_row([given_[i] for i in one]) for one in order]
    assert all(row['input_ids'].shape[1] <= budget for row in rows)
    found = in_input_order([row['input_ids'] for row in rows], order, lengths)
    assert [one.tolist() for one in found] == [one['input_ids'].tolist() for one in given_]
    numbers = in_input_order([torch.tensor(one) for one in order], order, None)
    assert torch.stack(numbers).tolist() == list(range(len(lengths)))
    vectors = in_input_order([torch.tensor(one)[:, None].expand(-1, 2) for one in order], order, None)
    assert [one.tolist() for one in vectors] == [[i, i] for i in range(len(lengths))]
    if layout == 'separated':
        assert all((i < half) == (place < len(one) // 2) for one in order for place, i in enumerate(one))


def test_without_results_nothing_comes_back():
    """On a stage that is not the last."""
    assert in_input_order([], [[0, 1], [2]], [3, 4, 5]) == []


# ---- what ranks agree on


def _agree(failing):
    rank, world = dist.get_rank(), dist.group.WORLD
    error = ValueError('of rank 1') if failing and rank == 1 else None
    return agreed_bins(3 - rank, Groups(dp=world, dp_cp=world), error)


def test_all_ranks_have_as_many_bins_as_the_one_that_needs_most():
    assert run_ranks(_agree, 2, False) == [3, 3]
    assert agreed_bins(2, Groups()) == 2


def test_an_error_of_one_rank_is_raised_on_all():
    for outcome in run_ranks(_agree, 2, True, collect_errors=True):
        assert (outcome.error, outcome.message) == ('ValueError', 'on rank 1: of rank 1')
    with pytest.raises(ValueError, match='mine'):
        agreed_bins(2, Groups(), ValueError('mine'))
