"""Builds what a `MegatronModel` is made of from a TransformerConfig: process groups, chunks, optimizer."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..arguments import reject_unknown
from ..padding import padded_vocab_size
from . import cpu


class Built(NamedTuple):
    """This rank's chunks, wrapped in Megatron's DDP, and their optimizer, where there is one."""

    chunks: list[Any]
    optimizer: Any


def build(
    config: Any,
    vocab_size: int,
    *,
    tp: int,
    pp: int,
    cp: int,
    vpp: int,
    ep: int,
    seed: int,
    layer_spec: Any,
    ddp: Any,
    optimizer: Any,
    value_head: bool,
    **model: Any,
) -> Built:
    """See `MegatronModel.from_config`."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    from .embedding import add_value_head

    _check(config, vocab_size, optimizer)
    known = ('max_sequence_length', 'position_embedding_type', 'rotary_base', 'rotary_percent', 'tied')
    reject_unknown(model, known, 'MegatronModel.from_config')
    _join_processes()
    _make_groups(config, tp, pp, cp, vpp, ep)
    config = _in_layout(config, tp, pp, cp, vpp, ep)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    spec = layer_spec or _layer_spec(config)
    tied = bool(model.pop('tied', False))
    settings = {
        'vocab_size': padded_vocab_size(vocab_size, tp),
        'max_sequence_length': 4096,
        'position_embedding_type': 'rope',
        'share_embeddings_and_output_weights': tied,
        **model,
    }
    chunks: list[Any] = []
    for stage in range(vpp):
        at = stage if vpp > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=at)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=at)
        ends = {'pre_process': first, 'post_process': last, 'vp_stage': at}
        chunk: Any = GPTModel(config, spec, mtp_block_spec=_mtp_spec(config, spec, at), **ends, **settings)
        if value_head:
            add_value_head(chunk)
        chunks.append(chunk.cuda() if torch.cuda.is_available() else chunk)
    if config.fp16 or config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    half = bool(config.fp16 or config.bf16)
    wanted = ddp or DistributedDataParallelConfig(
        grad_reduce_in_fp32=half,
        use_distributed_optimizer=bool(getattr(optimizer, 'use_distributed_optimizer', False)),
    )
    wrapped: list[Any] = [
        DistributedDataParallel(config, wanted, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    if optimizer is None:
        return Built(wrapped, None)
    if isinstance(optimizer, float | int):
        optimizer = OptimizerConfig(lr=float(optimizer), bf16=config.bf16, fp16=config.fp16)
    return Built(wrapped, get_megatron_optimizer(optimizer, wrapped))


def _check(config: Any, vocab_size: Any, optimizer: Any) -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not isinstance(config, TransformerConfig):
        raise ValueError(f'config must be a TransformerConfig of Megatron-Core, got {type(config).__name__}')
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ValueError(f'vocab_size must be an int >= 1, got {vocab_size!r}')
    rate = isinstance(optimizer, float | int) and not isinstance(optimizer, bool) and optimizer > 0
    if optimizer is not None and not rate and not isinstance(optimizer, OptimizerConfig):
        raise ValueError(
            f"optimizer must be Megatron's OptimizerConfig, a learning rate > 0, or None, got {optimizer!r}"
        )
    if not torch.cuda.is_available() and not cpu.installed():
        raise ValueError(
            'there is no GPU: call twinkle_megatron.megatron.cpu.install() first, which lets Megatron-Core run on CPU'
        )


def _join_processes() -> None:
    """torch.distributed as torchrun's environment says, or of this process alone."""
    if dist.is_initialized():
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', '0')))
    backend = 'nccl' if cuda else 'gloo'
    if 'RANK' in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _make_groups(config: Any, tp: int, pp: int, cp: int, vpp: int, ep: int) -> None:
    """Megatron's groups in that layout, where they are not there. ValueError for another layout than they have."""
    from megatron.core import parallel_state as ps

    hierarchical: Sequence[int] | None = config.hierarchical_context_parallel_sizes
    world, product = dist.get_world_size(), tp * pp * cp
    if world % product:
        raise ValueError(
            f'tp · pp · cp = {tp} · {pp} · {cp} = {product} must divide the {world} processes; start '
            f'{product} or a multiple of it, for example by torchrun --nproc-per-node {product}'
        )
    if hierarchical and math.prod(hierarchical) != cp:
        raise ValueError(
            f'config.hierarchical_context_parallel_sizes must have the product cp = {cp}, got {list(hierarchical)}'
        )
    if not ps.model_parallel_is_initialized():
        ps.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=_expert_tp(config),
            hierarchical_context_parallel_sizes=list(hierarchical) if hierarchical else None,
        )
        return
    there = (
        ps.get_tensor_model_parallel_world_size(),
        ps.get_pipeline_model_parallel_world_size(),
        ps.get_context_parallel_world_size(),
        ps.get_virtual_pipeline_model_parallel_world_size() or 1,
        ps.get_expert_model_parallel_world_size(),
    )
    if there != (tp, pp, cp, vpp, ep):
        raise ValueError(
            f'(tp, pp, cp, vpp, ep) must be those of the groups that Megatron has already, {there}, got '
            f'{(tp, pp, cp, vpp, ep)}'
        )


def _expert_tp(config: Any) -> int | None:
    """What the config asks for; None: as tp, which is the config's default of the size that it was made with."""
    wanted = config.expert_tensor_parallel_size
    return None if wanted == config.tensor_model_parallel_size else wanted


def _in_layout(config: Any, tp: int, pp: int, cp: int, vpp: int, ep: int) -> Any:
    """The config for that layout, checked by Megatron again."""
    changes: dict[str, Any] = {
        'tensor_model_parallel_size': tp,
        'pipeline_model_parallel_size': pp,
        'virtual_pipeline_model_parallel_size': vpp if vpp > 1 else None,
        'context_parallel_size': cp,
        'expert_model_parallel_size': ep,
        'expert_tensor_parallel_size': _expert_tp(config) or tp,
    }
    if getattr(config, 'microbatch_group_size_per_vp_stage', None) == config.pipeline_model_parallel_size:
        changes['microbatch_group_size_per_vp_stage'] = pp  # Megatron's default, which it took from the old size
    if pp > 1 and config.pipeline_dtype is None:
        changes['pipeline_dtype'] = config.params_dtype
    return dataclasses.replace(config, **changes)


def _mtp_spec(config: Any, layer_spec: Any, vp_stage: int | None) -> Any:
    """Of the multi-token prediction that the config asks for, where this chunk has it; else None."""
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    engine = torch.cuda.is_available() and _has_transformer_engine()
    return get_gpt_mtp_block_spec(config, layer_spec, use_transformer_engine=engine, vp_stage=vp_stage)


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec('transformer_engine') is not None


def _layer_spec(config: Any) -> Any:
    """Transformer Engine's layers where that is installed, on CPU those of this package, else Megatron's local ones."""
    if not torch.cuda.is_available():
        from .cpu_attention import cpu_layer_spec

        return cpu_layer_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    from megatron.core.models.gpt import gpt_layer_specs

    if _has_transformer_engine():
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(num_experts=config.num_moe_experts)
    return gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization=config.normalization
    )
