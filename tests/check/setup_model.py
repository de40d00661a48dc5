"""A setup file of `python -m twinkle_megatron.check`: a small GPT; what is wrong with it stands in the environment."""

from __future__ import annotations

import math
import os
import time

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from twinkle_megatron import MegatronModel

VOCABULARY = 61
FAULT = os.environ.get('FAULT', '')


def of_the_slice(inputs, outputs):
    """Looks at its slice as if that were the sequence."""
    return (outputs['logps'].sum() / inputs['labels'].shape[1]) ** 2


def build(tp, pp, cp, vpp, ep):
    if FAULT == 'slow':
        time.sleep(60)
    if FAULT == 'value':
        raise ValueError('no such size')
    if FAULT == 'raises':
        raise KeyError('no such weights')
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        hidden_dropout=0.1 if FAULT == 'dropout' else 0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        gradient_accumulation_fusion=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization='RMSNorm',
    )
    model = MegatronModel.from_config(config, VOCABULARY, tp=tp, pp=pp, cp=cp, vpp=vpp, ep=ep)
    model.set_loss(of_the_slice if FAULT == 'loss' else 'cross_entropy')
    model.add_metric('accuracy')
    for chunk in model.chunks:
        _break(chunk.module, dist.get_world_size() > 1)
    return model if FAULT != 'chunks' else model.chunks


def _break(gpt, in_layout):
    for layer in gpt.decoder.layers:
        if FAULT == 'layer' and layer.layer_number == 3 and in_layout:
            layer.register_forward_hook(lambda module, arguments, out: (out[0] * 1.01, *out[1:]))
        if FAULT == 'gradient' and layer.layer_number == 2 and in_layout:
            layer.mlp.linear_fc1.weight.register_hook(lambda gradient: gradient * 1.01)
        if FAULT == 'weight' and layer.layer_number == 1 and dist.get_rank() == dist.get_world_size() - 1:
            layer.input_layernorm.weight.data[3] += 0.5
        if FAULT == 'nan' and layer.layer_number == 2:
            layer.mlp.linear_fc2.weight.data[0, 0] = math.nan


def batch(dp_rank, dp_size):
    """Four micro-batches of two rows with unequal numbers of trained tokens."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for number in range(4):
        ids = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
        labels = ids.roll(-1, 1)
        labels[:, -1 - number :] = -100
        inputs.append({'input_ids': ids, 'labels': labels})
    own = inputs[dp_rank::dp_size]
    return (own, {'max_tokens_per_micro_batch': 32}) if FAULT == 'budget' else own
