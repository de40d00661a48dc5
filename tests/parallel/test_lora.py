"""LoRA adapters, their base frozen: trained exactly with either head, under every layout, as the policy of DPO, and in
checkpoints."""

from __future__ import annotations

import contextlib
import logging

import lora
import pytest
import stand_in_pretrain
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gradients import collect_grads, collect_weights, compare
from invariance import UNEVEN, micro_batches, samples
from ranks import run_ranks
from stand_in_pretrain import Settings, plain_loss, run_schedule
from test_compatibility import assert_same, message
from tiny_gpt import Layout, Spec, initialize, unwrapped, wrap

from twinkle_megatron import MegatronModel
from twinkle_megatron.attach import attach

LORA = Spec(vocab_size=64)


@pytest.mark.parametrize(
    ('ends', 'head', 'layout'),
    [
        ('frozen', 'linear', Layout(tp=2, sp=True)),
        ('frozen', 'linear', Layout(pp=2)),
        ('frozen', 'logits', Layout(cp=2)),
        ('wrapped', 'auto', Layout(tp=2, sp=True)),
        ('wrapped', 'logits', Layout(pp=2)),
        ('hooked', 'linear', Layout(tp=2)),
        ('parametrized', 'linear', Layout(tp=2)),
        ('parametrized', 'linear', Layout(dp=2)),
    ],
    ids=str,
)
def test_adapters_are_trained_and_frozen_weights_are_not(ends, head, layout):
    (expected,) = run_ranks(plain_lora, 1, ends)
    results = run_ranks(train_lora, layout.world, ends, head, layout)
    assert compare([grads for grads, _ in results], expected[0]).error < 1e-9
    assert all(loss == pytest.approx(expected[1], rel=1e-9) for _, loss in results)


def train_lora(ends, head, layout):
    initialize(layout)
    model = MegatronModel(wrap(lora.build_adapted(LORA, layout, ends)), head=head)
    model.set_loss('cross_entropy')
    replica = dist.get_rank(model.groups.dp)
    out = model.forward_backward(micro_batches(LORA, UNEVEN[layout.dp], replica))
    frozen = [p for chunk in model.chunks for p in chunk.parameters() if not p.requires_grad]
    assert all(p.grad is None and not hasattr(p, 'main_grad') for p in frozen)
    return collect_grads(model.chunks), out['loss']


def plain_lora(ends):
    """Autograd's gradient of the mean cross entropy in one process, and that mean."""
    initialize(Layout())
    (chunk,) = lora.build_adapted(LORA, Layout(), ends)
    logits, labels = outputs(chunk)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    grads = collect_grads([chunk])
    assert all('down' in name or 'up' in name for name in grads)
    assert all(part.tensor.abs().max() > 1e-6 for part in grads.values()), 'each adapter takes part'
    return grads, loss.item()


def test_a_pipeline_stage_may_have_nothing_to_train():
    (expected,) = run_ranks(last_layer, 1, Layout())
    assert compare(run_ranks(last_layer, 2, Layout(pp=2)), expected).error < 1e-9


def last_layer(layout):
    initialize(layout)
    chunks = lora.build_adapted(LORA, layout)
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        if layer.layer_number == 1:
            layer.requires_grad_(False)
    model = MegatronModel(wrap(chunks), head='linear')
    model.set_loss('cross_entropy')
    model.forward_backward(micro_batches(LORA, UNEVEN[1], 0))
    grads = collect_grads(model.chunks)
    assert not any(name.startswith('decoder.layers.0') for name in grads)
    return grads


def outputs(chunk):
    """Logits and labels of the whole batch."""
    ids, labels = (torch.stack([sample[key] for sample in samples(LORA)]) for key in ('input_ids', 'labels'))
    return chunk(ids, torch.arange(ids.shape[1]).expand(ids.shape), None), labels


@pytest.mark.parametrize(('ends', 'head'), [('wrapped', 'logits'), ('frozen', 'linear'), ('hooked', 'linear')])
def test_adapters_are_trained_in_a_script_with_a_loss_attached(ends, head):
    given = {'loss': 'cross_entropy', 'head': head, 'metrics': ['accuracy']}
    stock, found = (run_ranks(script_lora, 2, ends, each) for each in (None, given))
    assert_same(found, stock)


def script_lora(ends, given):
    layout = Layout(tp=2, sp=ends == 'wrapped')
    stand_in_pretrain.ARGS = Settings(LORA, layout, attach=given)
    initialize(layout)
    chunks = wrap(lora.build_adapted(LORA, layout, ends))
    if given is None:
        plain_loss(unwrapped(chunks[0]), LORA)
    run_schedule(chunks, seed=0)
    return collect_grads(chunks)


@pytest.mark.parametrize('layout', [Layout(tp=2, sp=True), Layout(pp=2)], ids=str)
def test_the_model_without_its_adapter_is_the_reference_of_dpo(layout):
    (expected,) = run_ranks(plain_dpo, 1)
    results = run_ranks(train_dpo, 2, layout)
    assert compare([grads for grads, _ in results], expected[0]).error < 1e-9
    assert all(loss == pytest.approx(expected[1], rel=1e-9) for _, loss in results)


def test_an_adapter_that_cuda_graphs_replay_cannot_be_switched_off():
    (told,) = run_ranks(graphed, 1)
    assert "adapter_off changes nothing in layers that CUDA graphs (config.cuda_graph_impl='local') replay" in told


def graphed():
    model = lora_model(Layout())
    model.config.cuda_graph_impl = 'local'
    model.reference()
    return message(model.reference, adapter_off=contextlib.nullcontext)


PAIRS = (0, 1, 3, 4, 5, 7)
"""Samples with a trained token, chosen and rejected in turn."""


def train_dpo(layout):
    initialize(layout)
    chunks = wrap(lora.build_adapted(LORA, layout, 'frozen'))
    model = MegatronModel(chunks, head='linear')
    model.set_loss('dpo', beta=0.3)
    adapterless = model.reference(adapter_off=lambda: lora.switched_off(chunks))
    inputs = [samples(LORA)[i] for i in PAIRS]
    ref_logps = adapterless.logps(inputs, micro_batch_size=2)
    out = model.forward_backward(inputs, micro_batch_size=2, ref_logps=ref_logps)
    return collect_grads(model.chunks), out['loss']


def plain_dpo():
    initialize(Layout())
    (chunk,) = lora.build_adapted(LORA, Layout())

    def log_ratio():
        logits, labels = outputs(chunk)
        each = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        return each.masked_fill(labels == -100, 0).sum(-1)[list(PAIRS)]

    policy = log_ratio()
    with lora.switched_off([chunk]), torch.no_grad():
        base = log_ratio()
    assert (policy - base).abs().max() > 0.1
    chosen, rejected = (policy - base).view(-1, 2).unbind(-1)
    loss = -F.logsigmoid(0.3 * (chosen - rejected)).mean()
    loss.backward()
    return collect_grads([chunk]), loss.item()


def test_an_adapter_around_the_output_layer_is_not_overlooked_by_a_linear_head():
    results = run_ranks(wrapped_and_linear, 2)
    for refused, _ in results:
        for told in refused:
            assert "head='linear' cannot be had: the output layer is Saved, not Megatron's" in told
            assert '(LoRA)' in told
            assert "use head='logits'" in told
    ((said,),) = (logged for _, logged in results if logged)
    assert "takes head='logits'" in said
    assert 'x 32 ids a rank' in said
    assert 'but the output layer is Saved' in said


def wrapped_and_linear():
    layout = Layout(tp=2)
    initialize(layout)
    chunks = wrap(lora.build_adapted(LORA, layout, 'wrapped'))
    refused = [message(MegatronModel, chunks, head='linear'), message(attach, chunks[0], head='linear')]
    logged: list[str] = []
    logger = logging.getLogger('twinkle_megatron')
    logger.addFilter(lambda record: logged.append(record.getMessage()) or False)
    model = MegatronModel(chunks, head='auto')
    model.set_loss('cross_entropy')
    model.forward_only(micro_batches(LORA, UNEVEN[1], 0))
    return refused, logged


def test_adapters_are_saved_in_one_layout_and_loaded_in_another(tmp_path):
    (expected,) = run_ranks(save_lora, 1, Layout(), tmp_path / 'one')
    run_ranks(save_lora, 2, Layout(tp=2, sp=True), tmp_path / 'two')
    for folder, layout in ((tmp_path / 'one', Layout(tp=2)), (tmp_path / 'two', Layout(pp=2))):
        assert compare(run_ranks(load_lora, 2, layout, folder), expected).error == 0


def save_lora(layout, folder):
    model = lora_model(layout)
    model.save(folder)
    return collect_weights(model.chunks)


def load_lora(layout, folder):
    model = lora_model(layout)
    with torch.no_grad():
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)
    model.load(folder)
    return collect_weights(model.chunks)


def lora_model(layout, *adapters):
    initialize(layout)
    return MegatronModel(wrap(lora.build_adapted(LORA, layout, *adapters)))


def test_adapters_that_would_save_a_part_of_a_weight_as_all_of_it_are_refused(tmp_path):
    for told in run_ranks(save_unsaid, 2, tmp_path):
        assert 'linear_proj.base.weight is cut over 2 tensor parallel ranks' in told
        assert 'give the module that wraps it (an adapter?) a sharded_state_dict' in told
    assert not list(tmp_path.iterdir())


def save_unsaid(folder):
    model = lora_model(Layout(tp=2), 'frozen', ('linear_qkv', 'linear_proj'), lora.Adapted)
    return message(model.save, folder)
