"""Process groups and errors that reach every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from twinkle_megatron.groups import (
    Groups,
    all_gather_rows,
    group_rank,
    group_size,
    raise_together,
    reduce_scatter_rows,
    sum_over,
    tensor_parallel_group,
)


def test_one_process_needs_no_groups():
    groups = Groups()
    assert (groups.size, groups.is_last_stage, groups.owns_result) == (1, True, True)
    assert group_size(None) == 1
    assert group_rank(None) == 0
    assert all_gather_rows(torch.ones(2), None).tolist() == [[1, 1]]
    x = torch.ones(3, 2)
    assert sum_over(x, None) is x
    assert reduce_scatter_rows(x, None) is x
    assert groups.gather_everyone(torch.ones(2)).tolist() == [[1, 1]]
    assert groups.gather_objects('x') == ['x']
    raise_together(groups, None)
    with pytest.raises(KeyError, match='on rank 0'):
        raise_together(groups, KeyError('a'))


def test_without_megatron_there_is_a_clear_error():
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    assert tensor_parallel_group() is None
    with pytest.raises(ValueError, match='initialize_model_parallel'):
        Groups.from_megatron()
    with pytest.raises(ValueError, match='lacks tp, cp, pp, dp, dp_cp'):
        Groups.from_megatron(object())


@pytest.mark.parametrize('whole_world', [True, False])
def test_everyone_is_gathered_once_over_the_world_or_group_by_group(whole_world):
    """A layout of 2 × 2 ranks inside a world of 4, or of 5 with a rank that is not part of it."""
    n = 4 if whole_world else 5
    for rank, result in enumerate(run_ranks(_gather, n)):
        if rank < 4:
            rows, objects, error = result
            assert sorted(rows) == [[r, 10.0 * r] for r in range(4)]
            assert sorted(objects) == [0, 1, 2, 3]
            assert error == 'ValueError: on rank 2: only here'


def _gather():
    rank = dist.get_rank()
    pairs = {'tp': [(0, 1), (2, 3)], 'pp': [(0, 2), (1, 3)]}
    made = {name: [dist.new_group(ranks) for ranks in both] for name, both in pairs.items()}
    if rank == 4:
        return None
    mine = {name: next(g for g, ranks in zip(made[name], pairs[name]) if rank in ranks) for name in pairs}
    groups = Groups(tp=mine['tp'], pp=mine['pp'])
    rows = groups.gather_everyone(torch.tensor([float(rank), 10.0 * rank])).tolist()
    error = ''
    try:
        raise_together(groups, ValueError('only here') if rank == 2 else None)
    except ValueError as caught:
        error = f'{type(caught).__name__}: {caught}'
    return rows, groups.gather_objects(rank), error


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_sums_over_ranks_are_the_same_bits_on_all_and_slices_of_one_sum(dtype):
    """Of any memory layout, with no rows too, over a group of some ranks beside another."""
    g = torch.Generator().manual_seed(0)
    parts = torch.randint(-8, 9, (4, 6, 5), generator=g).to(dtype)

    def on_rank():
        rank = dist.get_rank()
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine, x = groups[rank % 2], parts[rank]
        found = [sum_over(y.clone(), mine) for y in (x, x.T, x[:, 0], x[:0], x[0, 0])]
        scattered = [reduce_scatter_rows(y, mine) for y in (x, x.T[:4], x[::3], x[:, 0], x[:0])]
        assert torch.equal(x, parts[rank])  # a reduce-scatter writes to nothing
        inside = reduce_scatter_rows(x.clone(), mine, overwrite=True)
        assert inside.untyped_storage().nbytes() == x.nbytes, 'no memory of its own'
        return found, [*scattered, inside.clone()]

    for rank, (found, scattered) in enumerate(run_ranks(on_rank, 4)):
        want = parts[rank % 2] + parts[rank % 2 + 2]
        for got, expected in zip(found, (want, want.T, want[:, 0], want[:0], want[0, 0]), strict=True):
            assert torch.equal(got, expected)
        slices = (want, want.T[:4], want[::3], want[:, 0], want[:0], want)
        for got, expected in zip(scattered, slices, strict=True):
            assert torch.equal(got, expected.chunk(2)[rank // 2] if len(expected) else expected)
        assert all(got.dtype == dtype for got in (*found, *scattered))


def test_sums_over_ranks_are_bitwise_alike_where_they_are_rounded():
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    found = run_ranks(lambda: sum_over(x[dist.get_rank()].clone(), dist.group.WORLD), 3)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], x.double().sum(0).float())
