"""Features of Megatron-Core that this package cannot go together with, refused before a schedule starts.

docs/compatibility.md has the whole table. What is read here is the same on every rank, and so is the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

SHARDING = frozenset({'FullyShardedDataParallel', 'MegatronFSDP', 'TorchFullyShardedDataParallel', 'FSDPModule'})
"""Classes that shard parameters over data parallel ranks: Megatron-FSDP, and torch's FSDP of both kinds."""


def check_features(config: Any) -> None:
    """ValueError for a TransformerConfig under which the hooks on a model, or its gradients, would go wrong."""
    graph = _full_iteration_graph(config)
    if graph is not None:
        raise ValueError(
            f'{graph} replays the kernels of one iteration and runs no Python code: counts of tokens, keywords of the '
            'loss, metrics and errors would stay those of the iteration that was captured; use CUDA graphs of layers, '
            'or none'
        )
    if getattr(config, 'overlap_moe_expert_parallel_comm', False):
        raise ValueError(
            'config.overlap_moe_expert_parallel_comm=True runs the layers one by one instead of the forward of the '
            'model, and cuts the loss off from the logits, so that labels and loss_mask are not seen and gradients not '
            'passed on; set it to False'
        )
    if getattr(config, 'hybrid_context_parallel', False):
        raise ValueError(
            'config.hybrid_context_parallel=True gives each sequence a context parallel group of its own size, but '
            'slices and sums here are over the one group of config.context_parallel_size; set it to False '
            '(hierarchical_context_parallel_sizes is another thing, and may be set)'
        )


def check_not_sharded(chunks: Iterable[Any]) -> None:
    """ValueError for chunks whose parameters are sharded over data parallel ranks."""
    for chunk in chunks:
        found = sharding_of(chunk)
        if found is not None:
            raise ValueError(
                f'chunks must not be sharded by {found}: MegatronModel scales, accumulates and zeroes gradients in the '
                "buffers of Megatron's DistributedDataParallel, which FSDP has not; wrap each chunk in that, with "
                'use_distributed_optimizer=True to save memory, or keep FSDP and your own schedule and use attach with '
                "head='logits'"
            )


def check_reference(config: Any, adapter_off: bool) -> None:
    """ValueError where a model's own chunks cannot compute the reference: with the adapter switched off, or else with a
    copy of the weights, after which its own have to come back to the bit."""
    graphs = getattr(config, 'cuda_graph_impl', None) or 'none'
    if adapter_off and graphs != 'none':
        raise ValueError(
            f"adapter_off changes nothing in layers that CUDA graphs (config.cuda_graph_impl='{graphs}') replay as "
            'they were captured, with the adapter; give the reference chunks of its own, or set '
            "cuda_graph_impl='none'"
        )
    for name in ('fp8_param', 'fp4_param'):
        if not adapter_off and getattr(config, name, False):
            raise ValueError(
                f'reference() keeps a copy of the weights and gives them back to the bit, which config.{name}=True, '
                'weights that are stored scaled and rounded, does not promise; give the reference chunks of its own, '
                f'or adapter_off, or set {name}=False'
            )


def check_saved_as_cut(sharded: Mapping[str, Any], tp: int) -> None:
    """ValueError for a weight of a chunk's sharded state dict that is cut over `tp` ranks and would be saved as if each
    rank held all of it, so that the part of one would come back on all: so it is with a layer in an adapter that tells
    Megatron nothing of itself."""
    for name, part in sharded.items():
        weight = getattr(part, 'data', None)
        dim = getattr(weight, 'partition_dim', -1)
        cut = getattr(weight, 'tensor_model_parallel', False) and dim >= 0 and '.experts.' not in name  # by their own
        pieces = getattr(part, 'axis_fragmentations', None)
        if tp > 1 and cut and pieces is not None and pieces[dim + part.prepend_axis_num] == 1:
            raise ValueError(
                f'{name} is cut over {tp} tensor parallel ranks, but its module would save it as if each rank held all '
                'of it; give the module that wraps it (an adapter?) a sharded_state_dict(prefix, sharded_offsets, '
                "metadata) that calls that of Megatron's layer, and says of its own weights how they are cut"
            )


def sharding_of(chunk: Any) -> str | None:
    """What shards the parameters of a chunk over data parallel ranks, with the setting that asked for it; or None."""
    module = chunk
    while module is not None:
        if getattr(getattr(module, 'ddp_config', None), 'use_megatron_fsdp', False):
            return 'Megatron-FSDP (ddp_config.use_megatron_fsdp=True)'
        names = SHARDING.intersection(each.__name__ for each in type(module).__mro__)
        if names:
            return min(names)
        module = getattr(module, 'module', None)
    return None


def why_not_plain(weight: Any) -> str | None:
    """What keeps a weight from being multiplied as it lies in memory: FP8, FP4, or a part of it elsewhere."""
    if hasattr(weight, '__fsdp_param__') or getattr(weight, 'is_torch_fsdp2_param', False):
        return 'the weight of the output layer is sharded over data parallel ranks (FSDP), and there only at times'
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.dtype not in floats:
        return (
            f'the weight of the output layer is no plain tensor of floats but {type(weight).__name__} of '
            f'{weight.dtype}, as where it is stored in FP8 (config.fp8_param) or sharded'
        )
    return None


def _full_iteration_graph(config: Any) -> str | None:
    """The setting that asks for one CUDA graph of the iteration: an implementation from 0.18 on, a scope before."""
    implementation = getattr(config, 'cuda_graph_impl', None)
    if implementation == 'full_iteration':
        return "config.cuda_graph_impl='full_iteration'"
    scopes = getattr(config, 'cuda_graph_scope', None) or ()
    several = scopes if isinstance(scopes, (list, tuple)) else [scopes]
    if implementation in (None, 'none') or all(getattr(s, 'name', s) != 'full_iteration' for s in several):
        return None
    return "config.cuda_graph_scope='full_iteration'"
