"""CompletionRewardMetric over calls and ranks: any split gives one process's numbers, replicas count once."""

from statistics import mean, stdev
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import DEVICE, device, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from tests.metric.layouts import Collectives, groups_of, world_of
from twinkle_megatron.groups import Groups, group_rank, group_size
from twinkle_megatron.metric import CompletionRewardMetric


def spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def reference(samples: list[dict[str, float]], lengths: list[float]) -> dict[str, float]:
    """The floats of a run in which each sample has rewards by name."""
    figures: dict[str, float] = {}
    if samples:
        totals = [sum(sample.values()) for sample in samples]
        figures |= {'mean_reward': mean(totals), 'reward_std': spread(totals)}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values = [sample[name] for sample in samples if name in sample]
        figures |= {f'train/{name}_reward': mean(values), f'train/{name}_reward_std': spread(values)}
    if lengths:
        figures |= {'mean_completion_length': mean(lengths), 'completion_length_std': spread(lengths)}
        figures['train/completion_length'] = mean(lengths)
    return figures


class Joined(CompletionRewardMetric):
    """Ranks of one process: each gathers the items of all."""

    ranks: list['Joined']

    def gather_results(self, local_results: list[Any]) -> list[Any]:
        return [rank._seen for rank in self.ranks]


VALUES = st.floats(-1e6, 1e6).map(lambda x: round(x, 2))
NAMES = st.sampled_from([('a',), ('a', 'b'), ('c',)])
CALLS = st.tuples(NAMES, st.lists(st.tuples(VALUES, VALUES, st.integers(0, 9))))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(CALLS, max_size=3), min_size=1, max_size=4))
def test_any_split_over_calls_and_ranks_gives_the_same_numbers(ranks):
    """Ranks of calls of samples; each call has its own reward names."""
    metrics = [Joined() for _ in ranks]
    samples, lengths = [], []
    for metric, calls in zip(metrics, ranks):
        metric.ranks = metrics
        for names, rows in calls:
            called = [dict(zip(names, row)) for row in rows]
            rewards = {name: [sample[name] for sample in called] for name in names}
            metric.accumulate(None, None, rewards=rewards, completions=[row[2] for row in rows])
            samples, lengths = samples + called, lengths + [row[2] for row in rows]
    expected = reference(samples, lengths)
    assert all(metric.values() == metrics[0].values() for metric in metrics)  # bitwise
    assert metrics[0].values() == pytest.approx(expected, rel=1e-9, abs=1e-7)
    assert list(metrics[0].values()) == list(metrics[-1].values())


SAMPLES = 512
REWARDS = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LENGTHS = torch.randint(1, 900, (SAMPLES,), generator=torch.Generator().manual_seed(2))


def dealt(layout: str) -> list[tuple]:
    groups = groups_of(layout)
    return [dealt_over(groups, group) for group in (groups.dp_cp, groups.dp, None)]


def dealt_over(groups: Groups, group: dist.ProcessGroup | None) -> tuple:
    """The samples dealt out unevenly over data parallel ranks in two calls each, the last rank without any."""
    metric = CompletionRewardMetric(groups, group)
    dp, holders = group_rank(groups.dp), max(group_size(groups.dp) - 1, 1)
    cut = SAMPLES // 3
    for half in (slice(0, cut), slice(cut, SAMPLES)):
        own = slice(dp, None, holders) if dp < holders else slice(0, 0)
        rewards = {'a': REWARDS[half][own].to(device()), f'of rank {dp}': REWARDS[half][own] ** 2}
        metric.accumulate(None, None, rewards=rewards, completions=LENGTHS[half][own].to(device()))
    if dp < holders:
        metric.accumulate(None, None, generation_time=1.0 + dist.get_rank())  # replicas measure their own
    with Collectives() as calls:
        values = metric.values()
    return values, metric.calculate(), metric.calculate(), calls


@pytest.mark.parametrize('layout', ['dp4', 'tp2 cp2', 'tp2 pp2', 'cp2 pp2', 'tp2 dp2', 'cp2 dp2', 'dp2 pp2', 'dp3'])
def test_case_53_each_sample_counts_once_on_every_layout(layout):
    results = run_ranks(dealt, world_of(layout), layout)
    totals, holders = (REWARDS + REWARDS**2).tolist(), {'dp4': 3, 'dp3': 2}.get(layout, 1)
    for values, display, again, _ in results[0]:
        assert values['mean_reward'] == pytest.approx(mean(totals), rel=1e-12)
        assert values['reward_std'] == pytest.approx(stdev(totals), rel=1e-12)
        assert values['train/a_reward'] == pytest.approx(mean(REWARDS.tolist()), rel=1e-10)
        assert values['train/a_reward_std'] == pytest.approx(stdev(REWARDS.tolist()), rel=1e-12)
        assert values['mean_completion_length'] == pytest.approx(mean(LENGTHS.tolist()), rel=1e-12)
        assert values['completion_length_std'] == pytest.approx(stdev(LENGTHS.tolist()), rel=1e-12)
        assert {name for name in values if name.startswith('train/of')} == {
            f'train/of rank {dp}_reward{end}' for dp in range(holders) for end in ('', '_std')
        }
        assert display['mean_reward'] == f'{mean(totals):.4f}'
        assert again == {}
    for mine in results:
        for (values, display, *_), (first, shown, *_) in zip(mine, results[0], strict=True):
            assert list(values.items()) == list(first.items())  # bitwise, in the same order
            assert display == shown


@pytest.mark.parametrize(('layout', 'times', 'over_dp_cp', 'over_dp'), [
    ('dp3', [1, 2], ['all_gather_object'], ['all_gather_object']),
    ('cp2 dp2', [1], ['all_gather_object'], ['all_gather_object', 'broadcast_object_list']),
    ('tp2 cp2', [1], ['all_gather_object', 'broadcast_object_list'], ['all_gather_object', 'broadcast_object_list']),
    ('tp2 pp2', [3], ['broadcast_object_list'] * 2, ['broadcast_object_list'] * 2),
])  # fmt: skip
def test_times_are_a_mean_over_calls_and_data_parallel_ranks(layout, times, over_dp_cp, over_dp):
    for results in run_ranks(dealt, world_of(layout), layout):
        assert [result[0]['generation_time'] for result in results] == [mean(times)] * 3
        assert [result[3] for result in results] == [over_dp_cp, over_dp, over_dp_cp]


def padded_sampler() -> dict[str, Any]:
    metric = CompletionRewardMetric(None, dist.group.WORLD)
    own = ([1, 3, 5, 7], [2, 4, 6])[dist.get_rank()]  # without the sample that a sampler repeats
    metric.accumulate(None, None, rewards=own, completions=own)
    return metric.calculate()


def test_case_59_rank_means_are_not_averaged():
    deviation = f'{stdev(range(1, 8)):.4f}'
    assert run_ranks(padded_sampler, 2) == [{
        'mean_reward': '4.0000', 'reward_std': deviation, 'mean_completion_length': '4.0000',
        'completion_length_std': deviation, 'train/completion_length': 4.0,
    }] * 2  # fmt: skip


def torch_mesh() -> dict[str, float]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=('dp', 'cp'))
    metric = CompletionRewardMetric(mesh, dist.group.WORLD)
    metric.accumulate(None, None, rewards=[1.0, 2.0, 6.0] if dist.get_rank() < 2 else [7.0])
    return metric.values()


def test_a_torch_device_mesh_tells_context_parallel_replicas():
    assert run_ranks(torch_mesh, 4) == [{'mean_reward': 4.0, 'reward_std': pytest.approx(stdev([1, 2, 6, 7]))}] * 4


def silent() -> tuple:
    metric = CompletionRewardMetric(None, dist.group.WORLD)
    if dist.get_rank() == 1:
        metric.accumulate(None, None, rewards={'a': [2.0]})
    return metric.values(), metric.calculate(), metric.values()


def test_a_rank_that_gave_nothing_has_the_same_keys():
    floats = {'mean_reward': 2.0, 'reward_std': 0.0, 'train/a_reward': 2.0, 'train/a_reward_std': 0.0}
    shown = floats | {'mean_reward': '2.0000', 'reward_std': '0.0000'}
    assert run_ranks(silent, 3) == [(floats, shown, {})] * 3
