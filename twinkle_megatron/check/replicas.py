"""Weights that several ranks must have alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..groups import Groups, all_gather_rows


def unequal_replicas(models: Sequence[Any], groups: Groups) -> list[str]:
    """Names of the parameters, with the group, that are not the same to the bit on ranks that must have them alike:
    all of them over DP and CP, those that are not split over TP too. Experts are left out. One gather a group."""
    named = [
        (f'chunk {number}: {name}' if len(models) > 1 else name, parameter)
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
        if getattr(parameter, 'allreduce', True)
    ]
    whole = [(name, p) for name, p in named if not getattr(p, 'tensor_model_parallel', False)]
    return [
        *(f'{name} over data and context parallel ranks' for name in _unequal(named, groups.dp_cp)),
        *(f'{name} over tensor parallel ranks' for name in _unequal(whole, groups.tp)),
    ]


def _unequal(named: Sequence[tuple[str, Tensor]], group: ProcessGroup | None) -> list[str]:
    if not named:
        return []
    sums = all_gather_rows(torch.stack([checksum(parameter) for _, parameter in named]), group)
    return [name for (name, _), same in zip(named, (sums == sums[0]).all(0).tolist(), strict=True) if not same]


def checksum(parameter: Tensor) -> Tensor:
    """A number of the bits and their order, int64."""
    data = parameter.detach().reshape(-1).contiguous().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for number, part in enumerate(data.split(1 << 20)):
        places = torch.arange(part.numel(), device=part.device) % 65521 + 1 + number
        total += (part.long() * places).sum()
    return total
