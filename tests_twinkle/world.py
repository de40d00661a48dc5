"""Twinkle's real `MegatronModel` around a tiny real GPT, on gloo.

Its constructor builds the model through mcore-bridge, which needs Transformer Engine, so what it sets is set here;
everything after it is Twinkle's own code.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from tiny_gpt import Layout, Spec, build, initialize, wrap
from torch import nn
from twinkle import DeviceMesh, Platform
from twinkle.loss import CrossEntropyLoss
from twinkle.model.megatron.megatron import MegatronModel, MegatronOptimizerGroup
from twinkle.model.megatron.strategy import MegatronStrategy
from twinkle.model.megatron.strategy.megatron import finalize_model_grads_for_lora
from twinkle.processor import InputProcessor

logging.getLogger('twinkle').setLevel(logging.ERROR)
Platform.get_local_device = staticmethod(lambda *args, **kwargs: 'cpu')


class ForTwinkle(GPTModel):
    """Takes what Twinkle hands to a model: its own packing parameters, positions -1 in padding, a dense mask that
    attention under context parallelism cannot read (and does not need, with padding on the right)."""

    values = False

    def forward(
        self, input_ids: Any, position_ids: Any, attention_mask: Any = None, packed_seq_params: Any = None
    ) -> Any:
        if packed_seq_params is not None:
            cu, longest = packed_seq_params.cu_seqlens_q, int(packed_seq_params.max_seqlen_q)
            packed_seq_params = PackedSeqParams('thd', cu, cu, None, None, longest, longest)
        out = super().forward(input_ids, position_ids.clamp(min=0), None, packed_seq_params=packed_seq_params)
        return out[..., :1].contiguous() if self.values and self.post_process else out


def twinkle_model(spec: Spec, layout: Layout, padding_free: bool = False, bare: bool = False) -> MegatronModel:
    """On every rank. `bare` as Twinkle itself does with one process: without Megatron's DDP."""
    os.environ['RANK'], os.environ['WORLD_SIZE'] = str(dist.get_rank()), str(dist.get_world_size())  # as torchrun does
    initialize(layout)
    chunks = build(spec, layout)
    for chunk in chunks:
        chunk.__class__ = ForTwinkle
    config = chunks[0].config
    config.variable_seq_lengths = True
    if not bare:
        chunks = wrap(chunks)
    config.finalize_model_grads_func = _finalize
    mesh = DeviceMesh.from_sizes(
        world_size=layout.world, dp_size=layout.dp, tp_size=layout.tp, pp_size=layout.pp, cp_size=layout.cp,
        device_type='cpu', sequence_parallel=layout.sp,
    )  # fmt: skip
    # Twinkle has each rank create its own group only: where there are several, gloo mixes them up and may hang
    mesh.create_process_group = lambda dims: parallel_state.get_data_parallel_group()
    model = MegatronModel.__new__(MegatronModel)
    nn.Module.__init__(model)
    model.device_mesh, model.variable_seq_lengths, model.model = mesh, True, chunks
    model._model_wrapped, model._finish_config = True, False
    model.mixed_precision, model.use_distributed_optimizer = 'no', False
    strategy = MegatronStrategy.__new__(MegatronStrategy)
    strategy.device_mesh, strategy.config, strategy.variable_seq_lengths = mesh, config, True
    strategy.ddp_config = {'overlap_grad_reduce': False, 'overlap_param_gather': False, 'align_param_gather': False}
    model.strategy = strategy
    processor = InputProcessor(mesh, framework='megatron', padding_free=padding_free)
    processor.device_mesh, processor.padding_free, processor.framework = mesh, padding_free, 'megatron'
    group = MegatronOptimizerGroup(
        loss_instance=CrossEntropyLoss(reduction='sum'), template=None, processor=processor, _device_mesh=mesh
    )
    group.adapter_name = ''
    model.optimizer_group, model.active_group = {'': group}, ''
    return model


def _finalize(model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Twinkle's, dividing by the number of tokens in float64: the inverse of an int tensor would be float32."""
    finalize_model_grads_for_lora(model, None if num_tokens is None else num_tokens.double(), **kwargs)


def replica_of(model: MegatronModel) -> int:
    return model.device_mesh.dp_rank or 0


def zero(model: MegatronModel) -> None:
    for chunk in model.model:
        if hasattr(chunk, 'zero_grad_buffer'):
            chunk.zero_grad_buffer()
        else:
            chunk.zero_grad()
    dist.barrier()
