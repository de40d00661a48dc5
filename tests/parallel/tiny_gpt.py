"""A tiny real Megatron GPT under any layout, with weights that do not depend on the layout.

    initialize(layout)                                  # on every rank
    chunks = build(spec, layout)                        # this rank's model chunks, bare
    chunks = wrap(chunks, distributed_optimizer=True)   # or in Megatron's DDP

gradients.py collects and compares what came out.

Weights depend on the parameter's global name alone: each is drawn whole and then cut for the rank that holds it.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

warnings.filterwarnings('ignore', module=r'megatron\.')
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from ranks import DEVICE, device  # noqa: E402

from twinkle_megatron.megatron import cpu  # noqa: E402
from twinkle_megatron.megatron._cpu_patches import Undo  # noqa: E402
from twinkle_megatron.megatron._cpu_torch import StandIn  # noqa: E402
from twinkle_megatron.megatron.cpu_attention import cpu_layer_spec  # noqa: E402

VOCABULARY_PARAMETERS = {'embedding.word_embeddings.weight', 'output_layer.weight', 'output_layer.bias'}


@dataclass(frozen=True)
class Layout:
    """How many ways each dimension is split; `world` ranks in all. `etp` (expert tensor parallel) defaults to `tp`."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        """For test ids: 'tp2-pp2-sp'; 'one' for one process."""
        default = Layout()
        parts = (
            f.name if value is True else f'{f.name}{value}'
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != getattr(default, f.name)
        )
        return '-'.join(parts) or 'one'


@dataclass(frozen=True)
class Spec:
    """The model: `vocab_size` is the true one; the model's is rounded up to a multiple of `pad_vocab_to * tp`. It has
    `layers` layers, more where the pipeline has more stages."""

    vocab_size: int = 64
    pad_vocab_to: int = 1
    layers: int = 2
    hidden: int = 32
    heads: int = 4
    query_groups: int | None = None
    max_length: int = 64
    tied: bool = False
    position: str = 'learned_absolute'
    experts: int = 0
    mtp: int = 0
    dtype: torch.dtype = torch.float64
    config: dict[str, Any] = field(default_factory=dict)  # further TransformerConfig arguments

    def on(self, layout: Layout) -> Spec:
        """As it is built in this layout."""
        return dataclasses.replace(self, layers=max(self.layers, layout.pp * layout.vpp))

    def padded_vocab(self, tp: int = 1) -> int:
        multiple = self.pad_vocab_to * tp
        return -(-self.vocab_size // multiple) * multiple


def _do_without_transformer_engine() -> None:
    """On GPUs too, the local layers need these entries of the CPU adapter where Transformer Engine is missing."""
    for patch in cpu.PATCHES:
        if patch.module and patch.name in ('norm_under_sequence_parallel', 'moe_router', 'mtp'):
            patch.apply(importlib.import_module(patch.module), Undo())


if DEVICE == 'cuda':
    _do_without_transformer_engine()


def initialize(layout: Layout = Layout(), seed: int = 1234) -> None:
    """Megatron's process groups for `layout`, and its random states."""
    if dist.get_world_size() != layout.world:
        raise ValueError(f'layout {layout} needs {layout.world} ranks, got {dist.get_world_size()}')
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def transformer_config(spec: Spec, layout: Layout) -> TransformerConfig:
    """The configuration of `spec` under `layout`; `spec.config` overrides what stands here."""
    half = spec.dtype if spec.dtype in (torch.bfloat16, torch.float16) else None
    values: dict[str, Any] = {
        'num_layers': spec.on(layout).layers,
        'hidden_size': spec.hidden,
        'num_attention_heads': spec.heads,
        'num_query_groups': spec.query_groups,
        'use_cpu_initialization': True,
        'hidden_dropout': 0.0,
        'attention_dropout': 0.0,
        'params_dtype': spec.dtype,
        'pipeline_dtype': spec.dtype,
        'bf16': half is torch.bfloat16,
        'fp16': half is torch.float16,
        'gradient_accumulation_fusion': False,
        'masked_softmax_fusion': False,
        'calculate_per_token_loss': True,
        'tensor_model_parallel_size': layout.tp,
        'pipeline_model_parallel_size': layout.pp,
        'virtual_pipeline_model_parallel_size': layout.vpp if layout.vpp > 1 else None,
        'context_parallel_size': layout.cp,
        'expert_model_parallel_size': layout.ep,
        'sequence_parallel': layout.sp,
        'mtp_num_layers': spec.mtp or None,
    }
    if layout.vpp > 1:
        values |= {'overlap_p2p_comm': True, 'batch_p2p_comm': False}
    if layout.etp is not None:
        values['expert_tensor_parallel_size'] = layout.etp
    if spec.experts:
        values |= {
            'num_moe_experts': spec.experts,
            'moe_router_topk': 2,
            'moe_ffn_hidden_size': spec.hidden,
            'moe_token_dispatcher_type': 'alltoall',
            'moe_router_dtype': 'fp64' if spec.dtype is torch.float64 else 'fp32',
            'moe_router_load_balancing_type': 'none',
            'add_bias_linear': False,
        }
    return TransformerConfig(**(values | spec.config))


def build(spec: Spec, layout: Layout = Layout()) -> list[Any]:
    """This rank's model chunks with deterministic weights, on the rank's device; 16-bit ones inside `Float16Module`."""
    if spec.mtp and layout.pp > 1 and spec.position == 'learned_absolute':
        raise ValueError("MTP on several stages needs position='rope': Megatron leaves its copy of the others unsummed")
    config = transformer_config(spec, layout)
    chunks = [_chunk(spec, layout, config, stage if layout.vpp > 1 else None) for stage in range(layout.vpp)]
    if spec.experts and spec.dtype is torch.float64:
        _route_in_float64()
    for chunk in chunks:
        chunk.to(device(), spec.dtype)
        set_weights(chunk, spec)
    return [Float16Module(config, c) for c in chunks] if config.bf16 or config.fp16 else chunks


def _route_in_float64() -> None:
    """Megatron's router rounds its softmax to float32, whatever its dtype: errors of 1e-7 would be taken for ours."""
    moe_utils.torch = StandIn(moe_utils.torch, softmax=lambda x, dim, dtype=None: x.softmax(dim))


def _chunk(spec: Spec, layout: Layout, config: TransformerConfig, stage: int | None) -> GPTModel:
    layer = cpu_layer_spec(num_experts=spec.experts or None, normalization=config.normalization)
    mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=stage) if spec.mtp else None
    return GPTModel(
        config,
        layer,
        vocab_size=spec.padded_vocab(layout.tp),
        max_sequence_length=spec.max_length,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type=spec.position,
        mtp_block_spec=mtp,
        vp_stage=stage,
    )


def wrap(
    chunks: list[Any], distributed_optimizer: bool = False, overlap: bool = False, **ddp: Any
) -> list[DistributedDataParallel]:
    """`chunks` in Megatron's DDP, with the hooks that Megatron's own training sets on the config.

    `overlap` reduces gradients during the backward pass, in buckets small enough that there are several.
    """
    config = chunks[0].config
    settings = {
        'use_distributed_optimizer': distributed_optimizer,
        'overlap_grad_reduce': overlap,
        'bucket_size': 5000 if overlap else None,
        'grad_reduce_in_fp32': config.bf16 or config.fp16,
        **ddp,
    }
    ddp_config = DistributedDataParallelConfig(**settings)
    wrapped = [DistributedDataParallel(config, ddp_config, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]
    config.finalize_model_grads_func = _finalize
    if overlap:
        config.no_sync_func = [c.no_sync for c in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    return wrapped


def _finalize(model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's, dividing by the number of tokens in float64: the inverse of an int tensor would be float32."""
    finalize_model_grads(model, None if num_tokens is None else num_tokens.double(), **kwargs)


def unwrapped(chunk: Any) -> GPTModel:
    """The GPTModel inside DDP and `Float16Module`."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def global_name(model: GPTModel, name: str) -> str:
    """The parameter's name in the whole model: layers and experts numbered globally, a tied output as the embedding."""
    parts = name.split('.')
    if name == 'output_layer.weight' and model.share_embeddings_and_output_weights:
        return 'embedding.word_embeddings.weight'
    if parts[:2] == ['decoder', 'layers']:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    if 'local_experts' in parts:
        at = parts.index('local_experts') + 1
        local = model.config.num_moe_experts // ps.get_expert_model_parallel_world_size()
        parts[at] = str(int(parts[at]) + local * ps.get_expert_model_parallel_rank())
    return '.'.join(parts)


def shard_of(name: str, parameter: torch.Tensor) -> tuple[int, int, int]:
    """`(dim, index, count)`: which of `count` equal pieces on `dim` this rank holds; `dim` -1 for all of it."""
    dim = getattr(parameter, 'partition_dim', -1) if getattr(parameter, 'tensor_model_parallel', False) else -1
    if 'local_experts' in name:  # experts are cut over their own tensor parallel group
        count, index = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
    else:
        count, index = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    return (dim, index, count) if count > 1 and dim >= 0 else (-1, 0, 1)


@torch.no_grad()
def set_weights(model: GPTModel, spec: Spec) -> None:
    """Weights by global name. Rows past the true vocabulary get large ones, so that whoever reads them shows."""
    for local, parameter in model.named_parameters():
        name = global_name(model, local)
        dim, index, count = shard_of(name, parameter)
        shape = list(parameter.shape)
        if dim >= 0:
            shape[dim] *= count
        rows = shape[0]
        if name in VOCABULARY_PARAMETERS:
            shape[0] = spec.vocab_size
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
        if 'norm' in name and name.endswith('weight'):
            whole = 1 + 0.1 * whole
        if shape[0] < rows:
            whole = torch.cat((whole, whole.new_full((rows - shape[0], *shape[1:]), 3.0)))
        parameter.copy_(whole.chunk(count, dim)[index] if dim >= 0 else whole)


def batches(
    spec: Spec, micro_batches: int, rank: int = 0, rows: int = 2, length: int = 16, seed: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of data-parallel rank `rank`: `tokens`, `labels`, `loss_mask`, `position_ids` of `[rows, length]`.

    The share of trained tokens runs from 15% to 90%, so that every kind of mean over them differs.
    """
    for index in range(micro_batches):
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * rank + index)
        tokens = torch.randint(0, spec.vocab_size, (rows, length + 1), generator=generator)
        density = 0.15 + 0.25 * ((rank + 2 * index) % 4)
        mask = torch.rand(rows, length, generator=generator) < density
        mask[0, 0] = True
        yield {
            'tokens': tokens[:, :-1].contiguous().to(device()),
            'labels': tokens[:, 1:].contiguous().to(device()),
            'loss_mask': mask.to(device(), torch.float64),
            'position_ids': torch.arange(length, device=device()).expand(rows, length).contiguous(),
        }
