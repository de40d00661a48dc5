"""A small GPT of Megatron-Core, split as the options say, with Megatron's data parallel wrapper, Adam and schedule."""

from __future__ import annotations

import argparse
import math
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig


def build(args: argparse.Namespace, vocab_size: int) -> tuple[DistributedDataParallel, Any, OptimizerParamScheduler]:
    """This rank's chunk of the model, its optimizer and its learning rate schedule. Needs the model-parallel groups."""
    model_parallel_cuda_manual_seed(args.seed)
    config = _config(args)
    # Megatron wants an equal share of the vocabulary on each rank: the rows past the true size are padding.
    multiple = 128 * args.tp
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization='RMSNorm'),
        vocab_size=-(-vocab_size // multiple) * multiple,
        max_sequence_length=args.seq_length,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        position_embedding_type='rope',
        share_embeddings_and_output_weights=False,
    )
    init_weights(gpt, args.seed)
    if torch.cuda.is_available():
        gpt.cuda()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=args.lr, min_lr=args.lr / 10, weight_decay=args.weight_decay, clip_grad=args.clip_grad),
        [model],
    )
    warmup = math.ceil(args.warmup * args.steps)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr / (warmup + 1),
        max_lr=args.lr,
        min_lr=args.lr / 10,
        lr_warmup_steps=warmup,
        lr_decay_steps=max(args.steps, warmup + 1),
        lr_decay_style='cosine',
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.steps,
        wd_incr_style='constant',
    )
    return model, optimizer, scheduler


def _config(args: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.heads,
        ffn_hidden_size=4 * args.hidden_size,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=torch.float32,
        init_method_std=0.05,  # a narrow model learns faster from more than the usual 0.02
        add_bias_linear=False,
        normalization='RMSNorm',
        activation_func=F.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )


def init_weights(gpt: GPTModel, seed: int) -> None:
    """Normal weights, seeded by each parameter's name in the whole model, then cut: the same under every layout.

    Megatron's own initialisation draws other numbers on other layouts, so that no two of their loss curves could agree.
    """
    std = gpt.config.init_method_std
    for name, parameter in gpt.named_parameters():
        if parameter.dim() < 2:
            continue  # norms start at one
        size, dim = list(parameter.shape), getattr(parameter, 'partition_dim', -1)
        parallel = getattr(parameter, 'tensor_model_parallel', False)
        if parallel:
            size[dim] *= ps.get_tensor_model_parallel_world_size()
        into_residual = name.endswith(('linear_proj.weight', 'linear_fc2.weight'))
        scale = std / math.sqrt(2 * gpt.config.num_layers) if into_residual else std
        generator = torch.Generator().manual_seed(seed + zlib.crc32(_global_name(gpt, name).encode()))
        whole = torch.randn(size, generator=generator) * scale
        if parallel:
            whole = whole.chunk(ps.get_tensor_model_parallel_world_size(), dim)[ps.get_tensor_model_parallel_rank()]
        parameter.data.copy_(whole)


def _global_name(gpt: GPTModel, name: str) -> str:
    """`decoder.layers.0...` of a later pipeline stage becomes the layer's number in the whole model."""
    parts = name.split('.')
    if parts[:2] == ['decoder', 'layers']:
        parts[2] = str(gpt.decoder.layers[int(parts[2])].layer_number)
    return '.'.join(parts)
