"""MegatronModel(head='linear') on real Megatron: the numbers of built logits, whatever DDP and the model do to them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients import Part, collect_grads, collect_weights, compare
from invariance import LENGTH, UNEVEN, even, micro_batches, model_on, reference
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import device, run_ranks
from test_errors import FailingMetric
from test_glue import _boom, _message
from test_invariance import GPT, check
from test_model import PER_MICRO_BATCH, _plain_mtp, _trainer
from tiny_gpt import Layout, Spec, build, initialize, unwrapped, wrap

from tests.vocab_parallel.probes import NewTensors
from twinkle_megatron import MegatronModel
from twinkle_megatron.megatron import head_choice
from twinkle_megatron.megatron.heads import logits_taken
from twinkle_megatron.megatron.lazy_logits import LazyLogits
from twinkle_megatron.metric import LossMetric
from twinkle_megatron.vocab_parallel import LinearHead, cross_entropy, log_probs_and_entropy

TIED = dataclasses.replace(GPT, tied=True)
WHOLE = dataclasses.replace(GPT, pad_vocab_to=1)
FLOAT32 = dataclasses.replace(GPT, dtype=torch.float32)
BFLOAT16 = dataclasses.replace(GPT, dtype=torch.bfloat16)
MANY_BLOCKS, FEW_BLOCKS = 2e-4, 64.0  # MiB: products of 26 float64 logits, or all of them kept


# numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('spec', 'layout', 'split', 'options'),
    [
        pytest.param(TIED, Layout(tp=2), UNEVEN[1], {}, id='tied'),
        pytest.param(TIED, Layout(tp=2, pp=2), UNEVEN[1], {}, id='tied-pp2'),
        pytest.param(TIED, Layout(tp=2, sp=True, dp=2), UNEVEN[2], {'ddp': {'overlap': True}}, id='tied-overlap'),
        pytest.param(GPT, Layout(tp=2, pp=2, vpp=2, sp=True), UNEVEN[1], {'ddp': {'overlap': True}}, id='vpp-overlap'),
        pytest.param(GPT, Layout(tp=2, cp=2), UNEVEN[1], {'ddp': {'overlap': True}}, id='cp-overlap'),
        pytest.param(GPT, Layout(dp=2), UNEVEN[2], {'ddp': {'distributed_optimizer': True}}, id='distributed'),
        pytest.param(
            GPT,
            Layout(tp=2, dp=2),
            UNEVEN[2],
            {'ddp': {'distributed_optimizer': True, 'overlap': True, 'overlap_param_gather': True}},
            id='distributed-overlap',
        ),
        pytest.param(PER_MICRO_BATCH, Layout(tp=2, dp=2), UNEVEN[2], {}, id='per-micro-batch'),
        pytest.param(PER_MICRO_BATCH, Layout(cp=2), UNEVEN[1], {'ddp': {'overlap': True}}, id='per-micro-batch-cp'),
        pytest.param(
            dataclasses.replace(GPT, vocab_size=20, pad_vocab_to=32), Layout(tp=2), UNEVEN[1], {}, id='padding'
        ),
        pytest.param(GPT, Layout(tp=2), UNEVEN[1], {'max_workspace_mb': MANY_BLOCKS}, id='many-blocks'),
        pytest.param(GPT, Layout(tp=2, sp=True), UNEVEN[1], {'max_workspace_mb': FEW_BLOCKS}, id='kept-blocks'),
        pytest.param(GPT, Layout(tp=2), UNEVEN[1], {'init': {'label_smoothing': 0.3, 'z_loss': 1e-2}}, id='smoothing'),
        pytest.param(GPT, Layout(tp=2), UNEVEN[1], {'init': {'dft': True, 'chunk_size': 7}}, id='dft'),
        pytest.param(GPT, Layout(tp=2), UNEVEN[1], {'init': {'inplace_backward': True}}, id='in-place'),
    ],
)
def test_case_10_gradients_loss_and_metrics_are_those_of_the_formula(spec, layout, split, options):
    check(spec, layout, split, head='linear', **options)


def test_multi_token_prediction_trains_through_the_linear_head():
    """MTP calls the output layer several times a micro-batch: all its gradients reach the weight, on every layout."""
    spec = Spec(vocab_size=62, pad_vocab_to=2, mtp=1, position='rope')
    (expected,) = run_ranks(_plain_mtp, 1, spec)
    for layout, ddp in ((Layout(), {}), (Layout(tp=2, sp=True), {'overlap': True}), (Layout(tp=2, pp=2), {})):
        results = run_ranks(_mtp, layout.world, spec, layout, ddp)
        assert compare(results, expected).error < 1e-9


def test_multi_token_prediction_with_tied_embeddings_is_the_same_with_either_head():
    spec = Spec(vocab_size=62, pad_vocab_to=2, mtp=1, position='rope', tied=True)
    (expected,) = run_ranks(_plain_mtp, 1, spec)
    assert compare(run_ranks(_mtp, 2, spec, Layout(tp=2), {'overlap': True}), expected).error < 1e-9


def _mtp(spec, layout, ddp):
    model = model_on(spec, layout, ddp=ddp, head='linear')
    model.forward_backward(inputs=micro_batches(spec, UNEVEN[1], 0))
    return collect_grads(model.chunks)


@pytest.mark.parametrize('mb', [MANY_BLOCKS, FEW_BLOCKS])
def test_bare_chunks_hold_the_gradient_of_a_linear_head_in_grad(mb):
    results = run_ranks(_bare, 2, mb)
    assert compare(results, reference(GPT, {}).grads).error < 1e-9


def _bare(mb):
    initialize(Layout(tp=2))
    model = MegatronModel(build(GPT, Layout(tp=2)), vocab_size=GPT.vocab_size, head='linear', max_workspace_mb=mb)
    model.set_loss('CrossEntropyLoss')
    batches = micro_batches(GPT, UNEVEN[1], 0)
    model.forward_backward(inputs=batches[:1])
    model.forward_backward(inputs=batches[1:])
    return collect_grads(model.chunks)


@pytest.mark.parametrize('ddp', [{}, {'overlap': True, 'distributed_optimizer': True}], ids=str)
def test_several_calls_before_a_step_add_up_in_main_grad(ddp):
    """Calls that finalise and calls that do not, in turn: the gradient of the mean over all their tokens."""
    for finalize in ((False, False, True), (True, False, False)):
        results = run_ranks(_several_calls, 4, finalize, ddp)
        assert compare(results, reference(GPT, {}).grads).error < 1e-9


def _several_calls(finalize, ddp):
    model = model_on(GPT, Layout(tp=2, dp=2), ddp=ddp, head='linear')
    whole = micro_batches(GPT, UNEVEN[2], dist.get_rank(model.groups.dp))
    for part, now in zip((whole[:1], whole[1:2], whole[2:]), finalize):
        model.forward_backward(inputs=part, finalize=now)
    assert model._accumulation.ready()
    return collect_grads(model.chunks)


@pytest.mark.parametrize(
    ('frozen', 'layout'),
    [('head', Layout(tp=2, pp=2)), ('trunk', Layout(tp=2)), ('trunk', Layout(tp=2, sp=True))],
    ids=str,
)
def test_what_is_frozen_gets_no_gradient_and_the_rest_is_exact(frozen, layout):
    expected = reference(GPT, {}).grads
    kept = {k: v for k, v in expected.items() if (k == 'output_layer.weight') == (frozen == 'trunk')}
    results = run_ranks(_frozen, layout.world, frozen, layout)
    assert compare(results, kept).error < 1e-9


def _frozen(frozen, layout):
    initialize(layout)
    chunks = build(GPT, layout)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_((name == 'output_layer.weight') == (frozen == 'trunk'))
    model = MegatronModel(wrap(chunks), vocab_size=GPT.vocab_size, head='linear')
    model.set_loss('CrossEntropyLoss')
    model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))
    return collect_grads(model.chunks)


def test_a_bias_of_the_output_layer_trains_as_with_built_logits():
    linear, logits = (run_ranks(_with_bias, 2, head) for head in ('linear', 'logits'))
    for ours, stock in zip(linear, logits):
        assert stock['output_layer.bias'].grad.abs().max() > 0
        for name, part in stock.items():
            torch.testing.assert_close(ours[name].grad, part.grad, rtol=1e-9, atol=1e-12)


def _with_bias(head):
    layout = Layout(tp=2, sp=True)
    initialize(layout)
    (chunk,) = build(GPT, layout)
    values = torch.randn(32, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    chunk.output_layer.bias = torch.nn.Parameter(values.to(device()))
    chunk.output_layer.bias.tensor_model_parallel, chunk.output_layer.bias.partition_dim = True, 0
    model = MegatronModel(wrap([chunk]), vocab_size=GPT.vocab_size, head=head)
    model.set_loss('CrossEntropyLoss')
    model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))
    return collect_grads(model.chunks)


@pytest.mark.parametrize('in_float32', [True, False], ids=['float32', 'bfloat16'])
def test_bfloat16_gradients_are_as_exact_as_those_of_built_logits(in_float32):
    """Accumulated over micro-batches in either dtype of `main_grad`; the output layer's weight is held to it alone."""
    expected = reference(GPT, {}).grads
    head = {k: v for k, v in expected.items() if k == 'output_layer.weight'}
    linear, logits = (run_ranks(_bfloat16, 2, in_float32, head) for head in ('linear', 'logits'))
    assert linear[0][1] == (torch.float32 if in_float32 else torch.bfloat16)
    for wanted in (expected, head):
        ours, stock = (
            compare([{k: v for k, v in grads.items() if k in wanted} for grads, _ in found], wanted).error
            for found in (linear, logits)
        )
        assert ours <= 1.5 * stock, (ours, stock)


def _bfloat16(in_float32, head):
    model = model_on(BFLOAT16, Layout(tp=2, sp=True), ddp={'grad_reduce_in_fp32': in_float32}, head=head)
    model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))
    return collect_grads(model.chunks), unwrapped(model.chunks[0]).output_layer.weight.main_grad.dtype


def test_float16_gradients_carry_the_loss_scale():
    """Scaled losses, gradients divided by the scale in the optimizer: norms are those of float32."""
    (expected,) = run_ranks(_scaled_norms, 1, FLOAT32, Layout())
    for found in run_ranks(_scaled_norms, 2, dataclasses.replace(GPT, dtype=torch.float16), Layout(tp=2)):
        assert found == pytest.approx(expected, rel=2e-2)


def _scaled_norms(spec, layout):
    half = {'initial_loss_scale': 1024.0, 'min_loss_scale': 1.0, 'loss_scale_window': 10, 'hysteresis': 1}
    model = _trainer_with('linear', spec, layout, **(half if spec.dtype is torch.float16 else {}))
    norms = []
    for _ in range(2):
        model.forward_backward(inputs=micro_batches(spec, UNEVEN[1], 0))
        norms.append(model.clip_grad_and_step(None))
    return norms


def _trainer_with(head, spec, layout, ddp=None, **optimizer):
    plain = _trainer(spec, layout, ddp, **optimizer)
    model = MegatronModel(plain.chunks, plain.optimizer, vocab_size=spec.vocab_size, head=head)
    model.set_loss('CrossEntropyLoss')
    return model


@pytest.mark.parametrize('spec', [GPT, TIED], ids=['untied', 'tied'])
def test_weights_gathered_during_the_forward_pass_train_as_with_built_logits(spec):
    """Two steps with `overlap_param_gather`: the layer is called, so that its weight is gathered before it is read."""
    linear, logits = (run_ranks(_two_steps, 2, spec, head) for head in ('linear', 'logits'))
    for (losses, ours), (expected, stock) in zip(linear, logits):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert losses[1] != pytest.approx(losses[0], rel=1e-3)
        for name, part in stock.items():
            torch.testing.assert_close(ours[name].tensor, part.tensor, rtol=1e-9, atol=1e-9)


def _two_steps(spec, head):
    """In float64, so not by Megatron's optimizer: each rank updates its share of the weights and spoils the others."""
    ddp = {'distributed_optimizer': True, 'overlap': True, 'overlap_param_gather': True}
    model = model_on(spec, Layout(dp=2), ddp=ddp, head=head)
    (chunk,), losses = model.chunks, []
    for seed in range(2):
        batches = micro_batches(spec, UNEVEN[2], dist.get_rank(), seed)
        losses.append(model.forward_backward(inputs=batches)['loss'])
        for bucket in (bucket for buffer in chunk.buffers for bucket in buffer.buckets):
            for rank, (weights, grads) in enumerate(zip(bucket.param_data.chunk(2), bucket.grad_data.chunk(2))):
                weights.add_(grads, alpha=-1.0) if rank == dist.get_rank() else weights.fill_(torch.nan)
        model.zero_grad()
    chunk.start_param_sync(force_sync=True)
    return losses, collect_weights(model.chunks)


@pytest.mark.parametrize('layout', [Layout(tp=2), Layout(tp=2, sp=True)], ids=str)
def test_case_10_replicated_parameters_get_bitwise_the_same_gradient_on_every_rank(layout):
    """In float32, where a sum in another order would show."""
    first, second = run_ranks(_replicated, 2, layout)
    assert len(first) > 10
    for name, grad in first.items():
        assert grad.abs().max() > 0
        assert torch.equal(grad, second[name]), name


def _replicated(layout):
    model = model_on(FLOAT32, layout, head='linear')
    model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))
    (chunk,) = map(unwrapped, model.chunks)
    named = chunk.named_parameters()
    return {name: p.main_grad.clone() for name, p in named if not getattr(p, 'tensor_model_parallel', False)}


# memory -------------------------------------------------------------------------------------------------------------

WIDE = Spec(vocab_size=2048)
WEIGHT = TOKENS = 1024 * 32 * 8  # bytes of a rank's output weight, and of a micro-batch's logits, on two ranks


def test_case_25_no_tensor_of_the_weight_or_of_the_logits_is_made():
    """On the last of two stages, where the output layer is alone. Autograd gets an empty sparse gradient for the
    weight; what its products give goes straight into Megatron's buffer."""
    for largest, kinds in run_ranks(_allocations, 4, 'linear')[2:]:
        assert largest < WEIGHT / 8
        assert kinds == [(torch.sparse_coo, 0)] * 2
    for largest, kinds in run_ranks(_allocations, 4, 'logits')[2:]:  # the probe sees them where they are
        assert largest >= WEIGHT
        assert kinds == [(torch.strided, None)] * 2


def _allocations(head):
    model = model_on(WIDE, Layout(tp=2, pp=2), head=head, max_workspace_mb=0.01)
    batches = [{k: v[:2] for k, v in batch.items()} for batch in micro_batches(WIDE, even(1, 2), 0)]
    model.forward_backward(inputs=batches)  # builds what is built once
    model.zero_grad()
    kinds = []

    def note(grads):
        (grad,) = grads
        kinds.append((grad.layout, grad._nnz() if grad.is_sparse else None))

    accumulator = None
    if model.groups.is_last_stage:
        weight = unwrapped(model.chunks[0]).output_layer.weight
        accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
        accumulator.register_prehook(note)
    with NewTensors() as made:
        model.forward_backward(inputs=batches)
    return made.sizes[0], kinds


# mixtures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('spec', [FLOAT32, dataclasses.replace(TIED, dtype=torch.float32)], ids=['untied', 'tied'])
@pytest.mark.parametrize('order', ['stock first', 'linear first'])
def test_backward_passes_of_stock_and_linear_micro_batches_add_up(spec, order):
    """Megatron's own loss by hand on the same DDP chunk, before or after: no gradient is lost or counted twice."""
    for both, stock, linear in run_ranks(_mixture, 2, spec, order):
        for name, part in both.items():
            expected = stock[name].grad + linear[name].grad
            torch.testing.assert_close(part.grad, expected, rtol=1e-5, atol=1e-6)


def _mixture(spec, order):
    found = []
    for kinds in (('stock', 'linear'), ('stock',), ('linear',)):
        model = model_on(spec, Layout(tp=2), head='linear')
        batches = micro_batches(spec, even(1, 2), 0)
        for kind in kinds if order == 'stock first' else reversed(kinds):
            if kind == 'stock':
                _stock_loss(model.chunks[0], batches[0]).backward()
            else:
                model.forward_backward(inputs=batches[1:], finalize=False)
        found.append(collect_grads(model.chunks))
    return found


def _stock_loss(chunk, batch):
    """Megatron's own cross entropy, summed over the trained tokens."""
    labels, ids = batch['labels'].to(device()), batch['input_ids'].to(device())
    positions = torch.arange(LENGTH, device=device()).expand_as(ids)
    losses = chunk(ids, positions, None, labels=labels.clamp_min(0))
    return (losses * (labels != -100)).sum()


def test_a_loss_that_builds_the_logits_of_some_micro_batches_only_is_exact():
    results = run_ranks(_sometimes_built, 1)
    assert results[0][1] == 2
    assert compare([grads for grads, _ in results], reference(WHOLE, {}).grads).error < 1e-9


def _sometimes_built():
    calls = []

    def loss(inputs, outputs):
        calls.append(1)
        kept = inputs['labels'] != -100
        logps = outputs['logps']
        if len(calls) % 2:
            logps = outputs['logits'].log_softmax(-1).gather(-1, inputs['labels'].clamp_min(0)[..., None])[..., 0]
        return {'loss': -(logps * kept).sum(), 'num_tokens': max(int(kept.sum()), 1)}

    return _trained_by(loss, Layout(), WHOLE)


def _trained_by(loss, layout, spec=GPT):
    """The gradients of a custom loss, and how many times logits were built."""
    model = model_on(spec, layout, loss, head='linear')
    with _counting() as built:
        model.forward_backward(inputs=micro_batches(spec, UNEVEN[1], 0))
    return collect_grads(model.chunks), len(built)


@contextlib.contextmanager
def _counting():
    """A list that grows with each product that makes logits."""
    built: list[Any] = []
    original = LazyLogits.logits

    def logits(self):
        before = self._built
        out = original(self)
        built.extend([1] if out is not before else [])
        return out

    LazyLogits.logits = logits
    try:
        yield built
    finally:
        LazyLogits.logits = original


# custom losses ------------------------------------------------------------------------------------------------------


def _by_logps(inputs, outputs):
    kept = inputs['labels'] != -100
    return {'loss': -(outputs['logps'] * kept).sum(), 'num_tokens': max(int(kept.sum()), 1)}


def _by_functions(inputs, outputs):
    """Half of the loss by each of two sweeps of its own."""
    logits, labels, shard = outputs['logits'], inputs['labels'], outputs['vocab_shard']
    assert isinstance(logits, LinearHead)
    logps, entropies = log_probs_and_entropy(logits, labels, shard=shard)
    loss = 0.5 * cross_entropy(logits, labels, shard=shard) - 0.5 * logps + 0 * entropies
    return {'loss': loss.sum(), 'num_tokens': max(int((labels != -100).sum()), 1)}


class _ByTensor:
    """Plain torch on a whole vocabulary."""

    def __call__(self, inputs, outputs):
        assert tuple(outputs['logits'].shape) == (*inputs['labels'].shape, 62)
        nll = torch.nn.functional.cross_entropy(
            outputs['logits'].flatten(0, 1), inputs['labels'].flatten(), reduction='sum'
        )
        return {'loss': nll, 'num_tokens': max(int((inputs['labels'] != -100).sum()), 1)}


class _ByTensorAfterAccuracy(_ByTensor):
    """Logits are asked for without a gradient first."""

    def __call__(self, inputs, outputs):
        with torch.no_grad():
            assert outputs['logits'].argmax(-1).shape == inputs['labels'].shape
        out = super().__call__(inputs, outputs)
        return {**out, 'loss': 0.25 * out['loss'] - 0.75 * (outputs['logps'] * (inputs['labels'] != -100)).sum()}


@pytest.mark.parametrize(
    ('loss', 'layout', 'spec', 'built'),
    [
        (_by_logps, Layout(tp=2, sp=True), GPT, 0),
        (_by_functions, Layout(tp=2), GPT, 0),
        (_by_functions, Layout(tp=2, pp=2, sp=True), GPT, 0),
        (_ByTensor(), Layout(), WHOLE, 3),
        (_ByTensorAfterAccuracy(), Layout(), WHOLE, 3),
    ],
    ids=['logps', 'functions', 'functions-sp', 'tensor', 'tensor-after-accuracy'],
)
def test_a_custom_loss_has_its_gradient_and_builds_logits_only_where_it_asks_for_them(loss, layout, spec, built):
    results = run_ranks(_trained_by, layout.world, loss, layout, spec)
    assert compare([grads for grads, _ in results], reference(spec, {}).grads).error < 1e-9
    assert results[-1][1] == built


def test_a_custom_loss_builds_shards_of_the_logits_under_sequence_parallelism():
    """A plain torch loss over a sharded vocabulary, one all-reduce written out."""
    results = run_ranks(_trained_by, 2, _by_shards, Layout(tp=2, sp=True))
    assert compare([grads for grads, _ in results], reference(GPT, {}).grads).error < 1e-9
    assert results[0][1] == 3


def _by_shards(inputs, outputs):
    from torch.distributed.nn.functional import all_reduce

    logits, shard, labels = outputs['logits'], outputs['vocab_shard'], inputs['labels']
    true = logits[..., : shard.true_columns]
    # the sum over ranks of a loss that each of them computes: its backward pass sums gradients over ranks too
    total = all_reduce(true.exp().sum(-1), group=shard.group)
    own = shard.local_ids(labels).long()
    picked = true.gather(-1, own.clamp_min(0)[..., None])[..., 0] * (own >= 0)
    nll = total.log() / shard.size - picked
    kept = labels != -100
    # nll is this rank's part: its value is summed for the report, its gradient is not
    mine = (nll * kept).sum()
    others = all_reduce(mine.detach().clone(), group=shard.group) - mine.detach()
    return {'loss': mine + others, 'num_tokens': max(int(kept.sum()), 1)}


def _by_owner(inputs, outputs):
    """The logit of one id, by the rank that holds it. Another one asks for the logits and uses nothing of them."""
    shard, logits = outputs['vocab_shard'], outputs['logits']
    loss = (outputs['logps'] * (inputs['labels'] != -100)).sum()
    if shard.start <= 40 < shard.stop:
        value = logits[..., 40 - shard.start].exp().sum()
        loss = loss + value - value.detach()
    elif len(inputs['labels']) > 1:
        with torch.no_grad():
            logits.argmax(-1)
    return {'loss': loss, 'num_tokens': 3}


@pytest.mark.parametrize('layout', [Layout(tp=2), Layout(tp=2, pp=2, sp=True)], ids=str)
def test_a_loss_that_builds_logits_on_one_rank_only_trains_as_with_built_logits(layout):
    linear, logits = (
        run_ranks(_trained_by_owner, layout.world, layout, head, timeout=30) for head in ('linear', 'logits')
    )
    for ours, stock in zip(linear, logits):
        for name, part in stock.items():
            torch.testing.assert_close(ours[name].grad, part.grad, rtol=1e-9, atol=1e-12)


def _trained_by_owner(layout, head):
    model = model_on(GPT, layout, _by_owner, head=head)
    model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))
    model.forward_only(inputs=micro_batches(GPT, UNEVEN[1], 0))
    return collect_grads(model.chunks)


# what somebody has done to the output layer --------------------------------------------------------------------------


def test_a_forward_hook_that_changes_the_logits_is_heard():
    """Capped logits, as some models have them: the hook gets what becomes the logits when it uses them."""
    linear, logits = (run_ranks(_capped, 2, head) for head in ('linear', 'logits'))
    for (loss, ours), (expected, stock) in zip(linear, logits):
        assert loss == pytest.approx(expected, rel=1e-9)
        for name, part in stock.items():
            torch.testing.assert_close(ours[name].grad, part.grad, rtol=1e-9, atol=1e-12)
    assert linear[0][0] != pytest.approx(reference(GPT, {}).loss, rel=1e-3)


def _capped(head):
    model = model_on(GPT, Layout(tp=2, sp=True), head=head)
    layer = unwrapped(model.chunks[0]).output_layer
    layer.register_forward_hook(lambda module, inputs, output: (torch.tanh(output[0] / 2) * 2, output[1]))
    loss = model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))['loss']
    return loss, collect_grads(model.chunks)


def test_a_hook_on_the_weights_gradient_is_heard():
    """Rows of the vocabulary that are not to be trained: their gradient is masked by a hook of the weight."""
    expected = dict(reference(GPT, {}).grads)
    whole = expected['output_layer.weight'].tensor.clone()
    whole[::2] = 0
    expected['output_layer.weight'] = Part(whole)
    assert compare(run_ranks(_masked_rows, 2), expected).error < 1e-9


def _masked_rows():
    model = model_on(GPT, Layout(tp=2), head='linear')
    weight = unwrapped(model.chunks[0]).output_layer.weight
    keep = (torch.arange(weight.shape[0], device=device()) % 2).double()
    weight.register_hook(lambda grad: grad * keep[:, None])
    model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))
    return collect_grads(model.chunks)


@pytest.mark.parametrize('layout', [Layout(), Layout(tp=2, sp=True)], ids=str)
def test_the_model_is_what_it_was_after_training_evaluation_and_errors(layout):
    run_ranks(_given_back, layout.world, layout, timeout=40)


def _given_back(layout):
    model = model_on(FLOAT32, layout, head='linear')
    (chunk,), batches = model.chunks, micro_batches(GPT, even(1, 2), 0)
    gpt = unwrapped(chunk)
    ids = batches[0]['input_ids'].to(device())
    positions = torch.arange(LENGTH, device=device()).expand_as(ids)
    before = set(vars(gpt)), set(vars(gpt.output_layer))
    logits, loss = chunk(ids, positions, None), _stock_loss(chunk, batches[0])

    def check_again():
        assert (set(vars(gpt)), set(vars(gpt.output_layer))) == before
        assert torch.equal(chunk(ids, positions, None), logits)
        assert torch.equal(_stock_loss(chunk, batches[0]), loss)

    model.forward_backward(inputs=batches)
    check_again()
    model.forward_only(inputs=batches)
    check_again()
    model.set_loss(lambda inputs, outputs: _boom())
    for call in (model.forward_backward, model.forward_only):
        assert 'boom' in _message(lambda call=call: call(inputs=batches))
        check_again()


# errors -------------------------------------------------------------------------------------------------------------


def _fails(when, layout):
    """A loss that fails in the second micro-batch, on one tensor parallel rank of the last stage."""
    calls = []

    def loss(inputs, outputs):
        calls.append(1)
        fails = len(calls) == 2 and dist.get_rank() == layout.world - 1
        if fails and when == 'before':
            _boom()
        built = outputs['logits'].exp() if when != 'never built' else outputs['logps']
        if fails:
            _boom()
        return {'loss': outputs['logps'].sum() + 0 * built.sum(), 'num_tokens': 1}

    return loss


@pytest.mark.parametrize(
    ('when', 'layout'),
    [
        ('never built', Layout(tp=2, pp=2, sp=True)),
        ('before', Layout(tp=2)),
        ('after', Layout(tp=2)),
        ('after', Layout(tp=2, pp=2, sp=True)),
        ('before', Layout(tp=2, sp=True)),
    ],
    ids=str,
)
def test_a_loss_that_fails_on_one_rank_before_or_after_it_builds_logits_ends_on_every_rank(when, layout):
    expected = reference(GPT, {})
    results = run_ranks(_fail_then_train, layout.world, when, layout, timeout=30)
    for message, empty, loss, _ in results:
        assert f'on rank {layout.world - 1}: boom' in message
        assert empty
        assert loss == pytest.approx(expected.loss, rel=1e-9)
    assert compare([grads for *_, grads in results], expected.grads).error < 1e-9


def _fail_then_train(when, layout):
    model = model_on(GPT, layout, _fails(when, layout), head='linear')
    batches = micro_batches(GPT, even(1, 4), 0)
    message = _message(lambda: model.forward_backward(inputs=batches))
    empty = all(part.grad.abs().max() == 0 for part in collect_grads(model.chunks).values())
    model.set_loss('CrossEntropyLoss')
    loss = model.forward_backward(inputs=batches)['loss']
    return message, empty, loss, collect_grads(model.chunks)


class _FailsOnTheLastRank(FailingMetric):
    def accumulate(self, inputs, outputs):
        if dist.get_rank() == 3:
            super().accumulate(inputs, outputs)


def _another_label(batches):
    """One tensor parallel rank reads another label: found by the sweep, after the counts have agreed."""
    if dist.get_rank() == 3:
        at = (batches[1]['labels'] != -100).nonzero()[0].tolist()
        batches[1]['labels'][at[0], at[1]] += 1 if batches[1]['labels'][at[0], at[1]] < 61 else -1
    return batches


ERRORS = {
    'a metric': (_FailsOnTheLastRank, lambda batches: batches, 'no samples'),
    'bad labels': (None, lambda batches: [dict(b, labels=b['labels'] + 62) for b in batches], 'ids in [0, 62)'),
    'another label': (None, _another_label, 'another rank was given another label'),
}


@pytest.mark.parametrize(
    ('layout', 'ddp'),
    [
        (Layout(tp=2, pp=2), {}),
        (Layout(tp=2, pp=2, sp=True), {}),
        (Layout(tp=2, dp=2), {'overlap': True, 'distributed_optimizer': True}),
    ],
    ids=str,
)
def test_errors_on_one_rank_reach_every_rank_and_the_next_call_is_exact(layout, ddp):
    results = run_ranks(_errors, 4, layout, ddp, timeout=40)
    for messages, _ in results:
        for (_, _, words), message in zip(ERRORS.values(), messages):
            assert words in message
    assert compare([grads for _, grads in results], reference(GPT, {}).grads).error < 1e-9


def _errors(layout, ddp):
    messages = []
    model = model_on(GPT, layout, head='linear', ddp=ddp)
    replica = dist.get_rank(model.groups.dp)
    for metric, spoil, _ in ERRORS.values():
        model.set_metric(metric or LossMetric)
        batches = spoil(micro_batches(GPT, even(layout.dp, 2), replica))
        messages.append(
            _message(lambda batches=batches: model.forward_backward(inputs=batches), (ValueError, Exception))
        )
        assert all(part.grad.abs().max() == 0 for part in collect_grads(model.chunks).values())
    model.set_metric(LossMetric)
    model.forward_backward(inputs=micro_batches(GPT, even(layout.dp, 2), replica))
    return messages, collect_grads(model.chunks)


# the choice ---------------------------------------------------------------------------------------------------------

PLENTY = 1 << 40


class _Linear:
    """A loss that notes whether it was given a linear head."""

    def __init__(self):
        self.seen: list[bool] = []

    def __call__(self, inputs, outputs):
        self.seen.append(isinstance(outputs['logits'], LinearHead))
        return outputs['logps'].mean()


def _choosing(spec, layout, free, **options):
    """A model that decides by itself, where each rank has `free[rank]` bytes; what it says, and what its loss gets."""
    head_choice.free_memory = lambda kind: free[dist.get_rank() % len(free)]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    head_choice.logger.addHandler(handler)
    loss = _Linear()
    return model_on(spec, layout, loss, **options), said, loss.seen


def test_auto_takes_a_linear_head_on_every_rank_when_one_is_short_of_memory_and_says_so_once():
    """The short rank is on the first stage. Smaller micro-batches than those that decided stay with it."""
    results = run_ranks(_auto, 4, [1 << 20, PLENTY, PLENTY, PLENTY])
    assert [seen for _, seen in results] == [[]] * 2 + [[True, True, True]] * 2
    (message,) = [message for said, _ in results for message in said]
    assert "takes head='linear'" in message
    assert '128 tokens x 1,024 ids' in message


def _auto(free):
    model, said, seen = _choosing(WIDE, Layout(tp=2, pp=2), free, max_workspace_mb=1e-3)
    (whole,) = micro_batches(WIDE, even(1, 1), 0)
    model.forward_backward(inputs=[whole])
    model.forward_backward(inputs=[{key: value[:1] for key, value in whole.items()}])
    model.forward_only(inputs=[whole])
    return said, seen


def test_auto_changes_to_a_linear_head_when_micro_batches_grow():
    results = run_ranks(_growing, 2)
    for _, seen in results:
        assert seen == [False, True, True]
    first, second = [message for said, _ in results for message in said]
    assert "takes head='logits'" in first
    assert "takes head='linear'" in second


def _growing():
    model, said, seen = _choosing(WIDE, Layout(tp=2), [4 << 20], max_workspace_mb=1e-3)
    (whole,) = micro_batches(WIDE, even(1, 1), 0)
    for rows in (2, 8, 2):
        model.forward_only(inputs=[{key: value[:rows] for key, value in whole.items()}])
    return said, seen


@pytest.mark.parametrize('free', [[1], [None]], ids=['full', 'unknown'])
def test_auto_takes_logits_where_they_are_small_or_nothing_is_known_of_the_memory(free):
    """A linear head needs more than the logits of a tiny model, however little memory is left."""
    results = run_ranks(_tiny, 2, free)
    for _, seen in results:
        assert seen == [False] * 6
    (message,) = [message for said, _ in results for message in said]
    assert "takes head='logits'" in message


def _tiny(free):
    model, said, seen = _choosing(GPT, Layout(tp=2), free)
    for _ in range(2):
        model.forward_backward(inputs=micro_batches(GPT, UNEVEN[1], 0))
    return said, seen


def test_auto_decides_alike_where_ranks_have_other_tile_sizes():
    """Tiles depend on a rank's own memory: here logits that are worth it beside one rank's tiles only."""
    first, second = run_ranks(_other_tiles, 2)
    assert first == second == [False] * 3


def _other_tiles():
    head_choice.default_workspace_mb = lambda kind: (1e-3, 64.0)[dist.get_rank()]
    model, _, seen = _choosing(WIDE, Layout(tp=2), [1])
    model.forward_backward(inputs=micro_batches(WIDE, UNEVEN[1], 0))
    return seen


def _without_layer(model):
    del model.output_layer


def _deferring(model):
    model.config.defer_embedding_wgrad_compute = True


def _halving(model):
    layer = model.output_layer
    forward = type(layer).forward
    layer.forward = lambda *args, **kwargs: (0.5 * forward(layer, *args, **kwargs)[0], None)


OBSTACLES = {
    'no output layer': (_without_layer, 'has no output_layer'),
    'deferred gradients': (_deferring, 'defer_embedding_wgrad_compute'),
    'a forward of somebody else': (_halving, 'has a forward of its own'),
}


def test_an_obstacle_is_named_on_every_rank_and_auto_takes_logits():
    """The first stage does not have the layer. It is told."""
    for messages, unhooked in run_ranks(_obstacles, 4, timeout=40):
        for (_, words), message in zip(OBSTACLES.values(), messages):
            assert 'on rank 2' in message
            assert words in message
            assert "use head='logits'" in message
        assert unhooked == [True] * len(OBSTACLES)


def _obstacles():
    layout = Layout(tp=2, pp=2)
    initialize(layout)
    head_choice.free_memory = lambda kind: 1
    messages, unhooked = [], []
    for change, _ in OBSTACLES.values():
        chunks = wrap(build(GPT, layout))
        if chunks[0].module.post_process:
            change(chunks[0].module)
        messages.append(_message(lambda chunks=chunks: MegatronModel(chunks, vocab_size=62, head='linear')))
        model = MegatronModel(chunks, vocab_size=62, max_workspace_mb=1e-6)
        unhooked.append(model._engine.head_choice.taken(10**9) is logits_taken)
    return messages, unhooked


def test_somebody_elses_forward_is_run_where_logits_are_built():
    """Halved logits train the same with 'auto' and 'logits'. Set on a model with a linear head it is an error, once it
    is there; taken off again the next call is exact."""
    results = run_ranks(_foreign_forward, 4, timeout=40)
    for auto, logits, message, _ in results:
        assert auto == logits != pytest.approx(reference(GPT, {}).loss, rel=1e-3)
        assert 'has a forward of its own' in message
    assert compare([grads for *_, grads in results], reference(GPT, {}).grads).error < 1e-9


def _foreign_forward():
    layout, batches, losses = Layout(tp=2, pp=2), micro_batches(GPT, UNEVEN[1], 0), []
    for head in ('auto', 'logits'):
        model = model_on(GPT, layout, head=head)
        if model.groups.is_last_stage:
            _halving(model._engine.models[0])
        losses.append(model.forward_backward(inputs=batches)['loss'])
    model = model_on(GPT, layout, head='linear')
    if model.groups.is_last_stage:
        _halving(model._engine.models[0])
    message = _message(lambda: model.forward_backward(inputs=batches))
    if model.groups.is_last_stage:
        del model._engine.models[0].output_layer.forward
    model.forward_backward(inputs=batches)
    return (*losses, message, collect_grads(model.chunks))


WRONG = [
    ({'head': 'lazy'}, "head must be 'auto', 'logits' or 'linear', got 'lazy'"),
    ({'head': None}, 'head must be'),
    *(({'max_workspace_mb': mb}, 'max_workspace_mb must be') for mb in (0, -1, float('nan'), float('inf'), True, '8')),
]


def test_an_unknown_head_and_a_workspace_that_is_none_are_refused():
    run_ranks(_wrong, 1, timeout=30)


def _wrong():
    initialize()
    chunks = wrap(build(GPT))
    for options, words in WRONG:
        assert words in _message(lambda options=options: MegatronModel(chunks, vocab_size=62, **options))


# what later versions of Megatron have --------------------------------------------------------------------------------

HAS_MUP = 'use_mup' in {field.name for field in dataclasses.fields(TransformerConfig)}
COUNTS_ACCEPTED = hasattr(multi_token_prediction, '_compute_mtp_acceptance_counts')


@pytest.mark.skipif(not HAS_MUP, reason='this Megatron has no MuP')
@pytest.mark.parametrize('layout', [Layout(tp=2, sp=True), Layout(tp=2, pp=2)], ids=str)
def test_mups_scale_of_the_logits_reaches_the_loss_and_its_gradient(layout):
    spec = dataclasses.replace(GPT, config={'use_mup': True, 'mup_base_hidden_size': 8})
    check(spec, layout, UNEVEN[1], head='linear')
    assert reference(spec, {}).loss != pytest.approx(reference(GPT, {}).loss, rel=1e-3)


@pytest.mark.skipif(not COUNTS_ACCEPTED, reason='this Megatron does not count accepted tokens')
@pytest.mark.parametrize('layout', [Layout(), Layout(tp=2, sp=True)], ids=str)
def test_multi_token_prediction_counts_the_same_accepted_tokens(layout):
    """Megatron takes the argmax of the MTP layers' logits: they are built for it."""
    linear, logits = (run_ranks(_accepted, layout.world, layout, head) for head in ('linear', 'logits'))
    for ours, stock in zip(linear, logits):
        assert ours.keys() == stock.keys()
        for key, value in stock.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-9, atol=0)
    assert any(value.abs().sum() > 0 for key, value in linear[0].items() if 'correct' in key)


def _accepted(layout, head):
    spec = Spec(vocab_size=8, mtp=1, layers=1, position='rope')
    model = model_on(spec, layout, head=head)
    model.forward_backward(inputs=micro_batches(spec, UNEVEN[1], 0))
    tracker = multi_token_prediction.MTPLossLoggingHelper.tracker
    return {key: value.clone() for key, value in tracker.items() if isinstance(value, torch.Tensor)}
