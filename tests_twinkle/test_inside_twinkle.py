"""Every loss and metric of this package, handed to Twinkle's real `MegatronModel`, beside plain float64 formulas in one
process: losses as Twinkle shows them, the gradient of every parameter, metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradients import collect_grads, collect_weights, compare
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from ranks import run_ranks
from tiny_gpt import Layout, build, wrap

from tests_twinkle.formulas import CASES, SIZE, SPEC, Case, expected, expected_metrics, extras, samples
from tests_twinkle.world import replica_of, twinkle_model, zero
from twinkle_megatron import MegatronModel, inside_twinkle

LAYOUTS = [
    Layout(dp=2),
    Layout(tp=2),
    Layout(pp=2),
    Layout(cp=2),
    Layout(tp=2, pp=2),
    Layout(tp=2, cp=2, sp=True),
    Layout(cp=2, dp=2),
]
EXACT = 1e-9

_expected: dict[Any, Any] = {}


def once(fn: Any, *args: Any) -> Any:
    """What one rank of a run of its own returns, found once."""
    key = (fn.__name__, *args)
    if key not in _expected:
        _expected[key] = run_ranks(fn, 1, *args, timeout=120)[0]
    return _expected[key]


def features(case: Case, replica: int, dp: int, packed: bool = False) -> list[dict[str, Any]]:
    each = 8 // dp
    mine = samples()[replica * each : (replica + 1) * each]
    if case.task == 'embedding' and packed:  # Twinkle cannot pack samples whose label is one number
        both = [{key: torch.cat([a[key], b[key]]) for key in a} for a, b in zip(mine[::2], mine[1::2])]
        return [{**row, 'labels': torch.tensor([1.0, 0.0])} for row in both]
    if case.task == 'embedding':
        return [{**one, 'labels': torch.tensor([float(i % 2 == 0)])} for i, one in enumerate(mine)]
    if case.task == 'values':
        return [{**one, 'labels': one['labels'].double()} for one in mine]
    return mine


def keywords(case: Case, model: Any, layout: Layout) -> dict[str, Any]:
    each, replica = 8 // layout.dp, replica_of(model)
    given = {key: extras()[key][replica * each : (replica + 1) * each] for key in case.keys}
    if 'teacher_logits' in given and layout.tp > 1:  # cut over the vocabulary as the student's are
        given['teacher_logits'] = [x.chunk(layout.tp, -1)[model.device_mesh.tp_rank] for x in given['teacher_logits']]
    return given


def can(case: Case, layout: Layout) -> bool:
    if case.task == 'embedding':
        return layout.cp == 1
    return case.task != 'values' or layout.tp == 1


def train(layout: Layout, packed: bool) -> dict[str, tuple[float, Any]]:
    """On every rank: each loss once."""
    model = twinkle_model(SPEC, layout, packed)
    out = {}
    for case in CASES:
        if not can(case, layout):
            continue
        for chunk in model.strategy.unwrap_model(model.model):
            chunk.values = case.task == 'values'
        zero(model)
        model.set_loss(getattr(inside_twinkle, case.loss), **case.init)
        found = model.forward_backward(
            inputs=features(case, replica_of(model), layout.dp, packed),
            micro_batch_size=SIZE // 2 if packed and case.task == 'embedding' else SIZE,
            task='embedding' if case.task == 'embedding' else 'causal_lm',
            **keywords(case, model, layout),
        )
        out[str(case)] = found['loss'], collect_grads(model.model)
    return out


@pytest.mark.parametrize('packed', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
def test_a_loss_and_its_gradients_are_those_of_one_process(layout: Layout, packed: bool) -> None:
    ranks = run_ranks(train, layout.world, layout, packed, timeout=40)
    reference = once(expected, layout.dp)
    wrong = []
    for name in ranks[0]:
        worst = compare([rank[name][1] for rank in ranks], reference[name].grads)
        losses = [rank[name][0] for rank in ranks]
        error = max(abs(loss / reference[name].loss - 1) for loss in losses)
        if worst.error > EXACT or error > 1e-6:  # Twinkle shows it in float32
            wrong.append((name, worst, losses, reference[name].loss))
    assert not wrong, '\n'.join(map(str, wrong))
    assert len(ranks[0]) == sum(can(case, layout) for case in CASES)


def measure(layout: Layout, packed: bool) -> dict[str, dict[str, Any]]:
    """On every rank: metrics of one call each, and what is left afterwards."""
    model = twinkle_model(SPEC, layout, packed)
    by_name = {str(case): case for case in CASES}
    out: dict[str, dict[str, Any]] = {}
    init = {'GRPOMetric': {'epsilon': 0.1}, 'GSPOMetric': {'epsilon': 0.02}, 'CISPOMetric': {'epsilon_high': 0.1},
            'DPOMetric': {'beta': 0.3}, 'EmbeddingMetric': {}, 'Accuracy': {}}  # fmt: skip
    losses = {'DPOMetric': 'DPOLoss-0.3', 'EmbeddingMetric': 'InfonceLoss'}
    for name, arguments in init.items():
        case = by_name[losses.get(name, 'BNPOLoss-0.1')]
        if not can(case, layout):
            continue
        group = model.optimizer_group['']
        group.train_status.metrics = []
        zero(model)
        model.set_loss(getattr(inside_twinkle, case.loss), **case.init)
        for cls, more in ((name, arguments), ('LossMetric', {}), ('TrainMetric', {})):
            model.add_metric(getattr(inside_twinkle, cls), is_training=True, **more)
        metric = group.train_status.metrics[0]
        given = keywords(case, model, layout)
        out[name] = {}
        for show in (False, True):  # once by its own floats, once as Twinkle shows it
            model.forward_backward(
                inputs=features(case, replica_of(model), layout.dp, packed),
                micro_batch_size=SIZE // 2 if packed and case.task == 'embedding' else SIZE,
                task='embedding' if case.task == 'embedding' else 'causal_lm',
                return_logits=name in ('Accuracy', 'EmbeddingMetric'),
                **given,
            )
            if not show:
                group.accumulate_metrics(True)
                out[name]['values'] = metric.values()
                for one in group.train_status.metrics:
                    one.reset()
        out[name]['shown'] = model.calculate_metric(is_training=True)
        assert metric.values() == {}, 'calculate must forget what it has shown'
    return out


@pytest.mark.parametrize('packed', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
def test_metrics_are_those_of_one_process_on_every_rank(layout: Layout, packed: bool) -> None:
    reference = once(expected_metrics)
    error = 1e-9 if layout.tp == 1 else 1e-5  # with tensor parallel ranks Twinkle finds log-probs in float32
    for rank in run_ranks(measure, layout.world, layout, packed, timeout=40):
        for name, found in rank.items():
            for key, value in reference[name].items():
                assert found['values'][key] == pytest.approx(value, abs=error), (name, key)
                assert key in found['shown'], (name, key)
            assert {'loss', 'iters'} <= found['shown'].keys()
        assert len(rank) == (6 if layout.cp == 1 else 5)


REWARDS = [0.5, -1.0, 2.0, 0.0, 1.5, 3.0, -0.5, 0.25]
LENGTHS = [3, 4, 2, 5, 6, 1, 2, 9]


def rewarded(layout: Layout) -> dict[str, Any]:
    """On every rank: what the metric of rewards says after one call, which trains on advantages."""
    model = twinkle_model(SPEC, layout)
    model.set_loss(inside_twinkle.GRPOLoss)
    model.add_metric(inside_twinkle.CompletionRewardMetric, is_training=True)
    each, replica = 8 // layout.dp, replica_of(model)
    mine = slice(replica * each, (replica + 1) * each)
    model.forward_backward(
        inputs=samples()[mine],
        micro_batch_size=SIZE,
        advantages=extras()['advantages'][mine],
        rewards=REWARDS[mine],
        completions=LENGTHS[mine],
    )
    return model.calculate_metric(is_training=True)


@pytest.mark.parametrize('layout', [Layout(dp=2), Layout(tp=2, pp=2), Layout(cp=2)], ids=str)
def test_rewards_count_each_sample_once_on_every_rank(layout: Layout) -> None:
    for found in run_ranks(rewarded, layout.world, layout, timeout=40):
        assert found['mean_reward'] == f'{sum(REWARDS) / 8:.4f}'
        assert found['mean_completion_length'] == f'{sum(LENGTHS) / 8:.4f}'
        assert found['reward_std'] == f'{torch.tensor(REWARDS).std():.4f}'


def both_ways(layout: Layout) -> list[tuple[str, float, float, Any, Any]]:
    """On every rank: the same loss by Twinkle's model and by ours."""
    model = twinkle_model(SPEC, layout)
    ours = MegatronModel(wrap(build(SPEC, layout)), vocab_size=SPEC.vocab_size)
    out = []
    for case in CASES:
        if not case.exact or case.task != 'causal_lm':
            continue
        given, inputs = keywords(case, model, layout), features(case, replica_of(model), layout.dp)
        zero(model)
        model.set_loss(getattr(inside_twinkle, case.loss), **case.init)
        theirs = model.forward_backward(inputs=inputs, micro_batch_size=SIZE, **given)['loss']
        ours.zero_grad()
        ours.set_loss(case.loss, **case.init)
        # Twinkle has written to its inputs
        plain = [{key: one[key] for key in ('input_ids', 'labels')} for one in samples()]
        found = ours.forward_backward(inputs=plain, micro_batch_size=SIZE, **given)['loss']
        out.append((str(case), theirs, found, collect_grads(model.model), collect_grads(ours.chunks)))
    return out


@pytest.mark.parametrize('layout', [Layout(pp=2), Layout(tp=2)], ids=str)
def test_it_trains_what_our_own_model_trains(layout: Layout) -> None:
    for rank in run_ranks(both_ways, layout.world, layout, timeout=40):
        assert len(rank) == 15
        for name, theirs, ours, their_grads, our_grads in rank:
            assert theirs == pytest.approx(ours, rel=1e-6), name
            assert their_grads.keys() == our_grads.keys()
            for key, part in their_grads.items():
                torch.testing.assert_close(part.tensor, our_grads[key].tensor, rtol=1e-9, atol=1e-12)


def stepped(layout: Layout) -> tuple[Any, Any, list[float]]:
    """On every rank: weights after two steps by Twinkle's model and by ours, and norms of the gradient."""
    model, given = twinkle_model(SPEC, layout), {'advantages': extras()['advantages']}
    model.set_optimizer('default', lr=1e-2, clip_grad=0.5, use_distributed_optimizer=False)
    chunks = wrap(build(SPEC, layout))
    config = OptimizerConfig(optimizer='adam', lr=1e-2, weight_decay=0.01, adam_beta2=0.999, clip_grad=0.5)
    optimizer = get_megatron_optimizer(config, chunks)
    ours = MegatronModel(chunks, optimizer, vocab_size=SPEC.vocab_size)
    model.set_loss(inside_twinkle.GRPOLoss)
    ours.set_loss('GRPOLoss')
    norms = []
    for _ in range(2):
        plain = [{key: one[key] for key in ('input_ids', 'labels')} for one in samples()]
        ours.forward_backward(inputs=plain, micro_batch_size=SIZE, **given)
        ours.clip_grad_and_step(0.5)
        model.forward_backward(inputs=samples(), micro_batch_size=SIZE, **given)
        model.clip_grad_and_step()
        norms.append(model.optimizer_group['']._last_grad_norm)
    return collect_weights(model.model), collect_weights(ours.chunks), norms


def test_steps_lead_to_the_weights_that_our_own_model_has() -> None:
    layout = Layout(tp=2)
    for theirs, ours, norms in run_ranks(stepped, layout.world, layout, timeout=40):
        assert min(norms) > 0.5, 'clipping must have something to do'
        for name, part in theirs.items():
            torch.testing.assert_close(part.tensor, ours[name].tensor, rtol=1e-9, atol=1e-12)
