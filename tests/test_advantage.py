"""Advantages in groups on one process: the formula, exact zeros, what is taken and what is refused."""

import math
from statistics import mean, pstdev, stdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_megatron.advantage import group_advantages, summed_rewards

EPSILON = 1e-8
SCALES = ['group', 'batch', 'none']


def reference(rewards: list, ids: list, scale: str = 'group', leave_one_out: bool = False, ddof: int = 1) -> list:
    """Sample by sample, from Python's own statistics."""
    deviation = {0: pstdev, 1: stdev}[ddof]
    result = []
    for i, reward in enumerate(rewards):
        group = [r for r, k in zip(rewards, ids) if k == ids[i]]
        others = [r for j, (r, k) in enumerate(zip(rewards, ids)) if k == ids[i] and j != i]
        if len(set(group)) == 1:
            result.append(0.0)
            continue
        baseline = mean(others) if leave_one_out else mean(group)
        spread = {'group': group, 'batch': rewards}.get(scale)
        result.append((reward - baseline) / (deviation(spread) + EPSILON if spread else 1.0))
    return result


def random_rewards(n: int, seed: int = 0) -> list[float]:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


def by_position(n: int, size: int) -> list[int]:
    return [i // size for i in range(n)]


@pytest.mark.parametrize('leave_one_out', [False, True])
@pytest.mark.parametrize('ddof', [0, 1])
@pytest.mark.parametrize('scale', SCALES)
def test_the_formula(scale, ddof, leave_one_out):
    options = {'scale': scale, 'leave_one_out': leave_one_out, 'ddof': ddof}
    rewards = random_rewards(12)
    result = group_advantages(rewards, 4, **options)
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx(reference(rewards, by_position(12, 4), **options), rel=1e-12)
    ids = ['b', 'a', 'b', 'c', 'b', 'a', 'd', 'a', 'b', 'a', 'd', 'b']
    result = group_advantages(rewards, 4, ids, **options)
    assert result.tolist() == pytest.approx(reference(rewards, ids, **options), rel=1e-12)


def test_hand_computed_numbers():
    rewards = [0.0, 1.0, 0.0, 3.0]
    assert group_advantages(rewards, 4, scale='none').tolist() == [-1, 0, -1, 2]
    assert group_advantages(rewards, 4, scale='none', leave_one_out=True).tolist() == pytest.approx(
        [-4 / 3, 0, -4 / 3, 8 / 3], rel=1e-15
    )
    assert group_advantages(rewards, 4, epsilon=0).tolist() == pytest.approx(
        [x / math.sqrt(2) for x in (-1, 0, -1, 2)], rel=1e-15
    )
    assert group_advantages(rewards, 4, ddof=0, epsilon=0.5).tolist() == pytest.approx(
        [x / (math.sqrt(1.5) + 0.5) for x in (-1, 0, -1, 2)], rel=1e-15
    )
    assert group_advantages(rewards, 2, scale='batch', epsilon=0).tolist() == pytest.approx(
        [x / math.sqrt(2) for x in (-0.5, 0.5, -1.5, 1.5)], rel=1e-15
    )


@pytest.mark.parametrize('epsilon', [0, 1e-8])
@pytest.mark.parametrize('scale', SCALES)
@pytest.mark.parametrize('n', [1, 3, 7, 8])
@pytest.mark.parametrize('value', [0.1, 0.7, 1 / 3, -1e9, 0.0])
def test_equal_rewards_give_exactly_0(value, n, scale, epsilon):
    for leave_one_out in (False, True):
        options = {'scale': scale, 'epsilon': epsilon, 'leave_one_out': leave_one_out}
        assert group_advantages([value] * n, n, **options).tolist() == [0.0] * n
        mixed = group_advantages([value] * n + [1.0, 2.0], 1, ['x'] * n + ['y', 'y'], **options)
        assert mixed[:n].tolist() == [0.0] * n
        assert (mixed[n:] != 0).all()


def test_a_far_offset_costs_no_precision():
    rewards = [1e9 + k for k in (0.0, 1.0, 0.0, 3.0)]
    assert group_advantages(rewards, 4, epsilon=0).tolist() == pytest.approx(
        [x / math.sqrt(2) for x in (-1, 0, -1, 2)], rel=1e-14
    )


@pytest.mark.parametrize('form', [
    torch.tensor, lambda r: torch.tensor(r, dtype=torch.bfloat16), lambda r: torch.tensor(r).requires_grad_(),
    np.array, lambda r: np.array(r[::-1], dtype=np.float32)[::-1], tuple, lambda r: [torch.tensor(x) for x in r],
    lambda r: [torch.tensor(x, dtype=torch.float16) for x in r], lambda r: list(np.array(r)),
    lambda r: torch.tensor([[x, 0.25, -0.25] for x in r]), lambda r: [[x - 1, 1] for x in r],
    lambda r: [torch.tensor([x - 1, 1]) for x in r], lambda r: [(torch.tensor(x), 0) for x in r],
])  # fmt: skip
def test_every_form_of_rewards(form):
    rewards = [0.5, 1.0, 0.0, 2.0]
    result = group_advantages(form(rewards), 2)
    assert result.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, -(0.5**0.5), 0.5**0.5], rel=1e-6)
    assert result.dtype == torch.float64
    assert not result.requires_grad
    assert group_advantages([True, False], 2, scale='none').tolist() == [0.5, -0.5]


def test_components_in_another_order_sum_to_equal_rewards():
    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
    assert group_advantages([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], 2, epsilon=0).tolist() == [0, 0]
    assert summed_rewards([[1e16, 1.0, -1e16]]).tolist() == [1.0]


def test_rewards_are_not_written_to():
    rewards, array = torch.tensor([1.0, 2.0], dtype=torch.float64), np.array([1.0, 2.0])
    group_advantages(rewards, 2).zero_()
    group_advantages(array, 2).zero_()
    summed_rewards(array).zero_()
    summed_rewards(rewards).zero_()
    assert rewards.tolist() == array.tolist() == [1.0, 2.0]


@pytest.mark.parametrize('ids', [
    [7, 3, 7], ['p', 'q', 'p'], torch.tensor([7, 3, 7]), np.array([7, 3, 7]), np.array(['p', 'q', 'p']), (7, 'p', 7),
    [torch.tensor(7), 3, np.int64(7)], [2**80, 1, 2**80],
])  # fmt: skip
def test_every_form_of_ids(ids):
    assert group_advantages([1.0, 5.0, 3.0], 2, ids, scale='none').tolist() == [-1, 0, 1]


def test_no_samples():
    for rewards in ([], torch.zeros(0), torch.zeros(0, 3)):
        for ids in (None, []):
            for scale in SCALES:
                assert group_advantages(rewards, 4, ids, scale).shape == (0,)


@pytest.mark.parametrize(('arguments', 'message'), [
    (([1.0] * 5, 4), 'num_generations=4, but 5 samples leave 1 over'),
    (([1.0, math.nan, math.inf], 3), r'rewards\[1\] must be finite, got nan, and so must 1 others'),
    (([[1.0, math.inf], [1.0, -math.inf]], 2), r'rewards\[0\] must be finite, got inf'),
    (([1.0], 0), 'num_generations must be an int of at least 1, got 0'),
    (([1.0], 1.0), 'num_generations must be an int of at least 1, got 1.0'),
    (([1.0], 1, None, 'groups'), "scale must be 'group', 'batch' or 'none', got 'groups'"),
    (([1.0, None], 2), 'rewards must be numbers in a list, an array or a tensor, got a list of NoneType, float'),
    (('11', 2), 'rewards must be numbers .* got a str'),
    (({'a': [1.0]}, 1), 'rewards must be numbers .* got a dict'),
    (([[1.0], [1.0, 2.0]], 2), 'rewards must hold one number, or equally many components, a sample'),
    ((3.0, 1), r'rewards must have shape \[n\], or \[n, k\] for k components, got \[\]'),
    ((torch.zeros(2, 2, 2), 1), r'got \[2, 2, 2\]'),
    ((torch.zeros(2, 0), 1), r'got \[2, 0\]'),
    ((torch.zeros(2, dtype=torch.complex64), 1), 'rewards must be numbers'),
    (([1.0, 2.0], 2, ['a']), 'group_ids must hold one id for each of the 2 rewards, got 1'),
    (([1.0, 2.0], 2, ['a', None]), r'group_ids\[1\] must be an int or a str, got the NoneType None'),
    (([1.0, 2.0], 2, torch.tensor([0.0, 1.0])), r'group_ids\[0\] must be an int or a str, got the float 0.0'),
    (([1.0, 2.0], 2, 'ab'), 'group_ids must be a list, a tensor or an array, got str'),
])  # fmt: skip
def test_a_wrong_call_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(*arguments)


@pytest.mark.parametrize('options', [{'ddof': 2}, {'epsilon': -1.0}, {'epsilon': math.nan}])
def test_wrong_settings(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        group_advantages([1.0], 1, **options)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_permutation_of_the_samples_permutes_the_advantages(data):
    values = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
    samples = data.draw(st.lists(st.tuples(values, st.integers(0, 4)), min_size=1, max_size=20))
    order = data.draw(st.permutations(range(len(samples))))
    options = {'scale': data.draw(st.sampled_from(SCALES)), 'leave_one_out': data.draw(st.booleans())}
    rewards, ids = [r for r, _ in samples], [k for _, k in samples]
    result = group_advantages(rewards, 1, ids, **options)
    assert result.tolist() == pytest.approx(reference(rewards, ids, **options), rel=1e-9, abs=1e-9)
    permuted = group_advantages([rewards[i] for i in order], 1, [ids[i] for i in order], **options)
    assert permuted.tolist() == pytest.approx(result[torch.tensor(order)].tolist(), rel=1e-9, abs=1e-9)
