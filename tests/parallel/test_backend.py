"""MegatronModel from a config, in three parts, with steps in halves, and what it is handed by name or by address."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gradients import collect_grads, collect_weights, compare
from invariance import EMPTY_RANK, UNEVEN, even, micro_batches
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from policy import LOSSES as POLICY
from pooled import KINDS as POOLED
from pooled import SPLITS as POOLED_SPLITS
from pooled import gpt
from pooled import micro_batches as pooled_batches
from preference import KINDS as PAIRS
from preference import SPLITS as PAIR_SPLITS
from preference import micro_batches as pair_batches
from preference import reference_keywords
from ranks import run_ranks
from test_invariance import GPT
from test_model import _trainer
from tiny_gpt import Layout, build, initialize, wrap

from twinkle_megatron import MegatronModel
from twinkle_megatron.batch import TokenBatch
from twinkle_megatron.loss.build import LOSSES, build_loss
from twinkle_megatron.megatron import cpu, head_choice
from twinkle_megatron.metric import LossMetric
from twinkle_megatron.metric.build import METRICS, build_metric
from twinkle_megatron.vocab_parallel import workspace

# ---- in three parts


def _kinds(model, layout):
    """Name, inputs, keywords and the preparation of each kind of loss."""
    dp, replica = layout.dp, dist.get_rank(model.groups.dp)
    text = micro_batches(GPT, EMPTY_RANK if dp == 2 else UNEVEN[1], replica)
    pairs = PAIR_SPLITS['uneven', dp]
    pair_inputs = pair_batches(GPT, pairs, replica, False, 'interleaved')
    given = reference_keywords(GPT, pairs, replica, False, 'interleaved', 'ragged')
    groups = pooled_batches(GPT, POOLED_SPLITS['uneven', dp], replica, 'left', 'starts')
    values = pooled_batches(GPT, POOLED_SPLITS['uneven', dp], replica, 'left', 'token')
    yield 'CrossEntropyLoss', {}, 'auto', text, {}
    yield PAIRS['kto'][0], PAIRS['kto'][1], 'auto', pair_inputs, given
    yield 'InfonceLoss', POOLED['blocks'].init, POOLED['blocks'].head, groups, {}
    yield 'MSELoss', POOLED['value'].init, POOLED['value'].head, values, {}
    yield _custom, {}, 'auto', text, {'scale': 2.0}


def _custom(inputs, outputs, scale):
    kept = inputs['labels'] != -100
    logits = outputs['logits']
    return {'loss': scale * (logits.double() ** 2).mean(-1)[kept].sum(), 'num_tokens': kept.sum()}


def _both_forms(layout):
    initialize(layout)
    model = MegatronModel(wrap(gpt(GPT, layout, True)), vocab_size=GPT.vocab_size)
    found = {}
    for loss, init, head, inputs, extra in _kinds(model, layout):
        model.set_loss(loss, **init)
        model.set_head(head)
        model.set_metric(LossMetric, is_training=True)
        model.zero_grad()
        whole = model.forward_backward(inputs, **extra)
        grads, metrics = collect_grads(model.chunks), model.metric_values()
        model.calculate_metric()
        model.zero_grad()
        outputs = model.forward(inputs)
        untouched = max(part.tensor.abs().max().item() for part in collect_grads(model.chunks).values())
        value = model.calculate_loss(**extra)
        untouched = max(untouched, *(x.tensor.abs().max().item() for x in collect_grads(model.chunks).values()))
        unfed = model.metric_values()['loss']
        model.backward()
        assert model.groups.tp is not None
        (kind,) = outputs
        alike = all(torch.equal(a, b) for a, b in zip(outputs[kind], whole[kind], strict=True))
        now = collect_grads(model.chunks)
        apart = max((now[key].tensor - part.tensor).abs().max().item() for key, part in grads.items())
        name = loss if isinstance(loss, str) else loss.__name__
        found[name] = whole['loss'], value, untouched, unfed, alike, apart, metrics == model.metric_values()
    return found


@pytest.mark.parametrize('layout', [Layout(), Layout(pp=2, dp=2), Layout(tp=2, cp=2)], ids=str)
def test_forward_calculate_loss_backward_is_forward_backward(layout):
    for found in run_ranks(_both_forms, layout.world, layout, timeout=120):
        for name, (whole, value, untouched, unfed, alike, apart, fed) in found.items():
            assert value == pytest.approx(whole, rel=1e-12), name
            assert untouched == 0, f'{name}: no gradient before backward'
            assert unfed == 0, f'{name}: metrics are fed by backward'
            assert alike, f'{name}: outputs'
            assert apart < 1e-12, name
            assert fed, name


def _dropped_out():
    spec = dataclasses.replace(GPT, config={'hidden_dropout': 0.4})
    initialize(Layout())
    model = MegatronModel(wrap(build(spec)), vocab_size=spec.vocab_size)
    model.set_loss('cross_entropy')
    model.set_metric(LossMetric, is_training=True)
    inputs = micro_batches(GPT, even(1, 2), 0)
    model.forward(inputs)
    value = model.calculate_loss()
    model.backward()
    return value, model.metric_values()['loss']


def test_backward_draws_the_random_numbers_of_forward():
    value, trained = run_ranks(_dropped_out, 1)[0]
    assert trained == pytest.approx(value, rel=1e-12)


def _out_of_order():
    initialize(Layout())
    model = MegatronModel(wrap(build(GPT)), vocab_size=GPT.vocab_size)
    model.set_loss('cross_entropy')
    found = []
    for call in (model.calculate_loss, model.backward):
        with pytest.raises(ValueError, match='must be called after') as caught:
            call()
        found.append(str(caught.value))
    model.forward(micro_batches(GPT, even(1, 1), 0))
    with pytest.raises(ValueError, match="no argument 'advantages'"):
        model.calculate_loss(advantages=[1.0])
    model.backward()
    with pytest.raises(ValueError, match='backward must be called after forward'):
        model.backward()
    return found


def test_the_parts_have_an_order():
    first, second = run_ranks(_out_of_order, 1)[0]
    assert first.startswith('calculate_loss must be called after forward(inputs)')
    assert second.startswith('backward must be called after forward(inputs)')


# ---- progress


def _progress(layout, breaks):
    initialize(layout)
    model = MegatronModel(wrap(build(GPT, layout)), vocab_size=GPT.vocab_size)
    model.set_loss('cross_entropy')
    batches = micro_batches(GPT, EMPTY_RANK if layout.dp == 2 else UNEVEN[1], dist.get_rank(model.groups.dp))
    told, evaluated = [], []

    def progress(done, count):
        told.append((done, count))
        if breaks and dist.get_rank() == 1:
            raise BrokenPipeError('nobody looks')

    model.forward_backward(batches, progress=progress)
    model.forward_only(batches, progress=lambda *at: evaluated.append(at))
    return told, evaluated, len(batches)


@pytest.mark.parametrize('layout', [Layout(), Layout(pp=2, vpp=2, dp=2)], ids=str)
def test_progress_is_told_of_every_micro_batch(layout):
    for told, evaluated, count in run_ranks(_progress, layout.world, layout, False):
        assert told == evaluated == [(i + 1, count) for i in range(count)]


def test_a_progress_bar_that_fails_ends_all_ranks():
    for outcome in run_ranks(_progress, 2, Layout(pp=2), True, collect_errors=True, timeout=60):
        assert outcome.error == 'BrokenPipeError'


# ---- steps in halves


def _steps(layout, halves, dtype, ddp):
    spec = dataclasses.replace(GPT, dtype=dtype)
    model = _trainer(spec, layout, ddp)
    batches = micro_batches(GPT, UNEVEN[layout.dp], dist.get_rank(model.groups.dp))
    norms = []
    for _ in range(3):
        model.forward_backward(batches)
        if halves:
            norms.append(model.clip_grad_norm(0.3))
            assert model.step()
            model.zero_grad()
            model.lr_step()
        else:
            norms.append(model.clip_grad_and_step(0.3))
    assert model.clip_grad_norm() is None
    assert not model.step()
    return norms, collect_weights(model.chunks)


@pytest.mark.parametrize(
    ('layout', 'dtype', 'ddp'),
    [
        (Layout(), torch.float32, {}),
        (Layout(tp=2, pp=2), torch.float32, {}),
        (Layout(dp=2), torch.bfloat16, {'distributed_optimizer': True}),
    ],
    ids=['one', 'tp2-pp2', 'bf16 distributed optimizer'],
)
def test_clip_and_step_in_halves_is_clip_grad_and_step(layout, dtype, ddp):
    whole, halves = (run_ranks(_steps, layout.world, layout, kind, dtype, ddp) for kind in (False, True))
    for (norms, weights), (others, those) in zip(whole, halves):
        assert norms == others
        assert min(norms) > 0.3, 'the bound must bind'
        for name, part in weights.items():
            assert torch.equal(part.tensor, those[name].tensor), name


# ---- saved and loaded


def _resumed(layout, folder, ddp):
    """Weights after four steps, and after two, a save, a load into another model, and two more."""
    spec = dataclasses.replace(GPT, dtype=torch.float32, config={'hidden_dropout': 0.1})
    model = _trainer(spec, layout, ddp)
    batches = micro_batches(GPT, UNEVEN[layout.dp], dist.get_rank(model.groups.dp))

    def steps(model, count):
        for _ in range(count):
            model.forward_backward(batches)
            model.clip_grad_and_step()

    steps(model, 2)
    path = model.save(folder, state={'position': 7}, keep=1)
    model.forward_backward(batches)
    with pytest.raises(ValueError, match='between steps'):
        model.save(folder)
    model.zero_grad()
    model.load(folder)  # the random numbers of the step that was thrown away
    steps(model, 2)
    other = _trainer(spec, layout, ddp)
    state = other.load(folder)
    steps(other, 2)
    weights = [collect_weights(each.chunks) for each in (model, other)]
    equal = all(torch.equal(part.tensor, weights[1][name].tensor) for name, part in weights[0].items())
    return equal, state, path.name, [each.calculate_metric()['iters'] for each in (model, other)]


@pytest.mark.parametrize(
    ('layout', 'ddp'), [(Layout(tp=2), {}), (Layout(dp=2), {'distributed_optimizer': True})], ids=str
)
def test_a_model_that_was_saved_goes_on_to_the_bit(layout, ddp, tmp_path):
    for equal, state, name, iterations in run_ranks(_resumed, 2, layout, tmp_path, ddp, timeout=120):
        assert equal
        assert state == {'position': 7, 'step': 2}
        assert name == 'step-00000002'
        assert iterations == [4, 4]


# ---- from a config


def _kept(layout, folder, elsewhere):
    def made():
        model = _trainer(GPT, layout)
        model.set_loss('cross_entropy')
        for is_training in (True, False):
            model.set_metric(LossMetric, is_training=is_training)
            model.add_metric('accuracy', is_training=is_training)
        return model

    def shown(model):
        return [model.metric_values(is_training) for is_training in (True, False)]

    def once(model, seed):
        batches = micro_batches(GPT, UNEVEN[layout.dp], dist.get_rank(model.groups.dp), seed=seed)
        model.forward_backward(batches)
        model.clip_grad_and_step()
        model.forward_only(batches)

    model = made()
    once(model, 1)
    if not elsewhere:
        model.save(folder)
    before, choice = shown(model), model._engine.head_choice.state_dict()
    model = made()
    workspace.default_workspace_mb.cache_clear()
    with pytest.MonkeyPatch.context() as patch:  # less memory is free when the run goes on
        for module in (head_choice, workspace):
            patch.setattr(module, 'free_memory', lambda kind: 1 << 20)
        if elsewhere:
            once(model, 2)  # with sums that are not those of the checkpoint
        model.load(folder)
        loaded, tile = shown(model), workspace.default_workspace_mb('cpu')
        once(model, 3)
    return before, loaded, choice == model._engine.head_choice.state_dict(), tile


def test_sums_of_metrics_and_the_choice_of_the_head_are_saved(tmp_path):
    results = run_ranks(_kept, 2, Layout(dp=2), tmp_path, False)
    for before, loaded, same_choice, tile in results:
        assert loaded == before
        assert before[0]['total_tokens'] > 0
        assert same_choice
        assert tile == 8
    for _, loaded, _, _ in run_ranks(_kept, 1, Layout(), tmp_path, True):
        assert all(values.get('total_tokens', 0) == 0 for values in loaded), 'in another layout they start anew'


def _from_config(layout):
    if not torch.cuda.is_available():
        cpu.install()
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, gradient_accumulation_fusion=False, overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1, deallocate_pipeline_outputs=False,
    )  # fmt: skip
    sizes = {'tp': layout.tp, 'pp': layout.pp, 'cp': layout.cp, 'vpp': layout.vpp}
    model = MegatronModel.from_config(config, 62, optimizer=1e-2, max_sequence_length=64, **sizes)
    model.set_loss('cross_entropy')
    batches = micro_batches(GPT, UNEVEN[layout.dp], dist.get_rank(model.groups.dp))
    losses = []
    for _ in range(4):
        losses.append(model.forward_backward(batches)['loss'])
        model.clip_grad_and_step()
    wrong = {}
    for name, change in {
        'layout': lambda: MegatronModel.from_config(config, 62, tp=3),
        'config': lambda: MegatronModel.from_config({}, 62),
        'keyword': lambda: MegatronModel.from_config(config, 62, **sizes, max_length=3),
    }.items():
        try:
            change()
        except ValueError as error:
            wrong[name] = str(error)
    return losses, wrong, model.groups.size


@pytest.mark.parametrize('layout', [Layout(), Layout(tp=2, pp=2), Layout(pp=2, vpp=2), Layout(dp=2, cp=2)], ids=str)
def test_a_model_from_a_config_trains(layout):
    for losses, wrong, size in run_ranks(_from_config, layout.world, layout, timeout=120):
        assert size == layout.world
        assert losses[-1] < losses[0] - 0.1
        assert 'tp · pp · cp = 3 · 1 · 1 = 3' in wrong['layout'] or 'groups that Megatron has' in wrong['layout']
        assert 'must be a TransformerConfig' in wrong['config']
        assert "no argument 'max_length'; did you mean 'max_sequence_length'" in wrong['keyword']


def _experts(layout, expert_tp):
    cpu.install()
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, gradient_accumulation_fusion=False, num_moe_experts=4, add_bias_linear=False,
        moe_token_dispatcher_type='alltoall', tensor_model_parallel_size=layout.tp, sequence_parallel=layout.tp > 1,
        expert_tensor_parallel_size=expert_tp,
    )  # fmt: skip
    model = MegatronModel.from_config(config, 62, tp=layout.tp, ep=layout.ep, max_sequence_length=64)
    model.set_loss('cross_entropy')
    model.forward_backward(micro_batches(GPT, even(layout.dp, 1), dist.get_rank(model.groups.dp)))
    return model.config.expert_tensor_parallel_size, parallel_state.get_expert_tensor_parallel_world_size()


@pytest.mark.parametrize(
    ('layout', 'expert_tp', 'expected'), [(Layout(tp=2, ep=2), 1, 1), (Layout(tp=2), None, 2)], ids=str
)
def test_experts_of_a_config_are_split_as_it_says(layout, expert_tp, expected):
    assert run_ranks(_experts, 2, layout, expert_tp) == [(expected, expected)] * 2


# ---- losses and metrics of one's own


def _tutorial():
    """The classes of docs/custom.md."""
    names = {}
    text = (Path(__file__).parents[2] / 'docs' / 'custom.md').read_text()
    exec('\n'.join(re.findall(r'```python\n(.*?)```', text, re.S)), names)
    return names


def _own(layout, split):
    initialize(layout)
    names = _tutorial()
    model = MegatronModel(wrap(build(GPT)), vocab_size=GPT.vocab_size) if layout == Layout() else None
    model = model or MegatronModel(wrap(build(GPT, layout)), vocab_size=GPT.vocab_size)
    model.set_loss(names['Unsure'](sure=0.02))
    model.set_metric(names['Perplexity'], is_training=True)
    replica = dist.get_rank(model.groups.dp)
    rows = [row for micro_batch in split.replicas[replica] for row in micro_batch]
    weights = torch.tensor([1.0 + row for row in rows], dtype=torch.float64)
    out = model.forward_backward(micro_batches(GPT, split, replica), weights=weights)
    return out['loss'], model.metric_values(), collect_grads(model.chunks), out['logps']


def _own_formula(logps, labels):
    """Of whole rows, one by one."""
    losses = []
    for row, (logp, label) in enumerate(zip(logps, labels)):
        kept = label != -100
        if kept.any():
            unsure = logp[kept].exp() < 0.02
            losses.append((1 + row) * (-logp[kept] * unsure).sum() / kept.sum())
    return (sum(losses) / len(losses)).item()


@pytest.mark.parametrize(
    ('layout', 'split'),
    [(Layout(tp=2, pp=2), UNEVEN[1]), (Layout(cp=2, dp=2), UNEVEN[2]), (Layout(dp=2), EMPTY_RANK)],
    ids=str,
)
def test_a_loss_that_takes_the_batch_is_exact_under_every_layout_and_split(layout, split):
    ((loss, metrics, grads, (logps,)),) = run_ranks(_own, 1, Layout(), even(1, 1))
    (batch,) = micro_batches(GPT, even(1, 1), 0)
    assert loss == pytest.approx(_own_formula(logps, batch['labels']), rel=1e-12)
    results = run_ranks(_own, layout.world, layout, split)
    for other, others, _, _ in results:
        assert other == pytest.approx(loss, rel=1e-9)
        assert others == pytest.approx(metrics, rel=1e-9)
    assert compare([result[2] for result in results], grads).error < 1e-9


class Smooth:
    """Squared differences of neighbours, which a context parallel slice does not have beside each other."""

    over = 'sequences'

    def __init__(self, over):
        self.mean_over = over

    def __call__(self, inputs, outputs, batch):
        logps, numbers, mask = map(batch.whole, (outputs['logps'], batch.sequence_ids, batch.mask))
        both = mask[:, 1:] & mask[:, :-1] & (numbers[:, 1:] == numbers[:, :-1])
        return batch.mean(torch.nn.functional.pad((logps.diff(dim=1) ** 2) * both, (1, 0)), over=self.mean_over)


def _smooth(layout, over, packed):
    model = _trainer(GPT, layout, None)
    model.set_loss(Smooth(over))
    split, replica = PAIR_SPLITS['uneven', layout.dp], dist.get_rank(model.groups.dp)
    out = model.forward_backward(pair_batches(GPT, split, replica, packed, 'interleaved'))
    return out['loss'], collect_grads(model.chunks), out['logps']


@pytest.mark.parametrize('over', ['tokens', 'sequences'])
def test_a_loss_of_neighbours_sees_whole_rows_under_context_parallelism(over):
    ((loss, grads, logps),) = run_ranks(_smooth, 1, Layout(), over, False)
    batches = pair_batches(GPT, PAIR_SPLITS['uneven', 1], 0, False, 'interleaved')
    sums, counts = [], []
    for rows, batch in zip(logps, batches, strict=True):
        for row, labels in zip(rows, batch['labels'], strict=True):
            kept = labels != -100
            both = kept[1:] & kept[:-1]
            sums.append(((row[1:] - row[:-1]) ** 2)[both].sum().item())
            counts.append(kept.sum().item())
    means = [total / n for total, n in zip(sums, counts, strict=True) if n]
    assert loss == pytest.approx(sum(sums) / sum(counts) if over == 'tokens' else sum(means) / len(means), rel=1e-12)
    for layout, packed in ((Layout(cp=2, tp=2), False), (Layout(cp=2, dp=2), True), (Layout(pp=2), True)):
        results = run_ranks(_smooth, layout.world, layout, over, packed)
        for other, _, _ in results:
            assert other == pytest.approx(loss, rel=1e-9)
        assert compare([result[1] for result in results], grads).error < 1e-9


def test_means_of_a_batch_by_hand():
    labels = torch.tensor([[1, -100, 2], [-100, -100, -100], [3, 4, 5], [-100, 6, 7]])
    values = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    batch = TokenBatch.of({'labels': labels})
    assert batch.mean(values).item() == pytest.approx((0 + 2 + 6 + 7 + 8 + 10 + 11) / 7)
    assert batch.mean(values, over='sequences').item() == pytest.approx((1 + 7 + 10.5) / 3)
    assert batch.mean(torch.tensor([1.0, 50.0, 2.0, 3.0]), over='sequences').item() == pytest.approx(2)
    assert batch.mean(torch.tensor([1.0, 3.0]), over='pairs').item() == pytest.approx(2)
    nothing = TokenBatch.of({'labels': torch.full((4, 2), -100)})
    assert nothing.mean(torch.tensor([1.0, 3.0]), over='pairs') == 0
    for over, wrong in (('pairs', torch.zeros(3)), ('sequences', torch.zeros(3)), ('rows', values)):
        with pytest.raises(ValueError, match='must be'):
            batch.mean(wrong, over=over)


# ---- by name and by address


@pytest.mark.parametrize('name', ['grpo', 'GRPO', 'GRPOLoss', 'grpo_loss'])
def test_losses_go_by_short_names(name):
    assert type(build_loss(name)) is LOSSES['GRPOLoss']


def test_every_loss_and_metric_has_a_short_name():
    for short, full in {
        'mse': 'MSELoss', 'chunked_cross_entropy': 'ChunkedCrossEntropyLoss', 'cross-entropy': 'CrossEntropyLoss',
        'gkd': 'GKDLoss', 'dr_grpo': 'DRGRPOLoss', 'dpo': 'DPOLoss', 'simpo': 'SimPOLoss', 'infonce': 'InfonceLoss',
    }.items():  # fmt: skip
        assert type(build_loss(short)).__name__ == full
    for short, full in {
        'accuracy': 'Accuracy', 'loss': 'LossMetric', 'train': 'TrainMetric', 'dpo': 'DPOMetric',
        'completion_reward': 'CompletionRewardMetric', 'embedding': 'EmbeddingMetric',
    }.items():  # fmt: skip
        assert type(build_metric(short)).__name__ == full
    assert len({name.lower() for name in (*LOSSES, *METRICS)}) == len(LOSSES) + len(METRICS)
    assert set(POLICY) <= set(LOSSES)


def test_unknown_names_are_told_the_nearest():
    with pytest.raises(ValueError, match="'GRPLoss'; did you mean 'GRPOLoss'"):
        build_loss('GRPLoss')
    with pytest.raises(ValueError, match="'accurcy'; did you mean 'Accuracy'"):
        build_metric('accurcy')


def _plugged(path):
    initialize(Layout())
    model = MegatronModel(wrap(build(GPT)), vocab_size=GPT.vocab_size)
    model.set_loss(f'file:{path}:Scaled', factor=3.0)
    model.set_metric(f'file:{path}:Count')
    out = model.forward_backward(micro_batches(GPT, even(1, 2), 0))
    counted = model.calculate_metric()
    model.set_loss('cross_entropy')
    model.zero_grad()
    plain = model.forward_backward(micro_batches(GPT, even(1, 2), 0))
    with pytest.raises(ValueError, match='no_such'):
        model.set_metric(f'file:{path}:no_such')
    return out['loss'], plain['loss'], counted, len(model._metrics[True])


def test_losses_and_metrics_come_from_a_file(tmp_path):
    path = tmp_path / 'mine.py'
    path.write_text(
        'from twinkle_megatron.loss import Loss\n'
        'from twinkle_megatron.metric import SUM, Metric\n'
        'class Scaled(Loss):\n'
        '    def __init__(self, factor):\n'
        '        self.factor = factor\n'
        '    def __call__(self, inputs, outputs, **extra):\n'
        "        kept = inputs['labels'] != -100\n"
        "        return {'loss': -self.factor * outputs['logps'].sum(), 'num_tokens': kept.sum()}\n"
        'class Count(Metric):\n'
        "    fields = {'calls': SUM}\n"
        '    def accumulate(self, inputs, outputs, **kwargs):\n'
        '        self.state.fold(calls=1)\n'
        '    def figures(self, totals):\n'
        '        return dict(totals)\n'
    )
    loss, plain, counted, metrics = run_ranks(_plugged, 1, path)[0]
    assert loss == pytest.approx(3 * plain, rel=1e-12)
    assert counted == {'calls': '2.0000'}
    assert metrics == 1, 'a set_metric that fails leaves what was there'
