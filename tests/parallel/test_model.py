"""MegatronModel beside the schedule: accumulation over calls, options of DDP and of the model, evaluation, steps."""

from __future__ import annotations

import dataclasses
import sys

import megatron.core
import pytest
import torch
import torch.distributed as dist
from gradients import collect_grads, compare
from invariance import LENGTH, UNEVEN, Result, even, formula, micro_batches, model_on, reference, samples, train_once
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from ranks import device, run_ranks
from test_invariance import GPT, check
from tiny_gpt import Layout, Spec, build, initialize, unwrapped, wrap

from twinkle_megatron import MegatronModel
from twinkle_megatron.metric import LossMetric, TrainMetric

PER_MICRO_BATCH = dataclasses.replace(GPT, config={'calculate_per_token_loss': False})


@pytest.mark.parametrize(
    ('layout', 'split'),
    [
        (Layout(), UNEVEN[1]),
        (Layout(dp=2, cp=2), UNEVEN[2]),
        (Layout(pp=2, vpp=2), UNEVEN[1]),
        (Layout(tp=2, sp=True, dp=2), UNEVEN[2]),
    ],
    ids=str,
)
def test_case_31_flag_calculate_per_token_loss_does_not_matter(layout, split):
    check(PER_MICRO_BATCH, layout, split)


@pytest.mark.parametrize('layout', [Layout(cp=2), Layout(cp=4)], ids=str)
def test_case_30_one_trained_token_keeps_its_gradient_under_context_parallelism(layout):
    results = run_ranks(_one_token, layout.world, layout)
    expected = run_ranks(_one_token, 1, Layout())[0]
    assert compare(results, expected).error < 1e-9


def _one_token(layout):
    model = model_on(GPT, layout)
    (batch,) = micro_batches(GPT, even(1, 1), 0)
    kept = batch['labels'].masked_fill(torch.arange(LENGTH) != 3, -100)
    kept[1:] = -100
    model.forward_backward(inputs=[dict(batch, labels=kept)])
    return collect_grads(model.chunks)


@pytest.mark.parametrize(
    'init',
    [
        {'dft': True},
        {'label_smoothing': 0.1},
        {'z_loss': 1e-2, 'label_smoothing': 0.3},
        {'chunk_size': 7},
        {'reduction': 'sum'},
        {'inplace_backward': True},
    ],
    ids=str,
)
def test_every_option_of_the_loss_is_exact_on_shards(init):
    check(GPT, Layout(tp=2, pp=2), UNEVEN[1], init)


@pytest.mark.parametrize(
    ('spec', 'layout', 'split'),
    [
        (Spec(vocab_size=62, pad_vocab_to=4, tied=True), Layout(tp=2, pp=2), UNEVEN[1]),
        (Spec(vocab_size=62, position='rope'), Layout(cp=2, tp=2), UNEVEN[1]),
        (Spec(vocab_size=64, experts=4), Layout(ep=2, dp=2), UNEVEN[2]),
        (Spec(vocab_size=64, experts=4), Layout(tp=2, dp=2, ep=2, etp=1, sp=True), even(2, 2)),
        (
            Spec(vocab_size=64, config={'variable_seq_lengths': True, 'moe_token_dispatcher_type': 'alltoall'}),
            Layout(pp=2),
            UNEVEN[1],
        ),
    ],
    ids=['tied', 'rope-gqa', 'experts', 'experts-sp', 'variable-lengths'],
)
def test_kinds_of_models_keep_the_promise(spec, layout, split):
    check(spec, layout, split)


@pytest.mark.parametrize(
    'ddp',
    [
        {'distributed_optimizer': True},
        {'overlap': True},
        {'distributed_optimizer': True, 'overlap': True},
    ],
    ids=str,
)
def test_ways_of_reducing_gradients_keep_the_promise(ddp):
    check(GPT, Layout(dp=2, pp=2), UNEVEN[2], ddp=ddp)


@pytest.mark.parametrize('spec', [GPT, PER_MICRO_BATCH], ids=['per-token', 'per-micro-batch'])
@pytest.mark.parametrize('ddp', [{}, {'distributed_optimizer': True}, {'overlap': True}], ids=str)
@pytest.mark.parametrize(
    'finalize',
    [(True, True, True), (False, False, True), (False, True, False), (True, False, None)],
    ids=lambda f: '-'.join(str(x) for x in f),
)
def test_several_calls_give_the_mean_over_all_their_tokens(spec, ddp, finalize):
    """Calls over parts of the batch, then one step: the gradient of the whole batch, however they are finalised."""
    expected = reference(spec, {})
    results = run_ranks(_several_calls, 2, spec, Layout(dp=2), finalize, ddp)
    assert compare(results, expected.grads).error < 1e-9


def _several_calls(spec, layout, finalize, ddp):
    model = model_on(spec, layout, ddp=ddp)
    whole = micro_batches(spec, UNEVEN[2], dist.get_rank(model.groups.dp))
    parts = [whole[:1], whole[1:2], whole[2:]]
    if finalize[-1] is None:
        parts = [whole[:1], whole[1:]]
    for part, now in zip(parts, finalize):
        model.forward_backward(inputs=part, finalize=now)
    assert model._accumulation.ready()
    return collect_grads(model.chunks)


@pytest.mark.parametrize('layout', [Layout(), Layout(tp=2)], ids=str)
def test_bare_chunks_hold_the_gradient_in_grad(layout):
    expected = reference(GPT, {})
    results = run_ranks(_bare, layout.world, layout)
    assert compare([r for r, _ in results], expected.grads).error < 1e-9
    norm = sum(part.grad.double().square().sum() for part in expected.grads.values()).sqrt().item()
    assert all(value == pytest.approx(norm, rel=1e-9) for _, value in results)


def _bare(layout):
    initialize(layout)
    chunks = build(GPT, layout)
    optimizer = torch.optim.SGD(chunks[0].parameters(), lr=0.0)
    model = MegatronModel(chunks, optimizer, vocab_size=GPT.vocab_size)
    model.set_loss('CrossEntropyLoss')
    batches = micro_batches(GPT, UNEVEN[1], 0)
    model.forward_backward(inputs=batches[:1])
    model.forward_backward(inputs=batches[1:])
    return collect_grads(model.chunks), model.clip_grad_and_step(1e-3)


@pytest.mark.parametrize('layout', [Layout(), Layout(tp=2, pp=2), Layout(dp=2), Layout(cp=2)], ids=str)
def test_case_55_57_60_evaluation_returns_the_one_rank_loss_on_every_rank(layout):
    expected = reference(GPT, {})
    for loss, metrics, training, grads in run_ranks(_evaluate, layout.world, layout):
        assert loss == pytest.approx(expected.loss, rel=1e-9)
        assert metrics['loss'] == expected.metrics['loss']
        assert metrics['total_tokens'] == expected.metrics['total_tokens']
        assert training == (True, {'loss': '0.0000'})
        assert all(part.grad.abs().max() == 0 for part in grads.values())


def _evaluate(layout):
    model = model_on(GPT, layout)
    dp = dist.get_world_size(model.groups.dp)
    out = model.forward_only(inputs=micro_batches(GPT, UNEVEN[dp], dist.get_rank(model.groups.dp)))
    was_training = all(chunk.training for chunk in model.chunks)
    return (
        out['loss'],
        model.calculate_metric(is_training=False),
        (was_training, model.calculate_metric()),
        collect_grads(model.chunks),
    )


def test_case_35_a_batch_without_trained_tokens_trains_nothing_on_any_rank():
    for loss, norm, same, shapes in run_ranks(_all_ignored, 4, Layout(pp=2, dp=2)):
        assert (loss, norm, same) == (0.0, None, True)
        assert shapes in ([], [(4, LENGTH)])


def _trainer(spec, layout, ddp=None, **optimizer):
    initialize(layout)
    chunks = wrap(build(spec, layout), **(ddp or {}))
    half = chunks[0].config.bf16, chunks[0].config.fp16
    config = OptimizerConfig(
        optimizer='adam',
        lr=1e-2,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=half[0],
        fp16=half[1],
        params_dtype=spec.dtype,
        **optimizer,
        use_distributed_optimizer=bool((ddp or {}).get('distributed_optimizer')),
        overlap_param_gather=bool((ddp or {}).get('overlap_param_gather')),
    )
    model = MegatronModel(chunks, get_megatron_optimizer(config, chunks), vocab_size=spec.vocab_size)
    model.set_loss('ChunkedCrossEntropyLoss')
    for metric in (LossMetric, TrainMetric):
        model.add_metric(metric)
    return model


def _all_ignored(layout):
    model = _trainer(dataclasses.replace(GPT, dtype=torch.float32), layout)
    (batch,) = micro_batches(GPT, even(1, 1), 0)
    rows = {k: v[:4] for k, v in batch.items()}
    before = [p.detach().clone() for chunk in model.chunks for p in chunk.parameters()]
    out = model.forward_backward(inputs=[dict(rows, labels=torch.full_like(rows['labels'], -100))])
    norm = model.clip_grad_and_step()
    after = [p for chunk in model.chunks for p in chunk.parameters()]
    return out['loss'], norm, all(map(torch.equal, before, after)), [tuple(x.shape) for x in out['logps']]


@pytest.mark.parametrize(
    'ddp',
    [
        {},
        {'distributed_optimizer': True},
        {'distributed_optimizer': True, 'overlap': True, 'overlap_param_gather': True},
    ],
    ids=str,
)
def test_steps_are_the_same_on_every_layout(ddp):
    """Three Adam steps in float32: losses and gradient norms of tp2·pp2 and dp2 are those of one process."""
    spec = dataclasses.replace(GPT, dtype=torch.float32)
    (expected,) = run_ranks(_three_steps, 1, spec, Layout(), {})
    for layout in (Layout(tp=2, pp=2), Layout(dp=2)):
        for found in run_ranks(_three_steps, layout.world, spec, layout, ddp):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-4, atol=0)


def _three_steps(spec, layout, ddp):
    model = _trainer(spec, layout, ddp)
    out = []
    for seed in range(3):
        split = UNEVEN[layout.dp]
        loss = model.forward_backward(inputs=micro_batches(spec, split, dist.get_rank(model.groups.dp), seed))['loss']
        out.append((loss, model.clip_grad_and_step(0.5)))
    said = model.calculate_metric()
    assert said['iters'] == 3
    assert float(said['grad_norm']) == pytest.approx(out[-1][1], abs=1e-6)
    assert said['learning rate'] == '1.000000e-02'
    return out


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_trains_with_a_loss_scale(dtype):
    """A loss scale multiplies the loss and is divided out by the optimizer: the first loss is near the float64 one."""
    expected = reference(GPT, {}).loss
    spec = dataclasses.replace(GPT, dtype=dtype)
    for loss, norm in run_ranks(_scaled, 2, spec, Layout(tp=2)):
        assert loss == pytest.approx(expected, rel=2e-2)
        assert norm is not None
        assert norm > 0


def _scaled(spec, layout):
    scale = (
        {
            'initial_loss_scale': 1024.0,
            'loss_scale': None,
            'min_loss_scale': 1.0,
            'loss_scale_window': 10,
            'hysteresis': 2,
        }
        if spec.dtype is torch.float16
        else {}
    )
    model = _trainer(spec, layout, **scale)
    model.config.grad_scale_func = model.optimizer.scale_loss
    loss = model.forward_backward(inputs=micro_batches(spec, UNEVEN[1], 0))['loss']
    return loss, model.clip_grad_and_step()


def test_multi_token_prediction_trains_on_plain_cross_entropy():
    """MTP calls the head's hook first, for its own losses: gradients are those of Megatron's MTP on a float64 loss."""
    spec = Spec(vocab_size=62, pad_vocab_to=2, mtp=1)
    (expected,) = run_ranks(_plain_mtp, 1, spec)
    # from 0.19 on Megatron scales each MTP loss by token counts of the CP rank, so that it depends on the split
    splits = (Layout(cp=2),) if megatron.core.__version__ < '0.19' else ()
    for layout in (Layout(), Layout(tp=2), *splits):
        results = run_ranks(_our_mtp, layout.world, spec, layout)
        assert compare(results, expected).error < 1e-9


def _our_mtp(spec, layout):
    model = model_on(spec, layout)
    model.forward_backward(inputs=micro_batches(spec, UNEVEN[1], 0))
    return collect_grads(model.chunks)


def _plain_mtp(spec):
    """Megatron's schedule in one process, its MTP, and torch's cross entropy."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    initialize(Layout())
    (chunk,) = wrap(build(spec))

    def cross_entropy(labels, logits):
        logits = logits.transpose(0, 1)[..., : spec.vocab_size]
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction='none')

    unwrapped(chunk).compute_language_model_loss = cross_entropy

    def step(data, model):
        batch = next(data)
        mask = (batch['labels'] != -100).float()
        positions = torch.arange(LENGTH, device=device()).expand_as(batch['input_ids'])
        labels = batch['labels'].clamp_min(0).to(device())
        out = model(batch['input_ids'].to(device()), positions, None, labels=labels, loss_mask=mask)
        return out, lambda o: ((o * mask).sum(), mask.sum().int(), {'l': o.detach().sum()})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(micro_batches(spec, UNEVEN[1], 0)),
        model=chunk,
        num_microbatches=3,
        seq_length=LENGTH,
        micro_batch_size=3,
        forward_only=False,
    )
    return collect_grads([chunk])


def test_samples_of_unequal_length_are_collated_and_padding_changes_nothing():
    expected = reference(GPT, {})
    for layout in (Layout(pp=2), Layout(cp=2, tp=2, sp=True)):
        results = run_ranks(_ragged, layout.world, layout)
        assert all(loss == pytest.approx(results[0][0], rel=1e-12) for loss, _ in results)
        (single,) = run_ranks(_ragged, 1, Layout())
        assert results[0][0] == pytest.approx(single[0], rel=1e-9)
        assert compare([grads for _, grads in results], single[1]).error < 1e-9
    assert expected.loss != single[0]  # it is another batch: samples are cut


def _ragged(layout):
    model = model_on(GPT, layout)
    cut = [{k: v[: LENGTH - 2 * i + 1] for k, v in sample.items()} for i, sample in enumerate(samples(GPT)[:5])]
    out = model.forward_backward(inputs=cut, micro_batch_size=2)
    if model.groups.is_last_stage:
        assert [tuple(x.shape) for x in out['logps']] == [(2, 16), (2, 13), (1, 9)]
    return out['loss'], collect_grads(model.chunks)


@pytest.mark.parametrize('form', ['position_ids', 'cu_seqlens'])
def test_a_packed_row_gives_the_gradient_of_its_sequences(form):
    expected = reference(GPT, {})
    for layout in (Layout(), Layout(tp=2, pp=2)):
        results = run_ranks(_packed, layout.world, layout, form)
        assert all(r.loss == pytest.approx(expected.loss, rel=1e-9) for r in results)
        assert compare([r.grads for r in results], expected.grads).error < 1e-9


def _packed(layout, form):
    model = model_on(GPT, layout)
    whole = samples(GPT)
    batch = {key: torch.cat([sample[key] for sample in whole])[None] for key in whole[0]}
    if form == 'position_ids':
        batch['position_ids'] = torch.arange(LENGTH).repeat(len(whole))[None]
    else:
        batch['cu_seqlens'] = torch.arange(0, LENGTH * len(whole) + 1, LENGTH)
    out = model.forward_backward(inputs=[batch])
    return Result(out['loss'], collect_grads(model.chunks), {}, out['logps'])


def test_a_custom_loss_sees_shards_and_is_weighed_by_its_tokens():
    """A sum over tokens from the document's form of a loss gives the token mean, as the built-in loss does."""
    expected = reference(GPT, {})
    for form in (_sum_loss, _SumLoss):
        results = run_ranks(train_once, 4, GPT, Layout(tp=2, dp=2), UNEVEN[2], form)
        assert compare([r.grads for r in results], expected.grads).error < 1e-9


def _sum_loss(inputs, outputs):
    trained = inputs['labels'] != -100
    return {'loss': -(outputs['logps'] * trained).sum(), 'num_tokens': trained.sum().clamp(min=1)}


class _SumLoss:
    def __call__(self, inputs, outputs, **kwargs):
        from twinkle_megatron.vocab_parallel import cross_entropy

        assert outputs['logits'].shape[-1] == outputs['vocab_shard'].local_size == 32
        loss = cross_entropy(outputs['logits'], inputs['labels'], shard=outputs['vocab_shard'])
        return {'loss': loss.sum(), 'num_tokens': max(int((inputs['labels'] != -100).sum()), 1)}


def test_a_bare_scalar_weighs_every_micro_batch_the_same_and_gets_its_keywords():
    """Extras are split in sample order; micro-batch means are averaged over micro-batches and replicas."""
    results = run_ranks(_scalar, 2, Layout(dp=2))
    (expected,) = run_ranks(_scalar_reference, 1)
    assert all(loss == pytest.approx(expected[0], rel=1e-9) for loss, _ in results)
    assert compare([grads for _, grads in results], expected[1]).error < 1e-9


def _weighted(inputs, outputs, weights, power=1):
    assert len(weights) == inputs['labels'].shape[0]
    return (outputs['logps'].sum(-1) * weights**power).mean()


def _scalar(layout):
    model = model_on(GPT, layout, _weighted)
    replica = dist.get_rank(model.groups.dp)
    split = UNEVEN[2].replicas[replica]
    weights = torch.tensor([float(i + 1) for at in split for i in at])
    out = model.forward_backward(inputs=micro_batches(GPT, UNEVEN[2], replica), weights=weights, power=2)
    return out['loss'], collect_grads(model.chunks)


def _scalar_reference():
    initialize(Layout())
    (chunk,) = build(GPT)
    means = []
    for replica in range(2):
        for at, batch in zip(UNEVEN[2].replicas[replica], micro_batches(GPT, UNEVEN[2], replica)):
            ids, labels = batch['input_ids'].to(device()), batch['labels'].to(device())
            positions = torch.arange(LENGTH, device=device()).expand_as(ids)
            logps = chunk(ids, positions, None)[..., : GPT.vocab_size].log_softmax(-1)
            logps = logps.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * (labels != -100)
            weights = torch.tensor([float(i + 1) for i in at], device=device())
            means.append((logps.sum(-1) * weights**2).mean())
    loss = torch.stack(means).mean()
    loss.backward()
    return loss.item(), collect_grads([unwrapped(chunk)])


def test_process_groups_without_global_state():
    """A ProcessGroupCollection in place of Megatron's globals gives the same numbers."""
    expected = reference(GPT, {})
    for layout in (Layout(tp=2), Layout(tp=2, pp=2)):
        results = run_ranks(_collection, layout.world, layout)
        assert all(r.loss == pytest.approx(expected.loss, rel=1e-9) for r in results)
        assert compare([r.grads for r in results], expected.grads).error < 1e-9


def _collection(layout):
    from megatron.core.process_groups_config import ProcessGroupCollection

    initialize(layout)
    chunks = wrap(build(GPT, layout))
    model = MegatronModel(chunks, groups=ProcessGroupCollection.use_mpu_process_groups(), vocab_size=GPT.vocab_size)
    model.set_loss('CrossEntropyLoss')
    out = model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))
    return Result(out['loss'], collect_grads(model.chunks), {}, out['logps'])


def test_formula_of_the_tests_is_torch_cross_entropy():
    logits, labels = torch.randn(7, 5, dtype=torch.float64), torch.tensor([0, -100, 4, 2, 2, -100, 1])
    for smoothing in (0.0, 0.2):
        expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        torch.testing.assert_close(formula(logits, labels, {'label_smoothing': smoothing}), expected)


def test_completion_mask_takes_tokens_out_of_loss_gradient_and_metrics():
    """Masked by completion_mask or by label -100: the same numbers, on shards."""
    for by_mask, by_label in run_ranks(_masked_twice, 4):
        assert by_mask[0] == pytest.approx(by_label[0], rel=1e-12)
        assert by_mask[1] == by_label[1]
        assert by_mask[2].keys() == by_label[2].keys()
        for name, part in by_mask[2].items():
            torch.testing.assert_close(part.grad, by_label[2][name].grad, rtol=1e-12, atol=1e-14)


def _masked_twice():
    layout = Layout(tp=2, cp=2)
    out = []
    for by_mask in (True, False):
        model = model_on(GPT, layout)
        batches = micro_batches(GPT, UNEVEN[1], 0)
        for batch in batches:
            keep = torch.arange(LENGTH) % 3 > 0
            if by_mask:
                batch['completion_mask'] = keep.expand_as(batch['labels'])
            else:
                batch['labels'] = batch['labels'].masked_fill(~keep, -100)
        loss = model.forward_backward(inputs=batches)['loss']
        out.append((loss, model.calculate_metric(), collect_grads(model.chunks)))
    return out


def test_one_sweep_serves_the_loss_and_the_metrics():
    """One collective over TP a micro-batch forward, none backward, with Accuracy's argmax riding along."""
    assert run_ranks(_count_collectives, 2) == [3, 3]


def _count_collectives():
    module = sys.modules['twinkle_megatron.vocab_parallel.token_stats']  # the package exports the function of that name

    model = model_on(GPT, Layout(tp=2), 'CrossEntropyLoss', {'label_smoothing': 0.1})
    model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))  # builds the shard once
    calls = []
    gather = module.all_gather_rows
    module.all_gather_rows = lambda row, group: calls.append(row.shape) or gather(row, group)
    model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))
    return len(calls)


def test_a_tiny_vocabulary_padded_wider_than_itself_is_no_gathered_one():
    """20 ids in 64 columns on two ranks: the second shard is all padding."""
    check(dataclasses.replace(GPT, vocab_size=20, pad_vocab_to=32), Layout(tp=2), UNEVEN[1])


class _Bigram(torch.nn.Module):
    """A chunk that is no GPTModel: it returns logits `[b, s, V/tp]` and takes two arguments."""

    def __init__(self, config, columns):
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        weights = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.table = torch.nn.Parameter(weights[:, columns].clone())

    def set_input_tensor(self, tensor):
        pass

    def forward(self, input_ids, position_ids):
        return self.table[input_ids] + 0.01 * position_ids[..., None]


@pytest.mark.parametrize('cp', [1, 2])
def test_a_chunk_that_returns_logits_needs_no_hook(cp):
    loss, grad = zip(*run_ranks(_bigram, 2 * cp, cp))
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    ids, labels = _bigram_batch()
    expected = torch.nn.functional.cross_entropy(
        (table[ids] + 0.01 * torch.arange(8)[..., None]).transpose(1, 2), labels
    )
    expected.backward()
    assert loss == pytest.approx([expected.item()] * (2 * cp), rel=1e-12)
    for rank in range(2 * cp):
        torch.testing.assert_close(grad[rank], table.grad[:, 4 * (rank % 2) :][:, :4])


def _bigram_batch():
    ids = torch.randint(0, 8, (3, 8), generator=torch.Generator().manual_seed(1))
    return ids, ids.roll(-1, 1).masked_fill(torch.arange(8) > 4, -100)


def _bigram(cp):
    from tiny_gpt import transformer_config

    layout = Layout(tp=2, cp=cp)
    initialize(layout)
    rank = dist.get_rank() % 2
    chunk = _Bigram(transformer_config(GPT, layout), slice(4 * rank, 4 * rank + 4)).to(device())
    for parameter in chunk.parameters():
        parameter.tensor_model_parallel = True
    model = MegatronModel(wrap([chunk]))
    model.set_loss('CrossEntropyLoss')
    ids, labels = _bigram_batch()
    out = model.forward_backward(
        inputs=[{'input_ids': ids[:1], 'labels': labels[:1]}, {'input_ids': ids[1:], 'labels': labels[1:]}]
    )
    return out['loss'], chunk.table.main_grad.clone()


def test_a_whole_causal_mask_changes_nothing_where_it_may_be_given():
    expected = reference(GPT, {})
    results = run_ranks(_whole_mask, 2)
    assert compare(results, expected.grads).error < 1e-9


def _whole_mask():
    model = model_on(GPT, Layout(pp=2))
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    batches = micro_batches(GPT, even(1, 2), 0)
    uneven = [dict(batch, attention_mask=mask) for batch in micro_batches(GPT, UNEVEN[1], 0)]
    with pytest.raises(ValueError, match='neither split'):
        model.forward_backward(inputs=uneven)
    model.forward_backward(inputs=[dict(batch, attention_mask=mask) for batch in batches])
    return collect_grads(model.chunks)
