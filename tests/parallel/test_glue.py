"""MegatronModel under odd inputs, odd losses and odd moments: the numbers stay right, or every rank says why not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradients import collect_grads, compare
from invariance import LENGTH, UNEVEN, even, micro_batches, model_on, reference, samples
from ranks import run_ranks
from test_errors import _without
from test_invariance import GPT
from test_model import _trainer
from tiny_gpt import Layout, build, initialize, wrap

from twinkle_megatron import MegatronModel
from twinkle_megatron.groups import Groups

FLOAT32 = dataclasses.replace(GPT, dtype=torch.float32)


def _message(call, kind=ValueError):
    """What the error of a call says."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# errors -------------------------------------------------------------------------------------------------------------


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError('no message')


def _boom():
    raise ValueError('boom')


def _unreadable():
    raise Unreadable


ERRORS = {
    'ValueError': (_boom, 'on rank 1: boom'),
    'UnicodeDecodeError': (lambda: b'\xff'.decode(), 'on rank 1: UnicodeDecodeError'),
    'Unreadable': (_unreadable, 'on rank 1: Unreadable: (its message cannot be read'),
}


def test_an_error_on_one_tensor_parallel_rank_alone_reaches_the_other():
    """The failed rank goes on to enter the collectives of the sweep. An exception that cannot be made from a message
    arrives as a RuntimeError that names it."""
    for messages in run_ranks(_one_tp_rank_fails, 2, timeout=30):
        for (_, words), message in zip(ERRORS.values(), messages):
            assert words in message


def _one_tp_rank_fails():
    model = model_on(GPT, Layout(tp=2))
    batches, messages = micro_batches(GPT, even(1, 4), 0), []
    for fail, _ in ERRORS.values():
        calls = []

        def loss(inputs, outputs, fail=fail, calls=calls):
            calls.append(1)
            if dist.get_rank() == 1 and len(calls) == 2:
                fail()
            return -outputs['logps'].mean()

        model.set_loss(loss)
        messages.append(_message(lambda: model.forward_backward(inputs=batches), (ValueError, RuntimeError)))
    return messages


WRONG_LOSSES = {
    'tuple': (lambda i, o: (o['logps'].sum(), 1), 'got tuple'),
    'number': (lambda i, o: 1.0, 'got float'),
    'vector': (lambda i, o: o['logps'], 'got a tensor of shape'),
    'integer': (lambda i, o: torch.tensor(3), 'torch.int64'),
    'complex': (lambda i, o: o['logps'].sum() * 1j, 'torch.complex128'),
    'no loss': (lambda i, o: {'los': o['logps'].sum()}, "{'los': a tensor"),
    'detached': (lambda i, o: o['logps'].sum().detach(), 'was it detached'),
    'count': (lambda i, o: {'loss': o['logps'].sum(), 'num_tokens': None}, 'num_tokens must be one number'),
    'counts': (lambda i, o: {'loss': o['logps'].sum(), 'num_tokens': torch.ones(2)}, 'num_tokens must be one number'),
    'written': (lambda i, o: o['logits'].div_(2.0).sum() - o['logps'].sum(), "must not write to outputs['logits']"),
}


def test_what_a_loss_must_not_return_is_named_on_every_rank():
    for messages in run_ranks(_wrong_losses, 2, timeout=40):
        for (_, words), message in zip(WRONG_LOSSES.values(), messages):
            assert 'on rank 1' in message
            assert words in message


def _wrong_losses():
    model = model_on(GPT, Layout(pp=2))
    messages = []
    for loss, _ in WRONG_LOSSES.values():
        model.set_loss(loss)
        messages.append(_message(lambda: model.forward_backward(inputs=micro_batches(GPT, even(1, 2), 0))))
    return messages


def _with(**values):
    return lambda batch: batch | values


def _positions(first, restart):
    at = torch.arange(LENGTH)
    return _with(position_ids=(torch.where(at < restart, at, at - restart) + first).expand(4, LENGTH))


WRONG_DATA = {
    'ragged': (_with(labels=[[1, 2], [1]]), "inputs[1]['labels'] must be a tensor, or numbers in equally long lists"),
    'text': (_with(attention_mask='causal'), "inputs[1]['attention_mask'] must be a tensor"),
    'float positions': (_with(position_ids=torch.zeros(4, LENGTH)), "inputs[1]['position_ids'] must hold integer ids"),
    'positions': (_positions(60, LENGTH), "inputs[1]['position_ids'] must lie in [0, 64)"),
    'packed rows': (_positions(0, 8), 'position_ids restart at 0 inside a row'),
    'sample beside rows': (lambda b: {k: v[0] for k, v in b.items()}, 'all micro-batches'),
}


def test_bad_values_are_found_before_the_pipeline_starts():
    for messages in run_ranks(_wrong_data, 2, timeout=40):
        for (_, words), message in zip(WRONG_DATA.values(), messages):
            assert words in message
            assert 'on rank' in message


def _wrong_data():
    model = model_on(GPT, Layout(pp=2))
    first, second = micro_batches(GPT, even(1, 2), 0)
    return [
        _message(lambda change=change: model.forward_backward(inputs=[first, change(second)]))
        for change, _ in WRONG_DATA.values()
    ]


def test_a_model_that_is_hooked_already_is_refused_on_every_rank():
    assert all('compute_language_model_loss' in message for message in run_ranks(_hooked, 2))


def _hooked():
    model = model_on(GPT, Layout(pp=2))
    if model.groups.is_last_stage:
        model._engine.models[0].compute_language_model_loss = lambda labels, logits: logits
    return _message(lambda: model.forward_backward(inputs=micro_batches(GPT, even(1, 2), 0)))


def test_training_without_autograd_and_groups_without_megatron_are_refused():
    no_grad, inference, groups = run_ranks(_refused, 1)[0]
    assert 'torch.no_grad()' in no_grad
    assert 'torch.no_grad()' in inference
    assert 'ProcessGroupCollection' in groups


def _refused():
    from megatron.core import parallel_state

    model = model_on(GPT, Layout())
    batches = micro_batches(GPT, even(1, 2), 0)
    with torch.no_grad():
        no_grad = _message(lambda: model.forward_backward(inputs=batches))
    with torch.inference_mode():
        inference = _message(lambda: model.forward_backward(inputs=batches))
        assert model.forward_only(inputs=batches)['loss'] > 0
    parallel_state.destroy_model_parallel()
    return no_grad, inference, _message(lambda: MegatronModel(model.chunks, groups=Groups()))


@pytest.mark.parametrize('ddp', [{}, {'overlap': True, 'distributed_optimizer': True}], ids=str)
def test_after_an_error_nothing_is_left_of_this_or_earlier_calls(ddp):
    """An error in the data and one in the loss, after calls that were finalised and not: then a good call alone."""
    results = run_ranks(_errors_between, 2, ddp)
    assert compare([grads for grads, _ in results], reference(GPT, {}).grads).error < 1e-9
    assert all(same for _, same in results)


def _errors_between(ddp):
    model = model_on(GPT, Layout(dp=2), ddp=ddp)
    batches = micro_batches(GPT, UNEVEN[2], dist.get_rank())
    bad = [dict(batch, labels=batch['labels'] + 62) for batch in batches]
    config = dict(vars(model.config))
    for finalize in (True, False):
        model.forward_backward(inputs=batches, finalize=finalize)
        _message(lambda: model.forward_backward(inputs=bad))
        assert not model._accumulation.ready()
        model.forward_backward(inputs=batches, finalize=finalize)
        model.set_loss(lambda inputs, outputs: _boom())
        _message(lambda now=not finalize: model.forward_backward(inputs=batches, finalize=now))
        model.set_loss('CrossEntropyLoss')
    model.forward_backward(inputs=batches)
    return collect_grads(model.chunks), all(vars(model.config)[name] is value for name, value in config.items())


# numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('ignore_index', [-1, 0])
def test_another_ignore_index_means_the_same_to_padding_and_metrics(ignore_index):
    """Samples of unequal length, some tokens ignored: as with -100, where no label is 0."""
    (found, expected) = run_ranks(_ignoring, 1, ignore_index)[0]
    assert found == expected
    assert expected['total_tokens'] > 0


def _ignoring(ignore_index):
    values = []
    for index in (ignore_index, -100):
        model = model_on(GPT, Layout(), 'CrossEntropyLoss', {'ignore_index': index})
        cut = [{key: value[: LENGTH - i] for key, value in sample.items()} for i, sample in enumerate(samples(GPT))]
        for sample in cut:
            labels = sample['labels'].clone()
            labels[labels == 0] = 1
            sample['labels'] = labels.masked_fill(labels == -100, index)
        model.forward_backward(inputs=cut, micro_batch_size=np.int64(3))
        values.append(model.metric_values())
    return values


@pytest.mark.parametrize('layout', [Layout(), Layout(pp=2), Layout(cp=2), Layout(tp=2, sp=True)], ids=str)
def test_micro_batches_without_rows_or_tokens_change_nothing(layout):
    expected = reference(GPT, {})
    results = run_ranks(_with_empty, layout.world, layout)
    assert compare([grads for grads, _, _ in results], expected.grads).error < 1e-9
    for _, evaluated, shapes in results:
        assert evaluated == pytest.approx(expected.loss, rel=1e-9)
        assert shapes in ([], [(8, LENGTH), (0, LENGTH), (2, 0)])


def _with_empty(layout):
    model = model_on(GPT, layout)
    (batch,) = micro_batches(GPT, even(1, 1), 0)
    batches = [batch, {k: v[:0] for k, v in batch.items()}, {k: v[:2, :0] for k, v in batch.items()}]
    out = model.forward_backward(inputs=batches)
    evaluated = model.forward_only(inputs=batches)['loss']
    return collect_grads(model.chunks), evaluated, [tuple(x.shape) for x in out['logps']]


def test_ids_of_any_integer_dtype_arrays_and_foreign_keys_are_taken():
    expected = reference(GPT, {}).loss
    for losses in run_ranks(_dtypes, 2):
        assert losses == pytest.approx([expected] * len(losses), rel=1e-9)


def _dtypes():
    model = model_on(GPT, Layout(pp=2))
    losses = []
    for dtype in ('int32', 'int16', 'uint16', 'uint32', 'uint8'):
        batches = []
        for batch in micro_batches(GPT, UNEVEN[1], 0):
            ids, labels = batch['input_ids'].numpy().astype(dtype), batch['labels']
            mask = labels != -100  # unsigned ids cannot be -100
            labels = labels.clamp(min=0).numpy().astype(dtype)
            images = np.array([object(), None], dtype=object)
            batches.append({'input_ids': ids, 'labels': labels, 'completion_mask': mask, 'images': images, 'length': 3})
        losses.append(model.forward_backward(inputs=batches)['loss'])
    with torch.inference_mode():
        batches = [{k: v.clone() for k, v in batch.items()} for batch in micro_batches(GPT, UNEVEN[1], 0)]
    return [*losses, model.forward_backward(inputs=batches)['loss']]


def test_position_zero_at_padding_is_no_packed_row():
    """One row whose padding has position 0 may be split over context parallel ranks, as padded rows may."""
    results = run_ranks(_padded_positions, 2, Layout(cp=2))
    (expected,) = run_ranks(_padded_positions, 1, Layout())
    assert results == pytest.approx([expected] * 2, rel=1e-9)


def _padded_positions(layout):
    model = model_on(GPT, layout)
    real = torch.arange(LENGTH) < 11
    sample = {key: value[None] for key, value in samples(GPT)[0].items()}
    sample['labels'] = sample['labels'].masked_fill(~real, -100)
    sample |= {'attention_mask': real.long()[None], 'position_ids': (torch.arange(LENGTH) * real)[None]}
    return model.forward_backward(inputs=[sample])['loss']


class Counter:
    """A metric that is no `Metric`: it has no `values`."""

    def __init__(self, device_mesh=None, process_group=None):
        self.micro_batches = 0

    def accumulate(self, inputs, outputs):
        self.micro_batches += 1

    def calculate(self):
        return {'micro_batches': self.micro_batches}

    def reset(self):
        self.micro_batches = 0


def test_evaluation_leaves_modes_gradients_and_training_metrics_alone():
    """Between calls of training: another evaluation, one that fails, one without a trained token. A last call without
    trained tokens finalises what was put off."""
    results = run_ranks(_evaluate_between, 2)
    assert compare([grads for grads, _, _, _ in results], reference(GPT, {}).grads).error < 1e-9
    for _, nothing, modes, (said, values) in results:
        assert nothing == 0.0
        assert modes
        assert said['total_tokens'] == 47
        assert said['micro_batches'] > 0
        assert 'micro_batches' not in values


def _evaluate_between():
    model = model_on(GPT, Layout(dp=2), ddp={'overlap': True})
    model.add_metric(Counter)
    model._engine.models[0].decoder.layers[1].eval()  # as a frozen part may be
    before = {name: module.training for name, module in model.chunks[0].named_modules()}
    batches = micro_batches(GPT, UNEVEN[2], dist.get_rank())
    ignored = [dict(batch, labels=torch.full_like(batch['labels'], -100)) for batch in batches]
    model.forward_backward(inputs=batches[:1], finalize=False)
    model.forward_only(inputs=batches)
    model.forward_backward(inputs=batches[1:], finalize=False)
    _message(lambda: model.forward_only(inputs=[_without('labels')(batch) for batch in batches]))
    nothing = model.forward_only(inputs=ignored)['loss']
    model.forward_backward(inputs=ignored)
    same = before == {name: module.training for name, module in model.chunks[0].named_modules()}
    values = model.metric_values()
    return collect_grads(model.chunks), nothing, same, (model.calculate_metric(), values)


class _Scheduler:
    steps = 0

    def step(self, increment):
        self.steps += increment


@pytest.mark.parametrize('layout', [Layout(), Layout(pp=2)], ids=str)
def test_a_dynamic_loss_scale_is_used_and_an_overflow_skips_the_step(layout):
    """Without a `grad_scale_func` the optimizer's own scale is taken: norms are those of float32. Where gradients
    overflow nothing is stepped, the scale falls until they do not."""
    expected, _, _ = run_ranks(_scaled, 1, FLOAT32, Layout(), None)[0]
    for norms, steps, restored in run_ranks(
        _scaled, layout.world, dataclasses.replace(GPT, dtype=torch.float16), layout, 2.0**17
    ):
        taken = [norm for norm in norms if norm is not None]
        assert norms[0] is None, 'the first step overflows'
        assert taken[0] == pytest.approx(expected[0], rel=2e-2)
        assert steps == len(taken) > 0
        assert restored


def _scaled(spec, layout, scale):
    half = {'initial_loss_scale': scale, 'min_loss_scale': 1.0, 'loss_scale_window': 10, 'hysteresis': 1}
    model = _trainer(spec, layout, **(half if scale else {}))
    model.scheduler = _Scheduler()
    norms = []
    for _ in range(8):
        model.forward_backward(inputs=micro_batches(spec, UNEVEN[1], 0))
        norms.append(model.clip_grad_and_step(None))
    return norms, model.scheduler.steps, model.config.grad_scale_func is None


def test_megatrons_and_torchs_schedulers_advance_once_a_step():
    """The learning rate that is reported is the one that the step used."""
    expected = [0.005, 0.01]
    for rates, said in (*run_ranks(_megatron_scheduler, 2), *run_ranks(_torch_scheduler, 1)):
        assert rates == pytest.approx(expected)
        assert said == '5.000000e-03'


def _rates(model, group):
    rates = []
    for _ in range(2):
        model.forward_backward(inputs=micro_batches(FLOAT32, UNEVEN[1], 0))
        model.clip_grad_and_step()
        rates.append(group['lr'])
    return rates, model.calculate_metric()['learning rate']


def _megatron_scheduler():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    model = _trainer(FLOAT32, Layout(pp=2), min_lr=0.0)
    ramp = {'lr_warmup_steps': 2, 'lr_decay_steps': 10, 'lr_decay_style': 'constant'}
    decay = {'start_wd': 0.1, 'end_wd': 0.1, 'wd_incr_steps': 10, 'wd_incr_style': 'constant'}
    model.scheduler = OptimizerParamScheduler(model.optimizer, 0.0, 1e-2, 0.0, **ramp, **decay)
    return _rates(model, model.optimizer.param_groups[0])


def _torch_scheduler():
    initialize(Layout())
    chunks = build(FLOAT32)
    optimizer = torch.optim.AdamW(chunks[0].parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    model = MegatronModel(chunks, optimizer, scheduler, vocab_size=FLOAT32.vocab_size)
    model.set_loss('CrossEntropyLoss')
    model.add_metric('TrainMetric')
    return _rates(model, optimizer.param_groups[0])


def _rows_seen(layout, head):
    """A custom loss whose mean is over rows, on micro-batches of two and of one sample, which are equally large on a
    pipeline."""
    initialize(layout)
    chunks = wrap(build(GPT, layout))
    model = MegatronModel(chunks, vocab_size=GPT.vocab_size, head=head)

    def loss(inputs, outputs, weights):
        assert len(weights) == len(inputs['labels']) == len(outputs['logps']) == outputs['logits'].shape[0]
        spread = outputs['logits'].sum((1, 2)) * 1e-3
        return ((outputs['logps'].sum(1) + spread) * weights).mean()

    model.set_loss(loss)
    model.add_metric('LossMetric')
    (batch,) = micro_batches(GPT, even(1, 1), 0)
    inputs = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 2), slice(3, 4))]
    out = model.forward_backward(inputs, weights=torch.tensor([1.0, 2.0, 3.0]))
    return out['loss'], collect_grads(chunks), [tuple(x.shape) for x in out['logps']]


@pytest.mark.parametrize('head', ['logits', 'linear'])
def test_a_custom_loss_does_not_see_the_rows_that_the_schedule_adds(head):
    ((loss, grads, shapes),) = run_ranks(_rows_seen, 1, Layout(), head)
    results = run_ranks(_rows_seen, 2, Layout(pp=2), head)
    for found, _, logps in results:
        assert found == pytest.approx(loss, rel=1e-9)
        assert logps in ([], shapes)
    assert compare([parts for _, parts, _ in results], grads).error < 1e-9
