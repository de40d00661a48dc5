"""Gradients of two layouts beside each other: they travel as Megatron's checkpoints do, which know every split."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from ..megatron.checkpoint_state import Training, sharded_state


class Difference(NamedTuple):
    """Of the gradient of a parameter: the largest difference, where, and the largest value in one process."""

    name: str
    largest: float
    at: tuple[int, ...]
    here: float
    alone: float
    scale: float


def sharded_gradients(training: Training) -> dict[str, Any]:
    """The gradients of the layout in place of the weights, with what Megatron knows of who holds which part."""
    found = {}
    for number, model in enumerate(training.models):
        gradients = {p.data_ptr(): _gradient(p) for p in model.parameters()}
        state = sharded_state(training, loading=False, weights_only=True)[f'model{number}']
        found[f'model{number}'] = _replaced(state, gradients)
    return found


def differences(training: Training, path: Path) -> list[Difference]:
    """Of this process's gradients and those saved at `path`, in the order in which backward finds them."""
    (model,) = training.models
    wanted = sharded_gradients(training)
    mine = {name: _gradient(p).clone() for name, p in model.named_parameters() if _has_gradient(p)}
    loaded: Any = dist_checkpointing.load(_emptied(wanted), str(path))
    found = []
    for name, alone in reversed(list(mine.items())):
        here = loaded['model0'][name].to(alone)
        wrong = (here.double() - alone.double()).abs().nan_to_num(nan=torch.inf)
        wrong = torch.where((here == alone) | (here.isnan() & alone.isnan()), 0, wrong)
        flat = int(wrong.reshape(-1).argmax()) if wrong.numel() else 0
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), wrong.shape)) if wrong.numel() else ()
        scale = float(alone.double().abs().nan_to_num(nan=0, posinf=0).max()) if wrong.numel() else 0.0
        found.append(Difference(name, float(wrong.max()), at, float(here[at]), float(alone[at]), scale))
    return found


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad and (hasattr(parameter, 'main_grad') or parameter.grad is not None)


def _gradient(parameter: Tensor) -> Tensor:
    found = getattr(parameter, 'main_grad', None)
    found = parameter.grad if found is None else found
    return torch.zeros_like(parameter) if found is None else found.detach()


def _replaced(state: dict[str, Any], gradients: dict[int, Tensor]) -> dict[str, Any]:
    """The entries of parameters, each with its gradient."""
    found = {}
    for name, entry in state.items():
        data = getattr(entry, 'data', None)
        gradient = gradients.get(data.data_ptr()) if isinstance(data, Tensor) else None
        if gradient is None or data is None or not isinstance(entry, ShardedTensor | ShardedTensorFactory):
            continue
        entry.data = gradient.reshape(data.shape)
        if isinstance(entry, ShardedTensor):
            entry.dtype = gradient.dtype
        found[name] = entry
    return found


def _emptied(state: dict[str, Any]) -> dict[str, Any]:
    """With memory of its own for what is loaded."""
    for entries in state.values():
        for entry in entries.values():
            entry.data = torch.zeros_like(entry.data)
    return state
