"""Metrics over tensor, context, pipeline and data parallel ranks: one process's numbers, on every rank."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import DEVICE, RankFailure, device, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from tests.metric.layouts import BATCHES, TOKENS, TOTAL, Collectives, groups_of, share, world_of
from tests.metric.metric_data import VOCAB, counts, shown
from twinkle_megatron.groups import Groups, group_rank, group_size
from twinkle_megatron.metric import MAXIMUM, MINIMUM, SUM, Accuracy, LossMetric, Metric, TrainMetric
from twinkle_megatron.vocab_parallel import VocabShard, token_stats

LAYOUTS = ['dp2', 'dp4', 'tp2', 'tp2 dp2', 'cp2', 'cp2 dp2', 'pp2', 'dp2 pp2', 'tp2 pp2', 'cp2 pp2', 'tp2 cp2']
FORMS = ['shard', 'given shard', 'list', 'sweep']


def shard_of(groups: Groups) -> VocabShard:
    return VocabShard.from_group(VOCAB // group_size(groups.tp), groups.tp)


def labels_of(inputs: dict[str, Any]) -> torch.Tensor:
    mask = inputs.get('completion_mask', torch.ones_like(inputs['labels']))
    return torch.where(mask != 0, inputs['labels'], -100)


def accuracy_cases(layout: str) -> list[tuple]:
    groups = groups_of(layout)
    return [accuracy_case(groups, form) for form in FORMS]


def accuracy_case(groups: Groups, form: str) -> tuple:
    metric = Accuracy(groups, groups.dp_cp)
    shard = shard_of(groups)
    batches = share(groups) if groups.is_last_stage else []
    if form == 'given shard':
        batches = [(inputs, {**outputs, 'vocab_shard': shard}) for inputs, outputs in batches]
    if form == 'sweep':
        swept = [token_stats(o['logits'], labels_of(i), shard=shard, argmax=True) for i, o in batches]
        batches = [(inputs, {'token_stats': stats}) for (inputs, _), stats in zip(batches, swept)]
    if form == 'list':
        batches = [([inputs for inputs, _ in batches], [outputs for _, outputs in batches])]
    for inputs, outputs in batches:
        metric.accumulate(inputs, outputs)
    return metric.values(), metric.calculate(), metric.calculate()


def loss_cases(layout: str) -> list[tuple]:
    groups = groups_of(layout)
    return [loss_case(groups, *case) for case in (('sum', 'single'), ('mean', 'single'), ('mean', 'list'))]


def loss_case(groups: Groups, reduction: str, form: str) -> tuple:
    metric = LossMetric(groups, groups.dp_cp)
    calls = []
    for inputs, outputs in share(groups) if groups.is_last_stage else []:
        labels = labels_of(inputs)
        loss = -token_stats(outputs['logits'], labels, shard=shard_of(groups)).log_prob.sum()
        count = (labels != -100).sum()
        calls.append((inputs, {'loss': loss / count} if reduction == 'mean' else {'loss': loss, 'num_tokens': count}))
    if form == 'list':
        calls = [([inputs for inputs, _ in calls], [outputs for _, outputs in calls])]
    for inputs, outputs in calls:
        metric.accumulate(inputs, outputs, loss_reduction=reduction)
    metric.on_step(grad_norm=torch.tensor(1.0 + group_rank(groups.dp_cp), device=device()))
    return metric.values(), metric.calculate(), metric.calculate()


@pytest.mark.parametrize('layout', LAYOUTS)
def test_case_33_accuracy_is_that_of_one_process_on_every_rank(layout):
    correct, total = counts(BATCHES)
    floats = {'accuracy': correct / total, 'correct_tokens': correct, 'total_tokens': total}
    results = run_ranks(accuracy_cases, world_of(layout), layout)
    assert results == [[(floats, shown(correct, total), {})] * len(FORMS)] * world_of(layout)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_case_60_loss_is_that_of_one_process_on_every_rank(layout):
    results = run_ranks(loss_cases, world_of(layout), layout)
    assert results == [results[0]] * world_of(layout)  # bitwise
    for floats, display, again in results[0]:
        assert floats['loss'] == pytest.approx(TOTAL / TOKENS, rel=1e-14)
        assert display == {'loss': f'{TOTAL / TOKENS:.4f}', 'grad_norm': f'{group_count(layout):.6f}'}
        assert again == {'loss': '0.0000'}


def group_count(layout: str) -> int:
    return math.prod(int(part[2:]) for part in layout.split() if part[:2] in ('dp', 'cp'))


def unequal_means() -> dict[str, str]:
    rank = dist.get_rank()
    metric = LossMetric(None, dist.group.WORLD)
    metric.accumulate({'labels': [1] * (2, 6)[rank] + [-100]}, {'loss': (3.0, 0.5)[rank]})
    return metric.calculate()


def test_case_27_mean_of_means_over_ranks():
    assert run_ranks(unequal_means, 2) == [{'loss': '1.1250'}] * 2


def padded_sampler() -> dict[str, str]:
    rank = dist.get_rank()
    metric = LossMetric(None, dist.group.WORLD)
    for value in (1, 3, 5, 7) if rank == 0 else (2, 4, 6):
        metric.accumulate({'labels': torch.tensor([value])}, {'loss': float(value)})
    if rank == 1:  # the sampler repeats the first sample; it is marked as not counting
        metric.accumulate({'labels': torch.tensor([-100])}, {'loss': 1.0})
    return metric.calculate()


def test_case_59_rank_means_are_not_averaged():
    assert run_ranks(padded_sampler, 2) == [{'loss': '4.0000'}] * 2


def stages() -> tuple:
    groups = groups_of('pp2')
    metrics = LossMetric(groups, groups.dp_cp), Accuracy(groups, groups.dp_cp)
    for metric in metrics:  # a script of a person accumulates on every stage; the first one has nothing to give
        outputs = (
            {'loss': 2.5, 'logits': torch.ones(1, 2, 4)} if groups.is_last_stage else {'loss': -1.0, 'logits': None}
        )
        metric.accumulate({'labels': torch.tensor([[0, 1]])}, outputs)
    return [metric.values() for metric in metrics], [metric.calculate() for metric in metrics]


def test_case_57_every_stage_shows_the_last_stages_values():
    first, last = run_ranks(stages, 2)
    assert first == last
    assert first[1] == [{'loss': '2.5000'}, shown(1, 2)]


def collectives_of(layout: str) -> dict[str, list[str]]:
    groups = groups_of(layout)
    loss, accuracy, train = (cls(groups, groups.dp_cp) for cls in (LossMetric, Accuracy, TrainMetric))
    stats = type('Stats', (), {'argmax': torch.zeros(1, 3).long()})
    ran = {}
    with Collectives() as ran['accumulate']:
        for _ in range(3):
            loss.accumulate({'labels': torch.ones(1, 3).long()}, {'loss': 1.0}, grad_norm=1.0)
            accuracy.accumulate({'labels': torch.ones(1, 3).long()}, {'token_stats': stats})
            train.accumulate(None, None, lr=1.0, step=1)
    for name, method in [
        ('calculate', loss.calculate), ('values', accuracy.values), ('reset', loss.reset), ('train', train.calculate),
    ]:  # fmt: skip
        with Collectives() as ran[name]:
            method()
    return ran


@pytest.mark.parametrize('layout', ['dp2', 'pp2', 'dp2 pp2', 'tp2', 'cp2 pp2'])
def test_one_gather_on_the_last_stage_and_one_broadcast_along_the_pipeline(layout):
    results = run_ranks(collectives_of, world_of(layout), layout)
    for rank, ran in enumerate(results):
        last = 'pp2' not in layout or rank >= world_of(layout) // 2
        expected = ['all_gather'] * (last and group_count(layout) > 1) + ['broadcast'] * ('pp2' in layout)
        assert ran == {
            'accumulate': [],
            'calculate': expected,
            'values': expected,
            'reset': [],
            'train': ['all_gather'],
        }


def shard_collectives() -> list[list[str]]:
    groups = groups_of('tp2')
    metric = Accuracy(groups, groups.dp_cp)
    ran = []
    for inputs, outputs in share(groups)[:3]:
        with Collectives() as calls:
            metric.accumulate(inputs, outputs)
        ran.append(calls)
    return ran


def test_a_shard_takes_one_gather_a_micro_batch_and_one_more_once():
    assert run_ranks(shard_collectives, 2) == [[['all_gather'] * 2, ['all_gather'], ['all_gather']]] * 2


def tied() -> dict[str, Any]:
    groups = groups_of('tp2')
    logits = torch.zeros(1, 3, 2, device=device())
    logits[0, 1, 1] = logits[0, 2, 1] = 1.0  # ids 1 and 3 of four
    if group_rank(groups.tp) == 0:
        logits[0, 2] = 0.0
    metric = Accuracy(groups)
    metric.accumulate({'labels': torch.tensor([[0, 1, 3]], device=device())}, {'logits': logits})
    return metric.calculate()


def test_the_lowest_id_wins_among_equal_logits_of_different_shards():
    assert run_ranks(tied, 2) == [shown(3, 3)] * 2


class Extremes(Metric):
    fields = {'low': MINIMUM, 'high': MAXIMUM, 'sum': SUM}  # noqa: RUF012

    def accumulate(self, inputs, outputs):
        self.state.fold(low=outputs, high=outputs, sum=outputs)

    def figures(self, totals):
        return dict(totals)


def extremes(bad: float) -> dict[str, float]:
    metric = Extremes(None, dist.group.WORLD)
    if (rank := dist.get_rank()) != 1:
        metric.accumulate(None, torch.tensor(bad if rank == 2 else rank + 0.1, dtype=torch.float64, device=device()))
    return metric.values()


def test_minima_maxima_and_nan_over_ranks_of_which_one_has_no_data():
    assert run_ranks(extremes, 4, -7.0) == [{'low': -7.0, 'high': 3.1, 'sum': (0.1 + -7.0) + 3.1}] * 4
    for result in run_ranks(extremes, 4, math.nan):
        assert all(math.isnan(value) for value in result.values())


class Documented(Metric):
    """Written as the document shows, without super().__init__()."""

    def __init__(self, device_mesh, process_group, **kwargs):
        self.process_group = process_group
        self.device_mesh = device_mesh
        self.reset()

    def accumulate(self, inputs, outputs):
        self.seen.append(outputs)

    def calculate(self):
        seen = self.gather_results(self.seen)
        self.reset()
        return {'seen': seen}

    def reset(self):
        self.seen = []


def documented(layout: str) -> tuple:
    groups = groups_of(layout)
    metric = Documented(groups, groups.dp_cp)
    for k in range(group_rank(groups.dp_cp) if groups.is_last_stage else 9):
        metric.accumulate([{}], {'rank': dist.get_rank(), 'k': k})
    return metric.calculate(), metric.calculate()


@pytest.mark.parametrize(('layout', 'expected'), [
    ('dp4', [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]), ('dp2 pp2', [(3, 0)]), ('pp2', []), ('tp2', []),
])  # fmt: skip
def test_gather_results_gives_every_rank_the_items_of_all(layout, expected):
    items = [{'rank': rank, 'k': k} for rank, k in expected]
    assert run_ranks(documented, world_of(layout), layout) == [({'seen': items}, {'seen': []})] * world_of(layout)


def torch_mesh() -> tuple:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=('pp', 'dp'))
    metric = LossMetric(mesh, mesh.get_group('dp'))
    if metric.is_last_stage:
        metric.accumulate(None, {'loss': float(dist.get_rank())})
    return metric.values()


def test_a_torch_device_mesh_tells_the_pipeline():
    assert run_ranks(torch_mesh, 4) == [{'loss': 2.5}] * 4


def world_as_group(layout: str) -> None:
    LossMetric(groups_of(layout), dist.group.WORLD)


@pytest.mark.parametrize(('layout', 'what'), [('tp2 dp2', 'one tensor parallel group'), ('dp2 pp2', 'one pipeline')])
def test_a_group_that_would_count_tokens_twice_is_refused(layout, what):
    for outcome in run_ranks(world_as_group, 4, layout, collect_errors=True):
        assert outcome.error == 'ValueError'
        assert what in outcome.message
        assert 'count 2 times' in outcome.message


def unequal_devices() -> dict[str, float]:
    """A rank whose numbers came as Python floats beside one whose numbers lie on its device."""
    metric = LossMetric(None, dist.group.WORLD)
    if dist.get_rank():
        metric.accumulate(None, {'loss': 1.0})
        metric.accumulate({'labels': [1]}, {'loss': torch.tensor(1.0, device=device())})
        metric.accumulate({'labels': torch.tensor([1], device=device())}, {'loss': 4.0})
    return metric.values()


def test_python_numbers_and_device_tensors_mix():
    assert run_ranks(unequal_devices, 2) == [{'loss': 2.0}] * 2


def test_a_wrong_call_on_ranks_raises_before_any_collective():
    with pytest.raises(RankFailure, match=r"inputs\['labels'\] must have the shape"):
        run_ranks(wrong_shape, 2, timeout=20)


def wrong_shape() -> None:
    groups = groups_of('tp2')
    with Collectives() as calls:
        try:
            Accuracy(groups).accumulate({'labels': torch.zeros(2).long()}, {'logits': torch.zeros(3, 4)})
        finally:
            assert not calls
