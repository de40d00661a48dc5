"""Attention in plain torch for Megatron's local layer spec: context parallelism and packed rows without a GPU library.

    spec = cpu_layer_spec(num_experts=None, normalization='RMSNorm')      # keywords of get_gpt_layer_local_spec
    model = GPTModel(config, spec, ...)

It runs on CPU and on GPU alike; on a GPU Transformer Engine is the fast choice.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def cpu_layer_spec(**kwargs: Any) -> ModuleSpec:
    """Megatron's local layer spec with `CpuCoreAttention`; `kwargs` are those of `get_gpt_layer_local_spec`."""
    spec: Any = get_gpt_layer_local_spec(**kwargs)
    spec.submodules.self_attention.submodules.core_attention = CpuCoreAttention
    return spec


def zigzag_positions(cu_seqlens: torch.Tensor, cp: int, rank: int) -> torch.Tensor:
    """Global positions of the tokens that context parallel rank `rank` of `cp` holds, `[tokens / cp]`, int64.

    Each sequence `[cu_seqlens[i], cu_seqlens[i + 1])` is cut into `2 * cp` chunks, of which the rank holds number
    `rank` and number `2 * cp - 1 - rank`. ValueError where a length is not a multiple of `2 * cp`.
    """
    bounds, device = cu_seqlens.tolist(), cu_seqlens.device
    if cp == 1:
        return torch.arange(bounds[0], bounds[-1], device=device)
    parts = [torch.arange(0, device=device)]
    for start, stop in itertools.pairwise(bounds):
        chunk, rest = divmod(stop - start, 2 * cp)
        if rest:
            raise ValueError(
                f'every sequence must hold a multiple of 2 * context_parallel_size = {2 * cp} tokens, got '
                f'{stop - start} tokens in [{start}, {stop}); pad the sequences and give cu_seqlens_q_padded'
            )
        for number in (rank, 2 * cp - 1 - rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk, device=device))
    return torch.cat(parts)


class CpuCoreAttention(MegatronModule):
    """Scaled dot product attention `softmax(scale * q k^T) v` that knows context parallelism and packed rows.

    Query `[s, b, heads, d]`, key and value `[s, b, groups, d]`, result `[s, b, heads * d]`; packed rows come as
    `[tokens, heads, d]` with `packed_seq_params` and go as `[tokens, heads * d]`. Under context parallelism a rank
    holds the zigzag slice of each sequence (`zigzag_positions`); `cu_seqlens` count whole sequences. One all-gather of
    key and value forward, one reduce-scatter of their gradients backward; else no collective.

    `attention_mask` is boolean, True where a key is hidden, broadcastable to `[b, heads, s, s * cp]` with keys in
    global order, and is combined with the causal mask; together with packed rows it is refused. A query that sees no
    key gives zeros.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        _check(config, attention_type)
        cp_group: Any = getattr(pg_collection, 'cp', None) or parallel_state.get_context_parallel_group()
        self.cp_group = cp_group
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale  # None: 1 / sqrt(d)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        if attention_bias is not None:
            raise ValueError('attention_bias must be None: CpuCoreAttention adds no bias to its scores')
        packed = packed_seq_params is not None
        if packed and attention_mask is not None:
            raise ValueError('attention_mask must be None for packed rows: cu_seqlens say what a token sees')
        if packed:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        cu_seqlens, lengths = _sequences(packed_seq_params, key.size(0) * self.cp_group.size(), key.device)
        causal = 'causal' in (attn_mask_type or self.attn_mask_type).name
        mask = None
        if packed or attention_mask is not None or self.cp_group.size() > 1:
            positions = zigzag_positions(cu_seqlens, self.cp_group.size(), self.cp_group.rank())
            mask = _visible(positions, cu_seqlens, lengths, causal)
            key, value = self._gather(key, value, cu_seqlens)
            if attention_mask is not None:
                mask = mask & ~_checked_mask(attention_mask, query, key)
        out = self._attend(query, key, value, mask, causal and mask is None)
        return out.squeeze(1) if packed else out

    def _gather(
        self, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value of all context parallel ranks, in global order."""
        cp = self.cp_group.size()
        if cp == 1:
            return key, value
        order = torch.cat([zigzag_positions(cu_seqlens, cp, rank) for rank in range(cp)]).argsort()
        both = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=self.cp_group)[order]
        return both[..., : key.size(-1)], both[..., key.size(-1) :]

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        tracker: Any = get_cuda_rng_tracker() if dropout > 0 and not self.config.sequence_parallel else None
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with tracker.fork() if tracker is not None else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
        return out.permute(2, 0, 1, 3).flatten(2)


def _check(config: TransformerConfig, attention_type: str) -> None:
    if attention_type != 'self':
        raise ValueError(f"attention_type must be 'self' for CpuCoreAttention, got {attention_type!r}")
    if getattr(config, 'window_size', None) is not None:
        raise ValueError(f'config.window_size must be None for CpuCoreAttention, got {config.window_size}')
    softmax = getattr(config, 'softmax_type', 'vanilla')
    if softmax != 'vanilla':
        raise ValueError(f"config.softmax_type must be 'vanilla' for CpuCoreAttention, got {softmax!r}")


def _sequences(
    params: PackedSeqParams | None, tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where sequences start and end in storage, `[n + 1]`, and, where they are padded, their true lengths `[n]`."""
    if params is None:
        return torch.tensor([0, tokens], device=device), None
    true = params.cu_seqlens_q
    stored = true if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    if int(stored[-1]) > tokens:
        raise ValueError(
            f'cu_seqlens must count at most the {tokens} tokens of the packed row, got {int(stored[-1])} at its end; '
            'under context parallelism it counts whole sequences, not the slice of one rank'
        )
    if int(stored[-1]) < tokens:  # what follows the last sequence is a sequence of its own
        stored = torch.cat((stored, stored.new_tensor([tokens])))
        true = torch.cat((true, true[-1:] + stored[-1] - stored[-2]))
    return stored.to(device), (true.diff().to(device) if params.cu_seqlens_q_padded is not None else None)


def _visible(
    positions: torch.Tensor, cu_seqlens: torch.Tensor, lengths: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """`[queries, keys]`, True where the query at global `positions[i]` sees key `j`: its own sequence, up to itself."""
    keys = torch.arange(int(cu_seqlens[-1]), device=positions.device)
    sequence = torch.bucketize(keys, cu_seqlens[1:], right=True)
    visible = sequence[positions][:, None] == sequence
    if causal:
        visible &= positions[:, None] >= keys
    elif lengths is not None:
        visible &= keys - cu_seqlens[sequence] < lengths[sequence]
    return visible


def _checked_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    shape = (query.size(1), query.size(2), query.size(0), key.size(0))
    fits = mask.dim() == 4 and all(have in (1, want) for have, want in zip(mask.shape, shape))
    if mask.dtype != torch.bool or not fits:
        raise ValueError(
            f'attention_mask must be boolean, True where a key is hidden, and broadcastable to [b, heads, s, s * cp] = '
            f'{list(shape)}, got {mask.dtype} of shape {list(mask.shape)}'
        )
    return mask
