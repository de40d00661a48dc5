"""Every wrong call is one error on every rank, in time, with no gradient left and no step taken."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from gradients import collect_grads, compare
from invariance import UNEVEN, even, micro_batches, model_on, reference
from ranks import run_ranks
from test_invariance import GPT
from test_model import _trainer
from tiny_gpt import Layout, Spec, build, initialize, wrap

from twinkle_megatron import MegatronModel
from twinkle_megatron.metric import Metric

PP_DP = Layout(pp=2, dp=2)


class OwnError(Exception):
    """Not a builtin: reaches other ranks as a RuntimeError that names it."""


def _failing_loss(kind):
    """Fails in the second micro-batch of replica 1, on whichever rank computes it."""
    calls = []

    def loss(inputs, outputs):
        calls.append(1)
        if len(calls) == 2 and dist.get_rank() == 3:
            raise kind('the reward model is empty')
        return {'loss': -outputs['logps'].sum(), 'num_tokens': 1}

    return loss


@pytest.mark.parametrize('kind', [ValueError, KeyError, OwnError, AssertionError])
def test_an_error_in_the_loss_reaches_every_rank_and_leaves_nothing(kind):
    started = time.monotonic()
    outcomes = run_ranks(_fail_then_go_on, 4, kind, timeout=60)
    assert time.monotonic() - started < 30
    (expected,) = run_ranks(_one_step, 1)
    for name, message, empty, norm, after in outcomes:
        assert name == ('RuntimeError' if kind is OwnError else kind.__name__)
        assert 'on rank 3' in message
        assert 'the reward model is empty' in message
        assert ('OwnError' in message) == (kind is OwnError)
        assert empty
        assert norm is None, 'no optimizer step after an error'
        assert after == pytest.approx(expected, rel=1e-4)


def _fail_then_go_on(kind):
    model = _trainer(dataclasses.replace(GPT, dtype=torch.float32), PP_DP)
    model.set_loss(_failing_loss(kind))
    batches = micro_batches(GPT, even(2, 4), dist.get_rank(model.groups.dp))
    try:
        model.forward_backward(inputs=batches)
    except Exception as error:
        seen = type(error).__name__, str(error)
    empty = all(part.grad.abs().max() == 0 for part in collect_grads(model.chunks).values())
    norm = model.clip_grad_and_step()
    model.set_loss('CrossEntropyLoss')
    return (*seen, empty, norm, _losses(model))


def _losses(model):
    batches = micro_batches(GPT, UNEVEN[dist.get_world_size(model.groups.dp)], dist.get_rank(model.groups.dp))
    first = model.forward_backward(inputs=batches)['loss']
    return first, model.clip_grad_and_step(), model.forward_only(inputs=batches)['loss']


def _one_step():
    model = _trainer(dataclasses.replace(GPT, dtype=torch.float32), Layout())
    return _losses(model)


class FailingMetric(Metric):
    def __init__(self, device_mesh=None, process_group=None, **kwargs):
        super().__init__(device_mesh, process_group)

    def accumulate(self, inputs, outputs):
        raise ZeroDivisionError('no samples')

    def calculate(self):
        return {}

    def reset(self):
        pass


def test_an_error_in_a_metric_reaches_every_rank():
    for outcome in run_ranks(_failing_metric, 4, collect_errors=True):
        assert outcome.error == 'ZeroDivisionError'
        assert 'no samples' in outcome.message


def _failing_metric():
    model = model_on(GPT, PP_DP)
    model.add_metric(FailingMetric)
    model.forward_backward(inputs=micro_batches(GPT, even(2, 2), dist.get_rank(model.groups.dp)))


def _without(key):
    return lambda batch: {k: v for k, v in batch.items() if k != key}


BAD_DATA = {
    'no labels': (_without('labels'), "has no 'labels'"),
    'no ids': (_without('input_ids'), "['input_ids'] must be"),
    'label too large': (lambda b: dict(b, labels=b['labels'].masked_fill(b['labels'] >= 0, 62)), 'ids in [0, 62)'),
    'negative label': (lambda b: dict(b, labels=b['labels'] * 0 - 1), 'ids in [0, 62)'),
    'id too large': (lambda b: dict(b, input_ids=b['input_ids'] + 62), "['input_ids'] must hold ids"),
    'labels of another length': (lambda b: dict(b, labels=b['labels'][:, :-1]), 'shape of input_ids'),
    'mask of another length': (lambda b: dict(b, completion_mask=b['labels'][:, :-1]), 'shape of input_ids'),
    'float labels': (lambda b: dict(b, labels=b['labels'].double()), 'integer ids'),
    'too long': (lambda b: {k: v.repeat(1, 5) for k, v in b.items()}, 'at most 64 tokens'),
    'left padding': (
        lambda b: dict(b, attention_mask=(torch.arange(16) > 2).long().expand_as(b['labels'])),
        'trailing padding',
    ),
    'three dims': (lambda b: {k: v[None] for k, v in b.items()}, 'must be [b, s]'),
    'not a dict': (lambda b: 'text', 'list of InputFeature'),
}


@pytest.mark.parametrize('name', BAD_DATA)
def test_bad_data_on_one_replica_is_an_error_on_every_rank(name):
    _, words = BAD_DATA[name]
    for outcome in run_ranks(_bad_data, 4, name, collect_errors=True, timeout=40):
        assert outcome.error == 'ValueError', outcome
        assert words in outcome.message
        assert 'on rank' in outcome.message


def _bad_data(name):
    change, _ = BAD_DATA[name]
    model = model_on(GPT, PP_DP)
    replica = dist.get_rank(model.groups.dp)
    batches = micro_batches(GPT, even(2, 2), replica)
    if replica == 1:
        batches[1] = change(batches[1])
    model.forward_backward(inputs=batches)


def test_inputs_that_differ_inside_a_replica_are_refused():
    for outcome in run_ranks(_torn, 4, collect_errors=True):
        assert outcome.error == 'ValueError'
        assert 'differ in replica 0' in outcome.message


def _torn():
    model = model_on(GPT, Layout(tp=2, pp=2))
    batches = micro_batches(GPT, even(1, 4), 0)
    model.forward_backward(inputs=batches[:3] if dist.get_rank() == 1 else batches)


def test_case_3_gathered_logits_are_refused_on_every_rank():
    for outcome in run_ranks(_gathered, 4, collect_errors=True):
        assert outcome.error == 'ValueError'
        assert 'gather_output' in outcome.message


def _gathered():
    model = model_on(GPT, Layout(tp=2, pp=2))
    if model.groups.is_last_stage:
        model._engine.models[-1].output_layer.gather_output = True
    model.forward_backward(inputs=micro_batches(GPT, even(1, 2), 0))


def _flag_changed():
    initialize(Layout(dp=2))
    chunks = wrap(build(GPT, Layout(dp=2)))
    chunks[0].config.calculate_per_token_loss = False
    MegatronModel(chunks)


def _no_groups():
    from megatron.core import parallel_state as ps

    initialize(Layout(dp=2))
    chunks = build(GPT, Layout(dp=2))
    ps.destroy_model_parallel()
    MegatronModel(chunks)


def _bare_dp():
    initialize(Layout(dp=2))
    MegatronModel(build(GPT, Layout(dp=2)))


def _torch_optimizer_with_ddp():
    initialize(Layout(dp=2))
    chunks = wrap(build(GPT, Layout(dp=2)))
    MegatronModel(chunks, torch.optim.SGD(chunks[0].parameters(), lr=0.1))


def _mtp_per_micro_batch():
    spec = Spec(vocab_size=64, mtp=1, config={'calculate_per_token_loss': False})
    initialize(Layout(dp=2))
    MegatronModel(wrap(build(spec, Layout(dp=2))))


def _router_padding():
    spec = Spec(
        vocab_size=62,
        pad_vocab_to=2,
        experts=4,
        layers=2,
        config={'moe_aux_loss_coeff': 0.01, 'moe_router_load_balancing_type': 'aux_loss'},
    )
    model = model_on(spec, Layout(dp=2))
    model.forward_backward(inputs=micro_batches(spec, UNEVEN[2], dist.get_rank(model.groups.dp)))


def _call(method, *args, **kwargs):
    def run():
        model = model_on(GPT, Layout(dp=2))
        getattr(model, method)(*args, **kwargs)

    return run


def _a_function(inputs, outputs):
    return 0.0


WRONG_CALLS = {
    'flag changed after DDP': (_flag_changed, 'calculate_per_token_loss'),
    'no groups': (_no_groups, 'initialize_model_parallel'),
    'bare chunks under DP': (_bare_dp, 'DistributedDataParallel'),
    'torch optimizer beside DDP': (_torch_optimizer_with_ddp, 'get_megatron_optimizer'),
    'MTP without per-token loss': (_mtp_per_micro_batch, 'calculate_per_token_loss=True'),
    'padding would train a router': (_router_padding, 'auxiliary losses'),
    'unknown loss': (_call('set_loss', 'CrossEntropyLos'), "did you mean 'CrossEntropyLoss'"),
    'unknown loss argument': (_call('set_loss', 'CrossEntropyLoss', redution='sum'), "did you mean 'reduction'"),
    'unknown reduction': (_call('set_loss', 'CrossEntropyLoss', reduction='avg'), "'mean', 'sum', 'none'"),
    'no reduction': (_call('set_loss', 'CrossEntropyLoss', reduction='none'), 'gives no number to train'),
    'chunk size': (_call('set_loss', 'ChunkedCrossEntropyLoss', chunk_size=0), 'chunk_size must be'),
    'loss that is none': (_call('set_loss', 3), 'callable'),
    'a function as metric': (_call('add_metric', _a_function), 'cannot be reset'),
    'unknown metric': (_call('add_metric', 'Acuracy'), "did you mean 'Accuracy'"),
    'unknown keyword': (_call('forward_backward', [], advantages=1), "no argument 'advantages'"),
    'micro batch size': (_call('forward_backward', [], micro_batch_size=0), 'micro_batch_size must be'),
    'step without optimizer': (_call('clip_grad_and_step'), 'needs an optimizer'),
}


@pytest.mark.parametrize('name', WRONG_CALLS)
def test_a_wrong_call_is_an_error_on_every_rank(name):
    _, words = WRONG_CALLS[name]
    for outcome in run_ranks(_wrong_call, 2, name, collect_errors=True, timeout=40):
        assert outcome.error == 'ValueError', outcome
        assert words in outcome.message, outcome.message


def _wrong_call(name):
    call, _ = WRONG_CALLS[name]
    call()


def test_a_killed_rank_ends_the_others_in_time():
    outcomes = run_ranks(_killed, 4, timeout=20, collect_errors=True)
    assert outcomes[2].error == 'Died'
    assert all(outcome.error for outcome in outcomes), 'nobody goes on with a rank missing'


def _killed():
    model = model_on(GPT, PP_DP)
    batches = micro_batches(GPT, even(2, 2), dist.get_rank(model.groups.dp))
    model.forward_backward(inputs=batches)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    model.forward_backward(inputs=batches)


def test_a_second_error_and_a_later_good_call_do_not_mix():
    """Accumulated gradients of an earlier good call are dropped with the failed one: all of them or none."""
    expected = reference(GPT, {})
    results = run_ranks(_good_bad_good, 2)
    assert compare(results, expected.grads).error < 1e-9


def _good_bad_good():
    model = model_on(GPT, Layout(pp=2))
    batches = micro_batches(GPT, UNEVEN[1], 0)
    model.forward_backward(inputs=batches)
    with pytest.raises(ValueError, match='ids in'):
        model.forward_backward(inputs=[dict(batches[0], labels=batches[0]['labels'] + 62)])
    model.zero_grad()
    model.forward_backward(inputs=batches)
    return collect_grads(model.chunks)


def test_a_nan_in_the_model_is_reported_and_not_hidden():
    for loss, finite in run_ranks(_nan, 2):
        assert loss != loss
        assert not finite


def _nan():
    model = model_on(GPT, Layout(tp=2))
    with torch.no_grad():
        model._engine.models[0].output_layer.weight[0, 0] = torch.nan
    out = model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))
    return out['loss'], all(part.grad.isfinite().all() for part in collect_grads(model.chunks).values())
