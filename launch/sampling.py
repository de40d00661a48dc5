"""Sampling from the model under any layout, by forward passes of `MegatronModel`: slow for large models, and exact.

The tokens come from the very distribution that a loss at the same temperature sees, by the same operation on the same
shards of logits, so that a first training step finds ratios of 1 up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from twinkle_megatron import MegatronModel
from twinkle_megatron.groups import group_rank, group_size
from twinkle_megatron.vocab_parallel import VocabShard, argmax, log_probs


@dataclass
class Completion:
    """Token ids that were sampled after a prompt, and the log-prob of each, nats at the temperature."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class NextToken:
    """Stands where a loss stands, and draws the token that follows each row, from softmax(logits / temperature).

    It draws the largest of logits / temperature + Gumbel noise, in float64. The noise of a token depends on the seed,
    the sample and the place alone, so that every layout draws the same, up to ties in rounding.
    """

    def __init__(self, seed: int, temperature: float, vocab_size: int) -> None:
        self.temperature, self._seed, self._vocab_size = temperature, seed, vocab_size
        self.drawn: list[Tensor] = []

    def __call__(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], places: Tensor) -> Tensor:
        """`places` `[rows, 2]`: the number of the sample and of the token within its completion."""
        rows = torch.arange(len(places))  # a pipeline may have added others
        last = inputs['attention_mask'][rows].sum(1) - 1
        logits = outputs['logits'][rows, last]
        shard: VocabShard = outputs['vocab_shard']
        noise = torch.stack([self._gumbel(sample, place) for sample, place in places.tolist()])
        scores = logits.double() / self.temperature
        real = max(min(shard.stop, self._vocab_size) - shard.start, 0)  # what follows is padding, and never drawn
        scores[:, :real] += noise[:, shard.start : shard.start + real].to(scores.device)
        tokens = argmax(scores, shard=shard)
        found = log_probs(logits, tokens, shard=shard, temperature=self.temperature)
        self.drawn.append(torch.stack([tokens.double(), found.double()], 1).cpu())
        return logits.new_zeros(())

    def _gumbel(self, sample: int, place: int) -> Tensor:
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, 0, sample, place]))
        return torch.from_numpy(generator.gumbel(size=self._vocab_size))


def sample_completions(
    model: MegatronModel,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    seed: int,
    stop: frozenset[int],
    max_tokens: int,
    micro_batch_size: int,
    said: Callable[[str], None] = lambda text: None,
) -> list[Completion]:
    """A completion of each prompt, up to a token of `stop`, which belongs to it, or of `max_tokens`.

    The prompts are dealt out to the data parallel replicas; every rank gets all completions. `said` is told of the
    progress. Collective.
    """
    assert model.vocab_size is not None
    head = NextToken(seed, temperature, model.vocab_size)
    model.set_loss(head)
    mine = range(group_rank(model.groups.dp), len(prompts), group_size(model.groups.dp))
    found = {i: Completion() for i in mine}
    for place in range(max_tokens):
        open_ones = [i for i in mine if not stop.intersection(found[i].tokens[-1:])]
        open_ones.sort(key=lambda i: len(prompts[i]))  # rows of a micro-batch are padded to the longest
        rows = [torch.tensor([*prompts[i], *found[i].tokens]) for i in open_ones]
        inputs = [{'input_ids': row, 'labels': torch.full_like(row, -100)} for row in rows]
        head.drawn = []
        places = torch.tensor([[i, place] for i in open_ones]).reshape(-1, 2)
        model.forward_only(inputs=inputs, micro_batch_size=micro_batch_size, places=places)
        for i, (token, log_prob) in zip(open_ones, _of_last_stage(model, head.drawn, len(open_ones)).tolist()):
            found[i].tokens.append(int(token))
            found[i].log_probs.append(log_prob)
        said(f'token {place + 1} of at most {max_tokens}, {len(open_ones):,} of {len(mine):,} completions still open')
    for other in model.groups.gather_objects(found):
        found |= other
    return [found[i] for i in range(len(prompts))]


def _of_last_stage(model: MegatronModel, drawn: list[Tensor], rows: int) -> Tensor:
    """What the last pipeline stage has drawn, `[rows, 2]`, on all stages."""
    pp = model.groups.pp
    found = torch.cat(drawn) if drawn else torch.zeros(rows, 2, dtype=torch.float64)
    if group_size(pp) == 1 or rows == 0:
        return found
    device = torch.device('cuda') if 'nccl' in dist.get_backend(pp) else torch.device('cpu')
    there = found.to(device)
    dist.broadcast(there, src=dist.get_process_group_ranks(pp)[-1], group=pp)
    return there.cpu()
