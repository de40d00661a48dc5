"""Every entry of the adapter's table is needed: without it a case fails that passes with it."""

import importlib
import logging
import tempfile

import pytest
import ranks
import stock
import torch
import torch.distributed as dist
from gradients import collect_weights
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from ranks import run_ranks
from tiny_gpt import Layout, Spec, unwrapped

from twinkle_megatron.megatron import cpu

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(ranks.DEVICE == 'cuda', reason='the adapter is for machines without CUDA'),
]

ALONE = Layout()
ONE, MOE = Spec(layers=1), Spec(layers=1, experts=2)
DROPOUT = {'attention_dropout': 0.5}
FUSED = Spec(layers=1, config={'bias_activation_fusion': True, 'bias_dropout_fusion': True})


def train(spec, layout=ALONE):
    return layout, lambda: stock.train(spec, layout)


def step(dtype, distributed_optimizer=False):
    spec = Spec(layers=1, dtype=dtype)
    return ALONE, lambda: stock.step(spec, ALONE, distributed_optimizer)


def same_dropout():
    """Tensor parallel ranks drop the same hidden values, so what they replicate stays equal."""
    grads = stock.train(Spec(layers=1, config={'hidden_dropout': 0.5}), Layout(tp=2))
    for name, part in grads.items():
        mine = part.tensor.clone()
        dist.broadcast(mine, src=0)
        assert part.dim >= 0 or torch.equal(mine, part.tensor), name


def no_warning():
    """Dropout logs nothing."""
    heard = []
    handler = logging.Handler()
    handler.emit = heard.append
    logging.getLogger('megatron.core.tensor_parallel.random').addHandler(handler)
    stock.train(Spec(layers=1, config=DROPOUT), ALONE)
    assert not heard, heard[0].getMessage()


def no_compilation():
    """A training step hands nothing to the compiler."""
    import torch._dynamo

    stock.train(FUSED, ALONE)
    compiled = dict(torch._dynamo.utils.counters['frames'])
    assert not compiled, compiled


def resume():
    """Weights and optimizer state come back from a checkpoint."""
    chunks, optimizer = _trained()
    with tempfile.TemporaryDirectory() as folder:
        dist_checkpointing.save(_state(chunks, optimizer), folder)
        saved = collect_weights(chunks)
        chunks, optimizer = _trained()
        state = dist_checkpointing.load(_state(chunks, optimizer, loading=True), folder)
    unwrapped(chunks[0]).load_state_dict(state['model'], strict=False)
    optimizer.load_state_dict(state['optimizer'])
    loaded = collect_weights(chunks)
    assert all(torch.equal(saved[name].tensor, loaded[name].tensor) for name in saved)


def _trained():
    spec = Spec(layers=1, dtype=torch.float32)
    chunks = stock.prepare(spec, ALONE, distributed_optimizer=True)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer='adam', lr=1e-2, use_distributed_optimizer=True), chunks
    )
    stock.backward(spec, ALONE, chunks)
    optimizer.step()
    return chunks, optimizer


def _state(chunks, optimizer, loading=False):
    metadata = {
        'distrib_optim_sharding_type': 'fully_reshardable',
        'chained_optim_avoid_prefix': True,
        'dp_cp_group': ps.get_data_parallel_group(with_context_parallel=True),
    }
    model = unwrapped(chunks[0]).sharded_state_dict(metadata=metadata)
    return {'model': model, 'optimizer': optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)}


CASES = {
    'cuda_means_cpu': train(ONE),
    'tensor_cuda': train(Spec(layers=1, position='rope'), Layout(cp=2)),
    'run_fused_eagerly': (ALONE, no_compilation),
    'rng_state': (Layout(tp=2), same_dropout),
    'rng_warning': (ALONE, no_warning),
    'norm_under_sequence_parallel': train(ONE, Layout(tp=2, sp=True)),
    'moe_splits': train(MOE, Layout(dp=2, ep=2)),
    'moe_router': train(MOE),
    'mtp': train(Spec(layers=1, mtp=1)),
    'optimizer_types': step(torch.bfloat16),
    'distributed_optimizer_types': step(torch.float32, distributed_optimizer=True),
    'clipped_types': step(torch.float32),
    'adam_step': (ALONE, resume),
}
VERSION_DEPENDENT = {
    'moe_router': ('megatron.core.transformer.moe.moe_utils', 'te_general_gemm', False),
    'mtp': ('megatron.core.transformer.multi_token_prediction', 'is_inference_column_parallel_linear', True),
}


def test_every_entry_has_a_case_and_a_reason():
    assert {patch.name for patch in cpu.PATCHES} == set(CASES)
    assert all(patch.reason for patch in cpu.PATCHES)


@pytest.mark.parametrize('name', CASES)
def test_a_case_passes_with_the_table_and_fails_without_the_entry(name):
    if name in VERSION_DEPENDENT:
        module, attribute, wanted = VERSION_DEPENDENT[name]
        if hasattr(importlib.import_module(module), attribute) != wanted:
            pytest.skip('not needed by this version of megatron-core')
    layout, case = CASES[name]

    def without():
        cpu.uninstall()
        cpu.PATCHES[:] = [patch for patch in cpu.PATCHES if patch.name != name]
        cpu.install()
        return case()

    run_ranks(case, layout.world)
    outcomes = run_ranks(without, layout.world, timeout=120, collect_errors=True)
    assert any(outcome.error for outcome in outcomes), 'it passes without'
