"""EmbeddingMetric: the recorded result, the definition by double loops, and one process's numbers on every rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import device, run_ranks
from torch import Tensor

from tests.metric.layouts import Collectives, groups_of, world_of
from twinkle_megatron.groups import Groups, group_rank, group_size
from twinkle_megatron.metric import Accuracy, EmbeddingMetric, build_metric

RECORDS = [
    r
    for r in torch.load(Path(__file__).parents[1] / 'golden' / 'metrics.pt', weights_only=True)
    if r['cls'] == 'EmbeddingMetric'
]
D = 5

Batch = tuple[Tensor, Tensor]


def batch_of(seed: int, *sizes: int, dim: int = D) -> Batch:
    """Embeddings `[n, D]` of any length, and labels, of groups of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(sizes), dim, generator=generator, dtype=torch.float64)
    rows *= 0.1 + 9 * torch.rand(len(rows), 1, generator=generator, dtype=torch.float64)
    return rows, torch.tensor([int(i == 0) for size in sizes for i in range(size)], dtype=torch.int64)


def cosine(x: list[float], y: list[float]) -> float:
    norms = math.sqrt(sum(a * a for a in x)) * math.sqrt(sum(b * b for b in y))
    return 0.0 if norms == 0 else sum(a * b for a, b in zip(x, y)) / norms


def reference(calls: list[list[Batch]]) -> dict[str, float]:
    """The similarities over global batches, each a list of micro-batches of any rank, pair by pair."""
    same, other = [], []
    for micro_batches in calls:
        anchors, positives = [], []
        for rows, labels in micro_batches:
            for i, mark in enumerate(labels.tolist()):
                if mark:
                    anchors.append(rows[i].tolist())
                    positives.append(rows[i + 1].tolist())
        for i, anchor in enumerate(anchors):
            for j, positive in enumerate(positives):
                (same if i == j else other).append(cosine(anchor, positive))
    found = {'pos_sim': sum(same) / len(same), 'pos_sim_min': min(same), 'pos_sim_max': max(same)} if same else {}
    return found | ({'neg_sim': sum(other) / len(other)} if other else {})


def close(expected: dict[str, float]) -> Any:
    return pytest.approx(expected, rel=1e-12, abs=1e-14)


def feed(metric: EmbeddingMetric, batch: Batch, call: int | None = None, **outputs: Any) -> None:
    rows, labels = batch
    metric.accumulate({'labels': labels.to(device())}, {'embeddings': rows.to(device()), **outputs}, call=call)


@pytest.mark.parametrize('record', RECORDS, ids=lambda record: record['name'])
def test_recorded_values(record):
    """Twinkle's `neg_sim` is a mean of dot products; the recorded vectors have norm 1."""
    metric = build_metric(record['cls'], **record['init'])
    for inputs, outputs, keywords in record['ops']:
        metric.accumulate(inputs, outputs, **keywords)
    assert metric.calculate() == record['result']
    assert metric.calculate() == record['second_calculate'] == {}


def test_values_and_display_over_several_global_batches():
    batches = [batch_of(0, 3, 2, 4), batch_of(1, 2), batch_of(2, 2, 2, 2, 5)]
    metric = EmbeddingMetric()
    for batch, loss in zip(batches, (0.5, 0.25, 4.0)):
        feed(metric, batch, loss=loss)
    metric.on_step(grad_norm=0.125, lr=1.0)
    expected = reference([[batch] for batch in batches]) | {'loss': (3 * 0.5 + 0.25 + 4 * 4.0) / 8, 'grad_norm': 0.125}
    assert metric.values() == close(expected)
    assert metric.values() == metric.values(), 'and no reset'
    shown = metric.calculate()
    assert shown == {name: f'{value:.4f}' for name, value in expected.items()} | {'grad_norm': '0.125000'}
    assert list(shown) == ['pos_sim', 'pos_sim_min', 'pos_sim_max', 'neg_sim', 'loss', 'grad_norm']
    assert metric.calculate() == {}
    assert metric.values() == {}


def test_values_between_two_calls_are_those_so_far():
    batches = [batch_of(0, 3, 2, 4), batch_of(1, 2, 2), batch_of(2, 2, 3)]
    metric = EmbeddingMetric()
    for k, batch in enumerate(batches):
        feed(metric, batch)
        assert metric.values() == close(reference([[b] for b in batches[: k + 1]]))


@pytest.mark.parametrize('form', [
    'call', 'list', 'joined outputs', 'outputs by micro-batch', 'samples', 'arrays', 'lists', 'first of [n, s, D]',
])  # fmt: skip
def test_however_the_micro_batches_of_a_global_batch_come(form):
    parts = [batch_of(0, 3, 2), batch_of(1, 2), batch_of(2, 4, 2)]
    rows, labels = (torch.cat(x) for x in zip(*parts))
    inputs = [{'labels': part[1]} for part in parts]
    metric = EmbeddingMetric()
    if form == 'call':
        for part in parts:
            feed(metric, part, call=7)
    elif form == 'list':
        metric.accumulate(inputs, [{'embeddings': part[0]} for part in parts])
    elif form == 'joined outputs':
        metric.accumulate(inputs, {'embeddings': rows})
    elif form == 'outputs by micro-batch':
        metric.accumulate(inputs, {'embeddings': [part[0] for part in parts]})
    elif form == 'samples':  # one number each
        metric.accumulate([{'labels': mark} for mark in labels.tolist()], {'embeddings': rows})
    elif form == 'arrays':
        metric.accumulate({'labels': labels.numpy()}, {'embeddings': rows.numpy()})
    elif form == 'lists':
        metric.accumulate({'labels': labels.tolist()}, {'embeddings': rows.tolist()})
    else:
        logits = torch.stack([rows, torch.full_like(rows, math.nan)], 1)
        metric.accumulate({'labels': labels}, {'logits': logits})
    assert metric.values() == close(reference([parts]))


def test_equal_numbers_are_one_global_batch_whatever_comes_between():
    parts = [batch_of(seed, 2, 3) for seed in range(4)]
    metric = EmbeddingMetric()
    for part, call in zip(parts, (np.int64(0), 3, 0, 3)):
        feed(metric, part, call=call)
    extra = batch_of(9, 2, 2)
    feed(metric, extra)
    assert metric.values() == close(reference([[parts[0], parts[2]], [parts[1], parts[3]], [extra]]))


def test_single_anchors_have_no_negatives():
    metric, batches = EmbeddingMetric(), [batch_of(0, 4), batch_of(1, 2)]
    for batch in batches:
        feed(metric, batch)
    assert 'neg_sim' not in metric.values()
    assert metric.values() == close(reference([[batch] for batch in batches]))


def test_directions_count_and_lengths_do_not():
    rows, labels = batch_of(0, 2, 3, 2)
    scaled = rows * torch.logspace(-20, 20, len(rows), dtype=torch.float64)[:, None]
    metric, other = EmbeddingMetric(), EmbeddingMetric()
    feed(metric, (rows, labels))
    feed(other, (scaled, labels))
    assert other.values() == close(metric.values())


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_embeddings_are_compared_in_float64(dtype):
    rows, labels = batch_of(0, 2, 2, 3)
    metric = EmbeddingMetric()
    metric.accumulate({'labels': labels}, {'embeddings': rows.to(dtype).requires_grad_()})
    assert metric.values() == close(reference([[(rows.to(dtype).double(), labels)]]))


def test_zeros_have_cosine_0_and_nan_shows():
    rows, labels = batch_of(0, 2, 2, 3)
    rows[3] = 0
    metric = EmbeddingMetric()
    feed(metric, (rows, labels))
    assert metric.values() == close(reference([[(rows, labels)]]))
    assert all(math.isfinite(value) for value in metric.values().values())
    rows[2, 1] = math.nan
    feed(metric, (rows, labels))
    assert metric.calculate() == dict.fromkeys(('pos_sim', 'pos_sim_min', 'pos_sim_max', 'neg_sim'), 'nan')


def test_rows_of_negatives_do_not_count():
    rows, labels = batch_of(0, 4, 3)
    metric = EmbeddingMetric()
    rows[2], rows[3], rows[6] = math.nan, math.nan, math.nan
    feed(metric, (rows, labels))
    assert metric.values() == close(reference([[(rows, labels)]]))


def test_a_loss_is_a_sum_over_num_tokens_or_a_mean_over_the_anchors_of_its_labels():
    metric = EmbeddingMetric()
    labels = torch.tensor([1, 0, 0, 1, 0])
    metric.accumulate({'labels': labels}, {'loss': torch.tensor(6.0), 'num_tokens': torch.tensor(4)})
    metric.accumulate({'labels': labels}, {'loss': 2.0, 'num_tokens': 0})
    metric.accumulate({'labels': torch.zeros(3)}, {'loss': math.nan})
    assert metric.values() == {'loss': (6.0 + 2 * 2.0) / (4 + 2)}
    metric.accumulate({'labels': labels}, {'loss': math.nan})
    assert math.isnan(metric.values()['loss'])


def test_nothing_given_is_nothing_said():
    metric = EmbeddingMetric()
    metric.accumulate(None, None)
    metric.accumulate([], [])
    metric.accumulate({'labels': []}, {'embeddings': torch.zeros(0, D)})
    metric.accumulate({'labels': torch.tensor([1, 0])}, {'lm': 1}, grad_norm=0.0)
    metric.accumulate({'labels': torch.tensor([0, 0])}, {'embeddings': torch.ones(2, D)})
    assert metric.values() == {}
    assert metric.calculate() == {}
    metric.accumulate(None, None, grad_norm=3.0)
    metric.accumulate(None, None, grad_norm=torch.tensor(2.0))
    assert metric.calculate() == {'grad_norm': '2.000000'}


@pytest.mark.parametrize(
    ('labels', 'outputs', 'message'),
    [
        ([1, 0, 0], {'embeddings': torch.ones(4, D)}, r"inputs\['labels'\] must have one number for each of the 4 emb"),
        ([1, 0, 1], {'embeddings': torch.ones(3, D)}, 'row 2 of 3 is an anchor and is the last one'),
        ([1, 0, 1, 1], {'embeddings': torch.ones(4, D)}, 'row 2 of 4 is an anchor and is followed by another anchor'),
        ([1, 0], {'embeddings': torch.ones(2)}, r"outputs\['embeddings'\] must have the shape \[n, D\], or"),
        ([1, 0], {'logits': torch.ones(2, 1, 1, 1)}, r"outputs\['logits'\] must have the shape \[n, D\], or"),
        (None, {'embeddings': torch.ones(2, D)}, 'inputs must hold labels'),
        ([1, 0], {'embeddings': torch.ones(2, D + 1)}, r'the same size until the next reset, got \[5, 6\]'),
    ],
)
def test_wrong_batches_are_refused_and_nothing_is_taken_in(labels, outputs, message):
    metric, good = EmbeddingMetric(), batch_of(0, 2, 3)
    feed(metric, good)
    with pytest.raises(ValueError, match=message):
        metric.accumulate([{'labels': good[1]}, {'labels': labels}], [{'embeddings': good[0]}, outputs])
    assert metric.values() == close(reference([[good]]))


def test_wrong_keywords():
    with pytest.raises(ValueError, match='call must be an integer >= 0'):
        EmbeddingMetric().accumulate(None, None, call=-1)
    with pytest.raises(ValueError, match='call must be an integer >= 0'):
        EmbeddingMetric().accumulate(None, None, call='first')
    with pytest.raises(ValueError, match="no argument 'temperature'"):
        EmbeddingMetric(temperature=0.1)
    with pytest.raises(ValueError, match="no argument 'gradnorm'; did you mean 'grad_norm'"):
        EmbeddingMetric().accumulate(None, None, gradnorm=1.0)


def test_other_metrics_are_told_the_call_too():
    Accuracy().accumulate(None, None, call=3)
    assert EmbeddingMetric.layout == 'groups'


def test_what_was_seen_in_inference_mode_goes_on_outside_of_it():
    parts, metric = [batch_of(0, 2, 2), batch_of(1, 2, 3)], EmbeddingMetric()
    with torch.inference_mode():
        feed(metric, parts[0], call=0)
    feed(metric, parts[1], call=0)
    assert metric.values() == close(reference([parts]))


# By data parallel rank and call the micro-batches: uneven, calls that some ranks lack, a rank without any data.
SIZES = [
    {0: [(2, 3), (4,)], 1: [(2, 2, 2)], 5: [(3,)]},
    {1: [(2,)], 2: [(2,), (2, 2)]},
    {},
    {0: [()], 7: [(6,)]},
]


def micro_batches_of(dp: int) -> dict[int, list[Batch]]:
    return {
        call: [batch_of(100 * dp + 10 * call + m, *sizes) for m, sizes in enumerate(parts)]
        for call, parts in SIZES[dp].items()
    }


def expected_of(dp_size: int) -> dict[str, float]:
    ranks = [micro_batches_of(dp) for dp in range(dp_size)]
    calls = [[part for rank in ranks for part in rank.get(call, [])] for call in range(8)]
    anchors = sum(int(labels.sum()) for parts in calls for _, labels in parts)
    total = sum(float(rows.sum()) for parts in calls for rows, labels in parts if labels.any())
    return reference(calls) | {'loss': total / anchors}


def numbered(layout: str, with_cp: bool = True) -> tuple[Any, ...]:
    groups = groups_of(layout)
    metric = EmbeddingMetric(groups, groups.dp_cp if with_cp else groups.dp)
    with Collectives() as ran:
        for call, parts in micro_batches_of(group_rank(groups.dp)).items():
            for rows, labels in parts:
                loss = rows.sum() / group_size(groups.cp)
                count = float(labels.sum()) / group_size(groups.cp)
                if not groups.is_last_stage:
                    rows, loss = rows * math.nan, math.nan
                feed(metric, (rows, labels), call, loss=loss, num_tokens=count)
        metric.on_step(grad_norm=1.0 + group_rank(groups.dp_cp))
    before = metric.values()
    assert metric.values() == before
    return before, metric.calculate(), metric.calculate(), ran


@pytest.mark.parametrize('layout', ['dp2', 'dp4', 'cp2 dp2', 'tp2 dp2', 'dp2 pp2', 'pp2', 'cp2 pp2'])
def test_one_processs_numbers_on_every_rank(layout):
    sizes = {part[:2]: int(part[2:]) for part in layout.split()}
    replicas = sizes.get('dp', 1) * sizes.get('cp', 1)
    expected = expected_of(sizes.get('dp', 1)) | {'grad_norm': float(replicas)}
    results = run_ranks(numbered, world_of(layout), layout)
    assert results == [results[0]] * len(results), 'bitwise, on all ranks and stages'
    values, shown, again, ran = results[0]
    assert values == close(expected)
    assert shown == {name: f'{value:.{6 if name == "grad_norm" else 4}f}' for name, value in expected.items()}
    assert again == {}
    assert ran == [], 'accumulate takes no collective'


def test_a_group_without_context_parallel_ranks_does_as_well():
    for values, *_ in run_ranks(numbered, 4, 'cp2 dp2', False):
        assert {k: v for k, v in values.items() if k != 'grad_norm'} == close(expected_of(2))


def unnumbered() -> tuple[Any, ...]:
    """The k-th batch of each rank is part of the k-th global batch; of the second rank there is one less."""
    rank, metric = dist.get_rank(), EmbeddingMetric(None, dist.group.WORLD)
    for k in range(3 - rank):
        feed(metric, batch_of(10 * rank + k, 2, 3, 2), loss=float(k))
    with Collectives() as some:
        values = metric.values()
    metric.reset()
    with Collectives() as none:
        empty = metric.values()
    return values, some, empty, none


def test_without_numbers_the_order_tells_the_global_batch():
    sizes = (2, 3, 2)
    calls = [[batch_of(k, *sizes), batch_of(10 + k, *sizes)] for k in range(2)] + [[batch_of(2, *sizes)]]
    expected = reference(calls) | {'loss': (0 + 1 + 2 + 0 + 1) / 5}
    for values, some, empty, none in run_ranks(unnumbered, 2):
        assert values == close(expected)
        assert some == ['all_gather', 'all_gather', 'all_reduce', 'all_gather']
        assert empty == {}
        assert none == ['all_gather'] * 2


def wrong_on_ranks(what: str) -> None:
    groups = groups_of('tp2')
    if what == 'group':
        EmbeddingMetric(groups, dist.group.WORLD)
    metric = EmbeddingMetric(Groups(), dist.group.WORLD)
    feed(metric, batch_of(0, 2, 2, dim=4 + dist.get_rank()))
    metric.values()


@pytest.mark.parametrize(('what', 'message'), [
    ('group', 'one tensor parallel group'), ('size', 'the same size on every rank, got [4, 5]'),
])  # fmt: skip
def test_wrong_groups_and_sizes_raise_on_every_rank(what, message):
    for outcome in run_ranks(wrong_on_ranks, 2, what, collect_errors=True, timeout=20):
        assert outcome.error == 'ValueError'
        assert message in outcome.message
