"""Responses to prompts, as rollouts and pairs hold them: micro-batches of them, and their log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from twinkle_megatron import MegatronModel
from twinkle_megatron.data_format import InputFeature

T = TypeVar('T')


@dataclass(frozen=True)
class Responses:
    """`n` responses: `ids[i]` are the tokens of a prompt, `prompt_lengths[i]` of them, and of the response to it."""

    ids: list[np.ndarray]
    prompt_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each response, `[n]`."""
        return np.array([len(ids) for ids in self.ids]) - self.prompt_lengths

    def sample(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A response as inputs and shifted labels, of which those of the response are trained."""
        ids = torch.from_numpy(self.ids[i]).long()
        labels = ids[1:].clone()
        labels[: self.prompt_lengths[i] - 1] = -100
        return ids[:-1], labels


def together(texts: list[torch.Tensor], packed: bool) -> InputFeature:
    """A micro-batch of these token ids: rows padded at the end, or one row that holds them one after the other."""
    if not packed:
        return InputFeature(input_ids=torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
    positions = torch.cat([torch.arange(len(ids)) for ids in texts])
    return InputFeature(input_ids=torch.cat(texts)[None], position_ids=positions[None])


def micro_batches(data: Responses, mine: list[torch.Tensor], packed: bool) -> list[InputFeature]:
    """Micro-batches of these responses, padded or packed."""
    found = []
    for numbers in mine:
        ids, labels = zip(*(data.sample(i) for i in numbers.tolist()))
        row = together(list(ids), packed)
        pad = torch.nn.utils.rnn.pad_sequence
        row['labels'] = torch.cat(labels)[None] if packed else pad(list(labels), True, padding_value=-100)
        found.append(row)
    return found


def log_probs(
    compute: Callable[[list[InputFeature]], list[torch.Tensor]],
    model: MegatronModel,
    data: Responses,
    mine: list[torch.Tensor],
    packed: bool = False,
) -> list[np.ndarray]:
    """Of every response the log-probs of its tokens, nats, on every rank, as `compute` gives them for micro-batches.

    `mine` are the micro-batches of this replica; those of all replicas hold every response. Collective.
    """
    found = {}
    for numbers, whole in zip(mine, compute(micro_batches(data, mine, packed))):  # of the last stage; others have none
        lengths = [len(data.ids[i]) - 1 for i in numbers.tolist()]
        rows = whole[0].split(lengths) if packed else whole
        for i, row, length in zip(numbers.tolist(), rows, lengths):
            found[i] = row[data.prompt_lengths[i] - 1 : length].double().cpu().numpy()
    return of_all_replicas(model, found)


def of_all_replicas(model: MegatronModel, found: dict[int, T]) -> list[T]:
    """What the replicas found on their last stages, by numbers from 0 that together they all have: in order, on every
    rank. Collective."""
    everything: dict[int, T] = {}
    for part in model.groups.gather_objects(found if model.groups.owns_result else {}):
        everything |= part
    return [everything[i] for i in range(len(everything))]
