"""A small GPT of Megatron-Core, split as the options say, with Megatron's data parallel wrapper, Adam and schedule."""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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

from launch import hf_model, weights
from launch.datasets.about import About
from twinkle_megatron.groups import Groups
from twinkle_megatron.megatron.cpu_attention import cpu_layer_spec
from twinkle_megatron.padding import padded_vocab_size

_BY_VOCABULARY = ('embedding.word_embeddings.weight', 'output_layer.weight')


def build(args: argparse.Namespace, vocab_size: int) -> tuple[DistributedDataParallel, Any, OptimizerParamScheduler]:
    """This rank's chunk of the model, its optimizer and its learning rate schedule. Needs the model-parallel groups."""
    model_parallel_cuda_manual_seed(args.seed)
    gpt = _gpt(args, vocab_size)
    model = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=args.lr, min_lr=args.lr / 10, weight_decay=args.weight_decay, clip_grad=args.clip_grad),
        [model],
    )
    return model, optimizer, _scheduler(args, optimizer)


def frozen(args: argparse.Namespace, path: Path) -> GPTModel:
    """This rank's chunk of the model in a file of weights, whatever its sizes, in the layout of the options. It is not
    to be trained."""
    about = weights.read_about(path)
    sizes = {'layers': about.layers, 'hidden_size': about.hidden_size, 'heads': about.heads, 'init_weights': path}
    return _gpt(argparse.Namespace(**(vars(args) | sizes)), about.vocab_size).requires_grad_(False)


def _gpt(args: argparse.Namespace, vocab_size: int) -> GPTModel:
    if args.init_weights is not None and args.init_weights.is_dir():
        return hf_model.chunk(args.init_weights)
    layer_spec = cpu_layer_spec if args.packed else get_gpt_layer_local_spec  # the latter knows no packed rows
    # Megatron wants an equal share of the vocabulary on each rank: the rows past the true size are padding.
    gpt = GPTModel(
        _config(args),
        layer_spec(normalization='RMSNorm'),
        vocab_size=padded_vocab_size(vocab_size, args.tp),
        max_sequence_length=args.seq_length,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        position_embedding_type='rope',
        share_embeddings_and_output_weights=False,
    )
    if args.init_weights is None:
        init_weights(gpt, args.seed)
    else:
        load_weights(gpt, weights.read(args.init_weights))
    return gpt.cuda() if torch.cuda.is_available() else gpt


def _scheduler(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    warmup = math.ceil(args.warmup * args.steps)
    return OptimizerParamScheduler(
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


class Piece(NamedTuple):
    """A parameter of this rank: its name and shape in the whole model, and the dim that tensor parallel ranks cut."""

    name: str
    parameter: torch.nn.Parameter
    whole: list[int]
    dim: int | None

    def take(self, whole: torch.Tensor) -> None:
        """Fills the parameter with its slice of the whole tensor."""
        if self.dim is not None:
            whole = whole.chunk(ps.get_tensor_model_parallel_world_size(), self.dim)[
                ps.get_tensor_model_parallel_rank()
            ]
        self.parameter.data.copy_(whole)


def pieces(gpt: Any) -> Iterator[Piece]:
    """The parameters of this rank's GPTModel."""
    for name, parameter in gpt.named_parameters():
        whole, dim = list(parameter.shape), None
        if getattr(parameter, 'tensor_model_parallel', False):
            dim = int(getattr(parameter, 'partition_dim', 0))
            whole[dim] *= ps.get_tensor_model_parallel_world_size()
        yield Piece(_global_name(gpt, name), parameter, whole, dim)


def init_weights(gpt: Any, seed: int) -> None:
    """Normal weights, seeded by each parameter's name in the whole model, then cut: the same under every layout.

    Megatron's own initialisation draws other numbers on other layouts, so that no two of their loss curves could agree.
    """
    std = gpt.config.init_method_std
    for piece in pieces(gpt):
        if len(piece.whole) < 2:
            continue  # norms start at one
        into_residual = piece.name.endswith(('linear_proj.weight', 'linear_fc2.weight'))
        scale = std / math.sqrt(2 * gpt.config.num_layers) if into_residual else std
        generator = torch.Generator().manual_seed(seed + zlib.crc32(piece.name.encode()))
        piece.take(torch.randn(piece.whole, generator=generator) * scale)


def load_weights(gpt: Any, tensors: Mapping[str, np.ndarray]) -> None:
    """Fills the model with its slices of whole tensors by name. ValueError where one is not there or of another
    shape."""
    for piece in pieces(gpt):
        tensor = torch.from_numpy(tensors[piece.name]) if piece.name in tensors else torch.empty(0)
        if piece.name in _BY_VOCABULARY and len(tensor) < piece.whole[0]:
            tensor = F.pad(tensor, (0, 0, 0, piece.whole[0] - len(tensor)))  # Megatron's padding, which nothing reads
        if list(tensor.shape) != piece.whole:
            raise ValueError(f'the weights must hold {piece.name} of shape {piece.whole}, got {list(tensor.shape)}')
        piece.take(tensor)


def save_weights(args: argparse.Namespace, chunk: Any, vocab_size: int, tokenizer: str) -> None:
    """Writes the model to `args.save_weights` or `args.save_model`, if one says where. Collective."""
    if args.save_model is not None:
        hf_model.save(args, chunk)
    if args.save_weights is None:
        return
    tensors = whole_tensors(chunk.module, vocab_size)
    if torch.distributed.get_rank() == 0:
        about = About(args.layers, args.hidden_size, args.heads, vocab_size, tokenizer)
        weights.save(args.save_weights, tensors, about)


def whole_tensors(gpt: Any, vocab_size: int) -> dict[str, np.ndarray]:
    """The whole model by name, without the padding of the vocabulary, the same on every rank. Collective."""
    first = ps.get_data_parallel_rank() == 0
    mine = [(piece.name, piece.dim, piece.parameter.detach().cpu().numpy()) for piece in pieces(gpt)] if first else []
    slices: dict[str, list[tuple[int, int | None, np.ndarray]]] = {}
    for rank, held in Groups.from_megatron().gather_objects((ps.get_tensor_model_parallel_rank(), mine)):
        for name, dim, array in held:
            slices.setdefault(name, []).append((rank, dim, array))
    whole = {}
    for name, parts in slices.items():
        _, dim, array = min(parts, key=lambda part: part[0])
        if dim is not None:
            array = np.concatenate([part[2] for part in sorted(parts, key=lambda part: part[0])], dim)
        whole[name] = array[:vocab_size] if name in _BY_VOCABULARY else array
    return whole


def _global_name(gpt: Any, name: str) -> str:
    """`decoder.layers.0...` of a later pipeline stage becomes the layer's number in the whole model."""
    parts = name.split('.')
    if parts[:2] == ['decoder', 'layers']:
        parts[2] = str(gpt.decoder.layers[int(parts[2])].layer_number)
    return '.'.join(parts)
