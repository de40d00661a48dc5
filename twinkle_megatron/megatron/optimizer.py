"""One optimizer step, with Megatron's optimizers or with torch's on bare chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..groups import Groups, group_device, group_rank, group_size


def is_megatron(optimizer: Any) -> bool:
    """Whether this is one of Megatron's optimizers, which hold their own master weights and gradient norms."""
    return callable(getattr(optimizer, 'prepare_grads', None))


def loss_scaling(optimizer: Any) -> Callable[[Tensor], Tensor] | None:
    """How to multiply the loss for an optimizer that divides gradients by a loss scale; None for one that does not."""
    parts = getattr(optimizer, 'chained_optimizers', None) or [optimizer]
    return optimizer.scale_loss if any(getattr(part, 'grad_scaler', None) is not None for part in parts) else None


def learning_rate(optimizer: Any) -> float | list[float]:
    """The learning rate, or the distinct ones of several parameter groups in their order."""
    rates = list(dict.fromkeys(float(group['lr']) for group in optimizer.param_groups))
    return rates[0] if len(rates) == 1 else rates


def step_optimizer(
    optimizer: Any,
    models: Sequence[Any],
    groups: Groups,
    max_norm: float | None,
) -> tuple[bool, float | None]:
    """Clips to `max_norm` and steps. Returns whether a step was taken, and the norm before clipping."""
    if not is_megatron(optimizer):
        norm = clip_bare([p for model in models for p in model.parameters()], groups, max_norm)
        optimizer.step()
        return True, norm
    for part in (optimizer, *getattr(optimizer, 'chained_optimizers', ())):
        # an infinite bound clips nothing but has Megatron compute the norm
        part.config.clip_grad = math.inf if max_norm is None else max_norm
    stepped, norm, _ = optimizer.step()
    return bool(stepped), None if norm is None else float(norm)


class Clipped(NamedTuple):
    """Gradients that were clipped: their norm before, and what takes the step; None where the loss scaler found inf or
    NaN."""

    norm: float | None
    step: Callable[[], bool] | None


def clip_optimizer(optimizer: Any, models: Sequence[Any], groups: Groups, max_norm: float | None) -> Clipped:
    """The first half of `step_optimizer`. ValueError for an optimizer whose step has no halves."""
    if not is_megatron(optimizer):
        norm = clip_bare([p for model in models for p in model.parameters()], groups, max_norm)

        def step() -> bool:
            optimizer.step()
            return True

        return Clipped(norm, step)
    from megatron.core.optimizer import optimizer as known

    if type(optimizer).step not in [vars(cls).get('step') for cls in vars(known).values() if isinstance(cls, type)]:
        raise ValueError(
            f'the step of {type(optimizer).__name__} has no two halves; use clip_grad_and_step(max_grad_norm)'
        )
    reached: list[bool] = []
    take = optimizer.step_with_ready_grads
    # everything that Megatron's step does before it changes a weight
    optimizer.step_with_ready_grads = lambda: reached.append(True) or True
    try:
        _, norm = step_optimizer(optimizer, models, groups, max_norm)
    finally:
        del optimizer.step_with_ready_grads
    return Clipped(norm, take if reached else None)


def clip_bare(parameters: Sequence[Tensor], groups: Groups, max_norm: float | None) -> float:
    """2-norm over the model of bare chunks, where parameters without a tensor parallel split count once. Clips in
    place."""
    once = group_rank(groups.tp) == 0
    graded = [(p, p.grad) for p in parameters if p.grad is not None]
    mine = [g for p, g in graded if once or getattr(p, 'tensor_model_parallel', False)]
    square = torch.zeros((), dtype=torch.float64)
    for grad in mine:
        square = square.to(grad.device) + grad.detach().double().square().sum()
    if group_size(groups.tp) > 1:
        square = square.to(group_device(groups.tp))
        dist.all_reduce(square, group=groups.tp)
    norm = math.sqrt(float(square))
    if max_norm is not None and norm > max_norm:
        for _, grad in graded:
            grad.mul_(max_norm / (norm + 1e-6))
    return norm
