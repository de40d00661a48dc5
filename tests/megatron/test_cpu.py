"""Megatron-Core on the CPU: the adapter comes and goes without a trace, and what runs under it is exact."""

import logging
import os
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
import ranks
import stock
import torch
from gradients import compare, padding_grad
from ranks import run_ranks
from tiny_gpt import Layout, Spec

from twinkle_megatron.megatron import cpu

pytestmark = pytest.mark.skipif(ranks.DEVICE == 'cuda', reason='the adapter is for machines without CUDA')


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    cpu.uninstall()


def snapshot():
    """Every attribute of Megatron's modules and their classes, of torch and torch.cuda, and the code of functions."""
    found = {}
    modules = [m for name, m in sys.modules.items() if name.split('.')[0] == 'megatron' and isinstance(m, ModuleType)]
    for module in [*modules, torch, torch.cuda]:
        owners = [
            module,
            *(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__),
        ]
        for owner in owners:
            for name, value in list(vars(owner).items()):
                found[module.__name__, owner.__name__, name] = value
                function = getattr(value, '__func__', value)
                if isinstance(function, FunctionType):
                    found[module.__name__, owner.__name__, name, 'code'] = function.__code__
        found[module.__name__, 'filters'] = tuple(logging.getLogger(module.__name__).filters)
    found['meta_path'] = tuple(sys.meta_path)
    return found


def changed(before, after):
    """Names whose value is another object, or equal for tuples."""
    same = {
        k
        for k in before.keys() & after.keys()
        if before[k] is after[k] or (type(before[k]) is tuple and before[k] == after[k])
    }
    return sorted(map(str, (before.keys() | after.keys()) - same))


def test_uninstall_restores_every_attribute_time_and_again():
    before = snapshot()
    for _ in range(2):
        cpu.install()
        assert cpu.installed()
        changes = changed(before, snapshot())
        assert len(changes) > len(cpu.PATCHES)
        cpu.install()
        assert changed(before, snapshot()) == changes
        cpu.uninstall()
        assert not cpu.installed()
        assert changed(before, snapshot()) == []
    cpu.uninstall()
    assert changed(before, snapshot()) == []


def test_installed_before_the_import_it_adapts_what_comes_later():
    script = """
        import sys, torch
        import twinkle_megatron.megatron
        from twinkle_megatron.megatron import cpu
        from twinkle_megatron.megatron._cpu_torch import TORCH
        cpu.install()
        assert not any(name.startswith('megatron') for name in sys.modules)
        from megatron.core.fusions import fused_bias_gelu
        from megatron.core.models.gpt.gpt_model import GPTModel
        megatron = [m for name, m in sys.modules.items() if name.startswith('megatron.')]
        assert not any(vars(m).get('torch') is torch for m in megatron)
        adapted = [m for m in megatron if vars(m).get('torch') is TORCH]
        assert len(adapted) > 50
        assert not hasattr(fused_bias_gelu.bias_gelu, '_torchdynamo_orig_callable')
        cpu.uninstall()
        assert all(m.torch is torch for m in adapted)
        assert not hasattr(torch.Tensor, 'cuda') or torch.Tensor.cuda is torch._C.TensorBase.cuda
    """
    env = {**os.environ, 'PYTHONPATH': str(Path(cpu.__file__).parents[2])}
    subprocess.run([sys.executable, '-W', 'ignore', '-c', textwrap.dedent(script)], env=env, check=True, timeout=120)


def test_refused_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    before = snapshot()
    with pytest.raises(RuntimeError, match=r'without CUDA.*CUDA_VISIBLE_DEVICES'):
        cpu.install()
    assert not cpu.installed()
    assert changed(before, snapshot()) == []


def test_torch_compile_still_compiles_but_megatron_does_not():
    def case():
        import torch._dynamo

        stock.train(Spec(layers=2, config={'bias_activation_fusion': True, 'bias_dropout_fusion': True}), Layout())
        of_megatron = dict(torch._dynamo.utils.counters['frames'])
        graphs = []

        def backend(graph, example_inputs):
            graphs.append(graph)
            return graph.forward

        value = torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.zeros(3))
        return cpu.installed(), of_megatron, len(graphs), value

    installed, of_megatron, graphs, value = run_ranks(case, 1)[0]
    assert installed
    assert of_megatron == {}
    assert graphs == 1
    assert value.tolist() == [1, 1, 1]


def test_only_megatron_sees_the_stand_in_for_cuda():
    cpu.install()
    from megatron.core.pipeline_parallel import schedules

    assert schedules.torch.zeros(2, device='cuda', pin_memory=True).device.type == 'cpu'
    assert schedules.torch.cuda.current_device() == torch.device('cpu')
    assert schedules.torch.Tensor is torch.Tensor
    assert not schedules.torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device='cuda')


REFERENCES = {}


def reference(spec, dp=1):
    """One process's gradients, computed once a model and number of replicas."""
    key = f'{spec} {dp}'
    if key not in REFERENCES:
        (REFERENCES[key],) = run_ranks(stock.reference, 1, spec, dp)
    return REFERENCES[key]


MTP_OF_0_16 = pytest.mark.skipif(
    not version('megatron-core').startswith('0.16.'),
    reason='later versions scale the MTP loss by token counts of one slice, so it depends on the split',
)
PLAIN = Spec(layers=4)
MOE = Spec(layers=2, experts=4)
ROPE = Spec(layers=2, position='rope', query_groups=2, vocab_size=61)


@pytest.mark.parametrize(
    ('spec', 'layout', 'ddp'),
    [
        (PLAIN, Layout(), {}),
        (PLAIN, Layout(tp=2), {}),
        (PLAIN, Layout(tp=2, sp=True), {}),
        (PLAIN, Layout(pp=2), {}),
        (PLAIN, Layout(pp=2, vpp=2), {}),
        (PLAIN, Layout(cp=2), {}),
        (PLAIN, Layout(dp=2), {}),
        (PLAIN, Layout(dp=2), {'distributed_optimizer': True}),
        (PLAIN, Layout(dp=2), {'distributed_optimizer': True, 'overlap': True}),
        (PLAIN, Layout(pp=2, dp=2), {'overlap': True}),
        (ROPE, Layout(tp=2, cp=2, sp=True), {}),
        (Spec(tied=True), Layout(pp=2), {}),
        (Spec(layers=2, tied=True, mtp=1, position='rope'), Layout(pp=2), {}),
        pytest.param(Spec(layers=2, mtp=1), Layout(cp=2), {}, marks=MTP_OF_0_16),
        (MOE, Layout(dp=2, ep=2), {}),
        (MOE, Layout(tp=2, ep=2, etp=1, sp=True), {'distributed_optimizer': True}),
        pytest.param(Spec(layers=8), Layout(pp=4, vpp=2), {}, marks=pytest.mark.long),
        pytest.param(
            MOE, Layout(tp=2, dp=2, ep=2, etp=1, sp=True), {'distributed_optimizer': True}, marks=pytest.mark.long
        ),
        pytest.param(Spec(layers=8), Layout(tp=2, pp=2, vpp=2, cp=2, sp=True), {}, marks=pytest.mark.long),
    ],
    ids=lambda value: '-'.join(value) if isinstance(value, dict) else None if isinstance(value, Spec) else str(value),
)
def test_every_gradient_is_that_of_one_process(spec, layout, ddp):
    results = run_ranks(lambda: stock.train(spec, layout, **ddp), layout.world)
    worst = compare(results, reference(spec, layout.dp))
    assert worst.error < 1e-13, worst
    assert padding_grad(results, spec) == 0


@pytest.mark.parametrize('layout', [Layout(tp=2), Layout(pp=2)], ids=str)
def test_megatrons_own_cross_entropy_agrees_within_float32(layout):
    results = run_ranks(lambda: stock.train(PLAIN, layout, stock_loss=True), layout.world)
    worst = compare(results, reference(PLAIN))
    assert worst.error < 1e-6, worst


@pytest.mark.parametrize('layout', [Layout(tp=2, sp=True), Layout(pp=2, vpp=2)], ids=str)
def test_a_clipped_step_of_adam_is_that_of_one_process(layout):
    (one,) = run_ranks(lambda: stock.step(PLAIN, Layout()), 1)
    worst = compare(run_ranks(lambda: stock.step(PLAIN, layout), layout.world), one)
    assert worst.error < 1e-7, worst  # Megatron's clipping coefficient is a float32


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_the_distributed_optimizer_takes_the_step_of_the_plain_one(dtype):
    spec = Spec(layers=2, dtype=dtype)
    plain = run_ranks(lambda: stock.step(spec, Layout(dp=2)), 2)
    sharded = run_ranks(lambda: stock.step(spec, Layout(dp=2), distributed_optimizer=True), 2)
    worst = compare(sharded, plain[0])
    assert worst.error <= 1e-6, worst


def test_recomputed_dropout_is_the_same_dropout():
    dropout = {'hidden_dropout': 0.3, 'attention_dropout': 0.2}
    recompute = {'recompute_granularity': 'full', 'recompute_method': 'uniform', 'recompute_num_layers': 1}
    layout = Layout(tp=2)

    def train(**config):
        return run_ranks(lambda: stock.train(Spec(layers=2, config=config), layout), 2)

    dropped, again, plain = train(**dropout), train(**dropout, **recompute), train()
    for a, b, c in zip(dropped, again, plain):
        assert all(torch.equal(a[name].tensor, b[name].tensor) for name in a)
        assert not all(torch.equal(a[name].tensor, c[name].tensor) for name in a)


INTERLEAVED = {'overlap_p2p_comm': True, 'batch_p2p_comm': False, 'virtual_pipeline_model_parallel_size': 2}


def config(**changes):
    """What `check_config` reads of a TransformerConfig."""
    values = {
        'pipeline_model_parallel_size': 2,
        'params_dtype': torch.float32,
        'pipeline_dtype': torch.float32,
        'fp32_residual_connection': False,
        'batch_p2p_comm': True,
        'overlap_p2p_comm': False,
        'deallocate_pipeline_outputs': False,
        'gradient_accumulation_fusion': False,
        'masked_softmax_fusion': False,
    }
    return SimpleNamespace(**(values | changes))


WRONG = [
    (2, {}, r'overlap_p2p_comm=True and batch_p2p_comm=False for 2 chunks'),
    (2, INTERLEAVED | {'deallocate_pipeline_outputs': True}, r'deallocate_pipeline_outputs=False'),
    (1, {'pipeline_dtype': torch.bfloat16}, r'pipeline_dtype=torch\.float32.*got torch\.bfloat16'),
    (1, {'gradient_accumulation_fusion': True}, r'gradient_accumulation_fusion=False'),
    (
        1,
        {'params_dtype': torch.bfloat16, 'pipeline_dtype': torch.bfloat16, 'masked_softmax_fusion': True},
        r'masked_softmax_fusion=False for torch\.bfloat16',
    ),
]


@pytest.mark.parametrize(('chunks', 'changes', 'message'), WRONG)
def test_a_config_that_would_train_wrongly_is_refused_with_its_fix(chunks, changes, message):
    cpu.install()
    with pytest.raises(ValueError, match=message):
        cpu.check_config(config(**changes), chunks)


@pytest.mark.parametrize(('chunks', 'changes', 'message'), WRONG)
def test_without_the_adapter_no_config_is_looked_at(chunks, changes, message):
    cpu.check_config(config(**changes), chunks)


@pytest.mark.parametrize(
    ('chunks', 'changes'),
    [
        (1, {}),
        (2, INTERLEAVED),
        (2, {'pipeline_model_parallel_size': 4}),
        (1, {'deallocate_pipeline_outputs': True}),
        (1, {'params_dtype': torch.bfloat16, 'fp32_residual_connection': True}),
        (1, {'masked_softmax_fusion': True}),
    ],
)
def test_a_config_that_trains_rightly_is_taken(chunks, changes):
    cpu.install()
    cpu.check_config(config(**changes), chunks)


def test_the_refused_interleaving_is_wrong_indeed():
    spec = Spec(layers=4, config={'overlap_p2p_comm': False, 'batch_p2p_comm': True})
    layout = Layout(pp=2, vpp=2)

    def case(check):
        if not check:
            cpu.check_config = lambda *args: None
        return stock.train(spec, layout)

    outcomes = run_ranks(case, 2, True, collect_errors=True)
    assert [(o.error, 'batch_p2p_comm=False' in o.message) for o in outcomes] == [('ValueError', True)] * 2
    assert compare(run_ranks(case, 2, False), reference(PLAIN)).error > 0.1
