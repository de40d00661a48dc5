"""Features of Megatron-Core beside this package: the numbers stay right, or one error says what is wrong in time."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
from typing import Any

import megatron.core
import numpy as np
import policy
import pytest
import stand_in_pretrain
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gradients import Part, collect_grads, compare
from invariance import UNEVEN, micro_batches, reference, samples
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from ranks import run_ranks
from stand_in_pretrain import Settings, pretrain
from tiny_gpt import Layout, Spec, build, initialize, unwrapped, wrap

from twinkle_megatron import MegatronModel, run
from twinkle_megatron.attach import attach
from twinkle_megatron.batch import split_context
from twinkle_megatron.megatron.compatibility import check_features

GPT = Spec(vocab_size=62, pad_vocab_to=4)
FROM_0_19 = not megatron.core.__version__.startswith(('0.16', '0.17', '0.18'))


# ---- multi-token prediction


MTP = Spec(vocab_size=62, pad_vocab_to=4, mtp=1, position='rope')
CP = [] if FROM_0_19 else [(Layout(cp=2), False)]  # there Megatron scales by the counts of a CP rank, a split's own


@pytest.mark.parametrize(
    ('layout', 'packed'), [(Layout(pp=2), False), (Layout(tp=2, sp=True), True), (Layout(dp=2), True), *CP], ids=str
)
def test_multi_token_prediction_adds_its_own_gradient_to_that_of_any_loss(layout, packed):
    """With GRPO at a temperature and GSPO, either head: the sum of the loss's gradient and MTP's cross entropy."""
    split = UNEVEN[layout.dp]
    (auxiliary,) = run_ranks(mtp_gradient, 1, split)
    runs = [('GRPOLoss', 'logits', 'ragged'), ('GSPOLoss', 'linear', 'aligned')]
    results = run_ranks(policy.train, layout.world, MTP, layout, split, packed, runs)
    for number, (loss, *_) in enumerate(runs):
        alone = policy.reference(dataclasses.replace(MTP, mtp=0), loss)
        both = {name: Part(part.tensor.clone()) for name, part in auxiliary.items()}
        for name, part in alone.grads.items():
            both[name].tensor.add_(part.tensor)
        assert compare([each[number].grads for each in results], both).error < 1e-9
        assert all(each[number].loss == pytest.approx(alone.loss, rel=1e-9) for each in results)
    assert auxiliary['output_layer.weight'].tensor.abs().max() > 1e-6


def mtp_gradient(split):
    """In one process: 0.1 · Σ over tokens with a trained next label of its cross entropy, over all trained tokens. From
    0.19 on those of a micro-batch weigh as much as all of its trained tokens."""
    initialize(Layout())
    (chunk,) = build(MTP)
    seen: list[torch.Tensor] = []

    def no_loss(labels, logits):
        seen.append(logits.transpose(0, 1)[..., : MTP.vocab_size])
        return torch.zeros(labels.shape, dtype=logits.dtype)

    chunk.compute_language_model_loss = no_loss
    batches = [b for replica in range(len(split.replicas)) for b in policy.micro_batches(MTP, split, replica, False)]
    total, trained = torch.zeros(()), 0
    for batch in batches:
        labels = batch['labels']
        positions = torch.arange(labels.shape[1]).expand(labels.shape)
        chunk(batch['input_ids'], positions, None, labels=labels, loss_mask=(labels != -100).double())
        following = F.pad(labels[:, 1:], (0, 1), value=-100)
        logits, *_ = seen
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction='sum')
        count, rolled = (labels != -100).sum(), (following != -100).sum().clamp_min(1)
        total = total + loss * (count / rolled if FROM_0_19 else 1)
        trained += int(count)
        seen.clear()
    (0.1 * total / trained).backward()
    return {name: part for name, part in collect_grads([chunk]).items() if part.tensor.abs().max() > 0} | {
        name: Part(torch.zeros_like(p)) for name, p in chunk.named_parameters() if p.grad is None
    }


def test_multi_token_prediction_trains_as_in_a_script_with_the_linear_head_attached():
    settings = Settings(MTP, Layout(tp=2, sp=True), steps=1)
    given = {'loss': 'cross_entropy', 'vocab_size': MTP.vocab_size, 'head': 'linear'}
    stock = run_ranks(pretrain, 2, settings)
    found = run_ranks(pretrain, 2, dataclasses.replace(settings, attach=given, garbage=True))
    assert_same([each.grads for each in found], [each.grads for each in stock])


def assert_same(found: list[dict[str, Part]], expected: list[dict[str, Part]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, part in theirs.items():
            scale = part.tensor.abs().max().item()
            assert (mine[name].tensor - part.tensor).abs().max() <= 1e-10 * scale, name


@pytest.mark.parametrize('layout', [Layout(pp=2), Layout(cp=2)], ids=str)
def test_a_model_from_a_config_has_its_mtp_layers_and_its_levels_of_context_parallelism(layout):
    results = run_ranks(from_config, 2, layout)
    assert all(sizes == ([2, 1] if layout.cp > 1 else None) for _, sizes in results)
    gradients, _ = results[-1]
    assert len(gradients) > 10, 'the last stage has them'
    assert min(gradients) > 0


def from_config(layout):
    sizes = [2, 1] if layout.cp > 1 else None
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, gradient_accumulation_fusion=False, calculate_per_token_loss=True, mtp_num_layers=1,
        hierarchical_context_parallel_sizes=sizes,
    )  # fmt: skip
    wrong = dataclasses.replace(config, hierarchical_context_parallel_sizes=[3])
    with pytest.raises(ValueError, match=r'must have the product cp = 2, got \[3\]'):
        MegatronModel.from_config(wrong, 62, cp=2)
    do_without_einops()
    model = MegatronModel.from_config(config, 62, pp=layout.pp, cp=layout.cp, max_sequence_length=64)
    model.set_loss('cross_entropy')
    model.forward_backward(micro_batches(GPT, UNEVEN[1], 0))
    levels = ps.get_hierarchical_context_parallel_groups(check_initialized=False)
    (chunk,) = model.chunks
    norms = [p.main_grad.abs().max().item() for name, p in chunk.named_parameters() if '.mtp.' in name]
    return norms, levels and [dist.get_world_size(group) for group in levels]


# ---- hierarchical context parallelism


def test_hierarchical_context_parallelism_is_one_group_with_megatrons_own_slices():
    """The levels are inside of the attention: counts, slices and sums are over all of their ranks."""
    results = run_ranks(hierarchical, 4, [2, 2])
    assert compare([grads for grads, _ in results], reference(GPT, {}).grads).error < 1e-9
    assert all(loss == pytest.approx(reference(GPT, {}).loss, rel=1e-9) for _, loss in results)


def do_without_einops():
    """Megatron makes its levels with it, and does not depend on it."""
    if ps.HAVE_EINOPS:
        return

    def rearrange(ranks, pattern, **sizes):
        assert pattern == '(l s u) -> (l u) s'
        lower, size, upper = (sizes[name] for name in 'lsu')
        return np.asarray(ranks).reshape(lower, size, upper).swapaxes(1, 2).reshape(lower * upper, size)

    ps.einops, ps.HAVE_EINOPS = types.SimpleNamespace(rearrange=rearrange), True


def hierarchical(sizes):
    do_without_einops()
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(context_parallel_size=4, hierarchical_context_parallel_sizes=sizes)
    model_parallel_cuda_manual_seed(1)
    settings = {'hierarchical_context_parallel_sizes': sizes, 'cp_comm_type': 'a2a+p2p'}
    spec = dataclasses.replace(GPT, config=settings)
    model = MegatronModel(wrap(build(spec, Layout(cp=4))), vocab_size=spec.vocab_size)
    model.set_loss('cross_entropy')
    whole = {'input_ids': torch.stack([sample['input_ids'] for sample in samples(GPT)])}
    more: dict[str, Any] = (
        {'is_hybrid_cp': False} if 'is_hybrid_cp' in inspect.signature(get_batch_on_this_cp_rank).parameters else {}
    )
    theirs = get_batch_on_this_cp_rank(dict(whole), **more)['input_ids']
    assert dist.get_world_size(model.groups.cp) == 4
    assert torch.equal(split_context(whole, 4, dist.get_rank(model.groups.cp))['input_ids'], theirs)
    out = model.forward_backward(micro_batches(GPT, UNEVEN[1], 0))
    return collect_grads(model.chunks), out['loss']


# ---- what is refused


def message(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return 'no error'


REFUSED: dict[str, dict[str, Any]] = {
    'graph of the iteration': {'cuda_graph_impl': 'local', 'cuda_graph_scope': 'full_iteration'},
    'overlap': {'overlap_moe_expert_parallel_comm': True},
    'hybrid context parallelism': {'hybrid_context_parallel': True},
}
WORDS = {
    'graph of the iteration': ('full_iteration', 'runs no Python code', 'CUDA graphs of layers'),
    'overlap': ('config.overlap_moe_expert_parallel_comm=True', 'labels and loss_mask are not seen', 'set it to False'),
    'hybrid context parallelism': ('config.hybrid_context_parallel=True', 'of its own size', 'set it to False'),
}


def test_what_cannot_be_right_is_one_error_on_every_rank_before_anything_runs():
    first, second = run_ranks(refusals, 2)
    assert first == second
    for name, words in WORDS.items():
        for told in first[name]:
            assert all(word in told for word in words), (name, told)


def refusals():
    """On a first and a last stage, of both ways in."""
    layout = Layout(pp=2)
    initialize(layout)
    found = {}
    for name, changes in REFUSED.items():
        chunks = wrap(build(GPT, layout))
        for attribute, value in normalised(changes).items():
            setattr(chunks[0].config, attribute, value)
        found[name] = [message(MegatronModel, chunks), message(attach, chunks[0])]
        assert '_twinkle_attached' not in vars(unwrapped(chunks[0]))
    return found


def test_a_script_run_by_us_is_refused_the_same(tmp_path):
    settings = Settings(GPT, Layout(), steps=1)
    settings = dataclasses.replace(settings, spec=dataclasses.replace(GPT, config={'hybrid_context_parallel': True}))
    torch.save(settings, tmp_path / 'settings')
    (told,) = run_ranks(run_script, 1, [str(tmp_path / 'settings'), str(tmp_path)])
    assert all(word in told for word in WORDS['hybrid context parallelism'])


def run_script(arguments):
    return message(run.main, ['--loss', 'cross_entropy', '--', stand_in_pretrain.__file__, *arguments])


def normalised(changes: dict[str, Any]) -> dict[str, Any]:
    """The settings as TransformerConfig leaves them."""
    if 'cuda_graph_impl' not in changes:
        return changes
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **changes)
    return {name: getattr(config, name) for name in changes}


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'cuda_graph_impl': 'local', 'cuda_graph_scope': 'attn'},
        {'cuda_graph_impl': 'transformer_engine', 'cuda_graph_scope': 'attn,mlp'},
        {'fp8': 'hybrid', 'fp8_recipe': 'delayed'},
        {'context_parallel_size': 4, 'cp_comm_type': 'a2a+p2p', 'hierarchical_context_parallel_sizes': [2, 2]},
    ],
    ids=str,
)
def test_graphs_of_layers_fp8_and_levels_of_context_parallelism_are_not_refused(changes):
    check_features(TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **changes))


# ---- parameters that are sharded


def test_chunks_that_fsdp_shards_are_refused_and_a_script_keeps_them():
    for told, attached, linear in run_ranks(sharded, 2):
        for name, one in zip(('use_megatron_fsdp=True', 'TorchFullyShardedDataParallel'), told, strict=True):
            assert 'chunks must not be sharded by' in one
            assert name in one
            assert 'use_distributed_optimizer=True' in one
            assert "attach with head='logits'" in one
        assert attached == pytest.approx(0, abs=1e-12)
        assert 'the weight of the output layer is sharded over data parallel ranks (FSDP)' in linear


def sharded():
    """The wrappers themselves need GPUs: they are made without their constructors."""
    initialize(Layout(dp=2))
    (chunk,) = build(GPT, Layout(dp=2))
    wrappers: list[Any] = []
    for cls in (FullyShardedDataParallel, TorchFullyShardedDataParallel):
        wrapper: Any = cls.__new__(cls)
        torch.nn.Module.__init__(wrapper)
        wrapper.module, wrapper.config = chunk, chunk.config
        wrapper.ddp_config = DistributedDataParallelConfig(use_megatron_fsdp=cls is FullyShardedDataParallel)
        wrappers.append(wrapper)
    told = [message(MegatronModel, wrapper) for wrapper in wrappers]
    ids = samples(GPT)[0]['input_ids'][None]
    plain = F.cross_entropy(chunk(ids, torch.arange(ids.shape[1])[None], None)[0, :, : GPT.vocab_size], ids[0])
    attached = attach(wrappers[0], vocab_size=GPT.vocab_size)
    found = wrappers[0](ids, torch.arange(ids.shape[1])[None], None, labels=ids).mean()
    attached.remove()
    chunk.output_layer.weight.__fsdp_param__ = True
    return told, float(found - plain), message(attach, wrappers[0], head='linear')


# ---- FP8


class Float8Tensor(torch.Tensor):
    """Stands for Transformer Engine's: a subclass of a nominal dtype."""


class Fp8OutputLayer(torch.nn.Module):
    """Stands for Transformer Engine's linear layer in FP8, as output layer."""


def test_a_linear_head_on_an_fp8_output_layer_is_refused_and_logits_are_not():
    for weight, layer, losses, copied in run_ranks(fp8, 2):
        assert "head='linear' cannot be had: the weight of the output layer is no plain tensor of floats but" in weight
        assert 'Float8Tensor' in weight
        assert 'the output layer is Fp8OutputLayer' in layer
        assert 'config.fp8_output_proj' in layer
        assert losses[0] == losses[1]
        assert 'config.fp8_param=True' in copied
        assert 'adapter_off' in copied


def fp8():
    layout = Layout(tp=2)
    initialize(layout)
    (chunk,) = build(GPT, layout)
    batches = micro_batches(GPT, UNEVEN[1], 0)
    losses = []
    layer = chunk.output_layer
    for weight in (layer.weight.detach(), layer.weight.detach().as_subclass(Float8Tensor)):
        layer.weight = torch.nn.Parameter(weight)
        model = MegatronModel(chunk, vocab_size=GPT.vocab_size)
        model.set_loss('cross_entropy')
        losses.append(model.forward_backward(batches)['loss'])
    chunk.config.fp8_param = True
    copied = message(model.reference)
    model.reference(adapter_off=contextlib.nullcontext)
    as_weight = message(MegatronModel, chunk, head='linear')
    chunk.output_layer = Fp8OutputLayer()
    return as_weight, message(MegatronModel, chunk, head='linear'), losses, copied
