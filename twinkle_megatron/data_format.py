"""The dictionaries that losses and metrics exchange, under Twinkle's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch

if TYPE_CHECKING:
    from .vocab_parallel import Logits, TokenStats, VocabShard


class InputFeature(TypedDict, total=False):
    """One micro-batch (2-D tensors `[b, s]`) or one sample (1-D, `[s]`).

    `labels` are already shifted (`batch.shift_labels` does that): `labels[..., i]` is the token that the logits at
    position `i` must predict; -100 is ignored. A token with `completion_mask` 0 is ignored too; the mask is aligned
    with the labels.

    A packed row `[1, T]` holds several sequences, as `position_ids` that restart at 0 say, or `cu_seqlens` `[n + 1]`
    (with `cu_seqlens_padded` where each sequence is followed by padding of its own), or Megatron's
    `packed_seq_params`. A loss that `MegatronModel` calls finds `sequence_ids` `[b, s]`, the number of each token's
    sequence in the micro-batch, and `sequence_tokens` `[n]`, how many trained tokens each has, of all context parallel
    ranks.

    Of losses of embeddings and of values, `labels` are one entry a sequence (`[b]`, `[n]` of a packed row, a number
    beside a sample), or numbers in the place of ids; padding may be on either side there.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    completion_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor
    packed_seq_params: Any
    sequence_ids: torch.Tensor
    sequence_tokens: torch.Tensor
    length: int


class ModelOutput(TypedDict, total=False):
    """What the model hands to a loss and to the metrics.

    `logits` are `[..., V/tp]`, this rank's vocabulary shard, described by `vocab_shard`; a tensor, or a `LinearHead`
    that never builds them. `token_stats` holds what one
    sweep over those logits found for the aligned labels; `logps` and `entropies` are `[...]` in nats. `embeddings`
    `[n, D]` and `values` `[n]` or `[b, s]` are what a head gives in place of logits.
    """

    logits: Logits
    logps: torch.Tensor
    entropies: torch.Tensor
    vocab_shard: VocabShard
    token_stats: TokenStats
    embeddings: torch.Tensor
    values: torch.Tensor
    loss: Any
    num_tokens: Any


class LossOutput(TypedDict):
    """What a loss returns: `num_tokens` 0 says that `loss` is a finished mean, above 0 that it is a sum over that many
    tokens."""

    loss: torch.Tensor
    num_tokens: torch.Tensor | int
