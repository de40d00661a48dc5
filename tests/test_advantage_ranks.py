"""Advantages in groups over ranks: any split gives one process's numbers, errors reach every rank."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import device, run_ranks

from tests.metric.layouts import Collectives, groups_of, world_of
from tests.test_advantage import SCALES, by_position, random_rewards, reference
from twinkle_megatron.advantage import group_advantages
from twinkle_megatron.groups import group_rank, group_size


def spread(counts: list[int], cases: list[tuple]) -> list[tuple[list[float], list[str]]]:
    """Each case is (rewards of all, ids of all or None, num_generations, options); each rank holds its count."""
    start = sum(counts[: dist.get_rank()])
    mine = slice(start, start + counts[dist.get_rank()])
    results = []
    for rewards, ids, size, options in cases:
        with Collectives() as calls:
            part = None if ids is None else ids[mine]
            own = torch.tensor(rewards, dtype=torch.float64, device=device())[mine]
            result = group_advantages(own, size, part, group=dist.group.WORLD, **options)
            assert result.device == own.device
        results.append((result.tolist(), calls))
    return results


@pytest.mark.parametrize('counts', [[8, 4, 12], [3, 0, 21], [0, 24, 0], [5, 9, 10], [24, 0, 0, 0]], ids=str)
def test_any_split_over_ranks_gives_what_one_process_gives(counts):
    rewards, position = random_rewards(24), by_position(24, 4)
    ids = [str(i % 5) for i in range(24)]
    options = [{'scale': scale, 'leave_one_out': loo} for scale in SCALES for loo in (False, True)]
    cases = [(rewards, k, 4, o) for o in options for k in (None, ids)]
    per_rank = run_ranks(spread, len(counts), counts, cases)
    whole = all(count % 4 == 0 for count in counts)
    for case, (all_rewards, k, size, o) in enumerate(cases):
        joined = [x for results in per_rank for x in results[case][0]]
        assert [len(results[case][0]) for results in per_rank] == counts
        assert joined == group_advantages(all_rewards, size, k, **o).tolist()  # bitwise
        assert joined == pytest.approx(reference(rewards, k or position, **o), rel=1e-12)
        local = k is None and whole and o['scale'] != 'batch'
        expected = ['all_gather'] if local else ['all_gather'] * 2 + ['all_gather_object'] * (k is not None)
        assert [results[case][1] for results in per_rank] == [expected] * len(counts)


def test_groups_by_position_run_rank_after_rank():
    """Rank 0 holds three samples of the first group, rank 1 its last one and the second group."""
    case = ([1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 6.0, 6.0], None, 4, {'scale': 'none'})
    first, second = run_ranks(spread, 2, [3, 5], [case])
    assert first[0][0] == [0.5, -0.5, -0.5]
    assert second[0][0] == [0.5, -0.5, -0.5, 0.5, 0.5]


def test_ids_hold_round_robin_groups_together_and_an_empty_rank_needs_none():
    results = run_ranks(round_robin, 3)
    assert results == [[-1.0, -2.0], [1.0, 2.0], []]


def round_robin() -> list[float]:
    rank = dist.get_rank()
    rewards, ids = [([1.0, 10.0], ['a', 'b']), ([3.0, 14.0], ['a', 'b']), ([], None)][rank]
    return group_advantages(rewards, 2, ids, scale='none', group=dist.group.WORLD).tolist()


def test_without_a_group_ranks_are_on_their_own():
    assert run_ranks(alone, 2) == [([-0.5, 0.5], []), ([-1.0, 1.0], [])]


def alone() -> tuple[list[float], list[str]]:
    with Collectives() as calls:
        rank = dist.get_rank()
        result = group_advantages([0.0, 1.0 + rank], 2, ['a', 'a'], scale='none')
    return result.tolist(), calls


REWARDS_512 = random_rewards(512)


def replicas(layout: str) -> dict[str, Any]:
    groups = groups_of(layout)
    dp, n = group_rank(groups.dp), group_size(groups.dp)
    cut = [0, *(512 * (k + 1) // n - 3 * (k + 1 < n) for k in range(n))]  # groups of 4 span the ranks
    mine = slice(cut[dp], cut[dp + 1])
    ids = [f'prompt {i % 100}' for i in range(512)]
    return {
        'own': mine,
        'position': group_advantages(REWARDS_512[mine], 4, group=groups).tolist(),
        'batch': group_advantages(REWARDS_512[mine], 4, scale='batch', group=groups).tolist(),
        'ids': group_advantages(REWARDS_512[mine], 4, ids[mine], group=groups).tolist(),
    }


@pytest.mark.parametrize('layout', ['tp2 cp2', 'tp2 pp2', 'cp2 pp2', 'tp2 dp2', 'cp2 dp2', 'dp2 pp2'])
def test_case_53_replicas_are_not_gathered_and_samples_stay_in_order(layout):
    ids = [i % 100 for i in range(512)]
    expected = {
        'position': reference(REWARDS_512, by_position(512, 4)),
        'batch': reference(REWARDS_512, by_position(512, 4), 'batch'),
        'ids': reference(REWARDS_512, ids),
    }
    held = set()
    for result in run_ranks(replicas, world_of(layout), layout):
        own = result.pop('own')
        held.update(range(512)[own])
        for name, values in result.items():
            assert values == pytest.approx(expected[name][own], rel=1e-11)
    assert held == set(range(512))


def wrong(case: str) -> None:
    rank, ok = dist.get_rank(), [1.0, 2.0]
    arguments: dict[str, Any] = {
        'nan': (ok if rank != 1 else [1.0, math.nan], 2),
        'left over': ([1.0] * (2 + rank), 2),
        'sizes': (ok, 1 + rank),
        'scales': (ok, 2, None, SCALES[rank]),
        'ids': (ok, 2, ['a', 'a'] if rank else None),
        'type': (ok if rank != 2 else [1.0, 'x'], 2),
        'id count': (ok, 2, ['a'] * (2 + rank % 2)),
    }[case]
    group_advantages(*arguments, group=dist.group.WORLD)


@pytest.mark.parametrize(('case', 'message'), [
    ('nan', r'on rank 1: rewards\[1\] must be finite, got nan'),
    ('left over', r'but 9 samples \(2 + 3 + 4 over 3 ranks\) leave 1 over'),
    ('sizes', r'must be the same on every rank, got [1, 2, 3]'),
    ('scales', "['group', 'batch', 'none']"),
    ('ids', 'group_ids must be given on every rank that has samples, but ranks [0] have none'),
    ('type', 'on rank 2: rewards must be numbers'),
    ('id count', 'on rank 1: group_ids must hold one id for each of the 2 rewards, got 3'),
])  # fmt: skip
def test_an_error_on_one_rank_is_raised_on_all(case, message):
    for outcome in run_ranks(wrong, 3, case, collect_errors=True, timeout=20):
        assert outcome.error == 'ValueError'
        assert message.replace('\\', '') in outcome.message


def drawn_splits() -> list[tuple]:
    """Examples and this rank's advantages; every rank draws the same examples, and none fails here."""
    seen = []

    @settings(derandomize=True, database=None, deadline=None, max_examples=60)
    @given(st.data())
    def draw(data):
        size = data.draw(st.integers(1, 5))
        n = size * data.draw(st.integers(0, 5))
        cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))
        rewards = data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.5]), min_size=n, max_size=n))
        ids = data.draw(st.none() | st.lists(st.sampled_from(['a', 'b', 7]), min_size=n, max_size=n))
        options = {'scale': data.draw(st.sampled_from(SCALES)), 'leave_one_out': data.draw(st.booleans())}
        start, end = ([0, *cuts, n][k] for k in (dist.get_rank(), dist.get_rank() + 1))
        part = None if ids is None else ids[start:end]
        own = group_advantages(rewards[start:end], size, part, group=dist.group.WORLD, **options)
        seen.append(((rewards, size, ids, options), own.tolist()))

    draw()
    return seen


def test_drawn_splits_over_ranks_give_what_one_process_gives():
    per_rank = run_ranks(drawn_splits, 3)
    assert len({len(examples) for examples in per_rank}) == 1
    for parts in zip(*per_rank):
        rewards, size, ids, options = parts[0][0]
        assert [example for example, _ in parts] == [parts[0][0]] * 3
        joined = [x for _, own in parts for x in own]
        assert joined == group_advantages(rewards, size, ids, **options).tolist()
        expected = reference(rewards, ids or by_position(len(rewards), size), **options)
        assert joined == pytest.approx(expected, rel=1e-12, abs=1e-15)
