"""mbridge's conversion of weights, for the layers of Megatron's local spec and on CPU too.

mbridge 0.15 writes its tables for the layers of Transformer Engine. The local spec has the same parameters, and only
the norms before a linear layer are modules of their own: `TE_NAMES` tells what they are called there.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch

from . import cpu
from ._cpu_torch import TORCH
from .hf_config import package, padded, rotary

TE_NAMES = {
    '.input_layernorm.weight': '.self_attention.linear_qkv.layer_norm_weight',
    '.pre_mlp_layernorm.weight': '.mlp.linear_fc1.layer_norm_weight',
}
"""Ends of names in the local spec, and what Transformer Engine calls the same parameter."""

# What the options of mbridge, made for GPUs with Transformer Engine, become here.
_SETTINGS = {
    'sequence_parallel': False,
    'masked_softmax_fusion': False,
    'gradient_accumulation_fusion': False,
    'bias_activation_fusion': False,
    'bias_dropout_fusion': False,
    'apply_rope_fusion': False,
    'calculate_per_token_loss': True,
}


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """Initialises nothing: every weight is read. Megatron's own switch for that leaves out which dim is cut, too."""
    return weight


_INITS = dict.fromkeys(('init_method', 'output_layer_init_method', 'embedding_init_method'), _leave)


def te_name(name: str) -> str:
    """What a parameter of either layer spec is called in that of Transformer Engine."""
    for end, other in TE_NAMES.items():
        if name.endswith(end):
            return name.removesuffix(end) + other
    return name


def bridge_for(config: Any, folder: Path, dtype: torch.dtype, **changes: Any) -> Any:
    """mbridge's bridge between the checkpoint in a folder and Megatron's current groups. `changes`: of the
    TransformerConfig."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # it tells what of Transformer Engine and Apex is not there
        package('mbridge')
    if not torch.cuda.is_available():
        # It broadcasts to torch.cuda.current_device(); here that is the CPU, as it is for Megatron's own modules.
        package('mbridge.core.util').torch = TORCH
    bridge = _class_for(config.model_type)(_as_mbridge_reads(config), dtype=dtype)
    bridge.folder = folder
    own = {**_SETTINGS, **_INITS, 'use_cpu_initialization': not torch.cuda.is_available()}
    bridge.set_extra_args(**(own | changes))
    bridge.vocab_size = config.vocab_size
    bridge.padded_vocab_size = padded(config.vocab_size, bridge.mpu.tp_size)
    bridge.make_vocab_size_divisible_by = bridge.padded_vocab_size
    return bridge


def chunks_of(bridge: Any) -> list[Any]:
    """This rank's chunks, with weights that are yet to be read."""
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    tracker: Any = get_cuda_rng_tracker()
    if not tracker.get_states():
        model_parallel_cuda_manual_seed(1234)  # on a GPU Megatron asks for a seed even where it draws nothing
    provide, found = bridge._model_provider([]), []
    for stage in range(bridge.mpu.vpp_size or 1):
        at = stage if bridge.mpu.vpp_size else None
        first = ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=at)
        last = ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=at)
        chunk = provide(pre_process=first, post_process=last, vp_stage=at)
        found.append(chunk.cuda() if torch.cuda.is_available() else chunk)
    return found


def names_of(bridge: Any, chunks: list[Any]) -> set[str]:
    """The tensors of the checkpoint that this rank's chunks are made of. ValueError for a parameter that it has not."""
    found: set[str] = set()
    for chunk in chunks:
        for name, known in bridge._weight_name_mapping_mcore_local_to_global(chunk).items():
            try:
                found.update(bridge._weight_name_mapping_mcore_to_hf(known))
            except (NotImplementedError, IndexError):
                raise ValueError(
                    f'chunks have a parameter that the checkpoint has no place for: {name}; were they made by '
                    'load_chunks, and are there adapters or a value head?'
                ) from None
    return found


def _class_for(model_type: str) -> type:
    """mbridge's class for that kind of model, adapted."""
    return type('LocalBridge', (_Local, package('mbridge.core.bridge')._MODEL_REGISTRY[model_type]), {})


def _as_mbridge_reads(config: Any) -> Any:
    """A copy with the attributes that it had in `transformers` 4."""
    config = copy.deepcopy(config)
    config.rope_theta = rotary(config)['rope_theta']
    if getattr(config, 'head_dim', None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


class _Local:
    """Goes before a class of mbridge."""

    hf_config: Any
    config: Any
    folder: Path
    _DIRECT_MAPPING: dict[str, str]

    def _adjust_mapping_for_shared_weights(self) -> None:
        """mbridge changes the table of its class, and with it that of every other model, and Llama has no such step."""
        tied = getattr(self.hf_config, 'tie_word_embeddings', False)
        output = 'model.embed_tokens.weight' if tied else 'lm_head.weight'
        self._DIRECT_MAPPING = {**self._DIRECT_MAPPING, 'output_layer.weight': output}

    def _get_gptmodel_args(self) -> dict[str, Any]:
        """Without scaled rotary embeddings, which mbridge takes all to be linear."""
        return {
            'vocab_size': self.hf_config.vocab_size,
            'max_sequence_length': self.hf_config.max_position_embeddings,
            'position_embedding_type': 'rope',
            'rotary_base': self.hf_config.rope_theta,
        }

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        """Layers of Transformer Engine where that is installed, else those of this package, on CPU and GPU."""
        self.has_vp_stage = True
        if not cpu.installed() and importlib.util.find_spec('transformer_engine') is not None:
            return super()._get_transformer_layer_spec(vp_stage)  # type: ignore[misc]
        from .cpu_attention import cpu_layer_spec

        return cpu_layer_spec(normalization='RMSNorm', qk_layernorm=self.config.qk_layernorm)

    def _weight_name_mapping_mcore_local_to_global(self, model: Any, consider_ep: bool = True) -> dict[str, str]:
        """Names of this rank's parameters, and what Transformer Engine calls them in the whole model."""
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep)  # type: ignore[misc]
        return {name: te_name(whole) for name, whole in names.items()}

    def _get_actual_hf_path(self, weight_path: str) -> str:
        return str(weight_path)  # mbridge would ask the hub
