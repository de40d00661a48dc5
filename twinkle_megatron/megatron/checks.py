"""Wrong set-ups, refused before anything is trained. None of these checks is collective; all ranks are set up alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..arguments import keywords_of, reject_unknown
from ..custom_loss import BATCH
from ..groups import Groups, group_rank, group_size
from ..loss.base import SweepLoss
from ..loss.pooled import PooledLoss
from ..vocab_parallel import VocabShard
from . import compatibility, cpu
from .forward_step import unwrapped
from .optimizer import is_megatron
from .schedule import is_ddp


def unwrap(chunks: Sequence[Any]) -> tuple[list[Any], Any]:
    """The chunks without DDP and mixed-precision wrappers, and their TransformerConfig. ValueError without one."""
    if not chunks:
        raise ValueError('chunks must hold at least one model chunk, got none')
    models = [unwrapped(chunk) for chunk in chunks]
    config = getattr(chunks[0], 'config', None) or getattr(models[0], 'config', None)
    if config is None or not hasattr(config, 'finalize_model_grads_func'):
        raise ValueError(
            f'chunks must be Megatron-Core modules with a TransformerConfig as .config, got {type(models[0]).__name__}'
        )
    return models, config


def check_chunks(
    chunks: Sequence[Any], models: Sequence[Any], config: Any, groups: Groups, optimizer: Any, trains: bool = True
) -> None:
    """ValueError for a layout or configuration that would scale gradients wrongly or that nothing here supports;
    `trains`: whether there will be gradients."""
    compatibility.check_features(config)
    compatibility.check_not_sharded(chunks)
    wrapped = [is_ddp(chunk) for chunk in chunks]
    if any(wrapped) != all(wrapped):
        raise ValueError("chunks must be all wrapped in Megatron's DistributedDataParallel or all bare, got a mixture")
    per_token = bool(getattr(config, 'calculate_per_token_loss', False))
    if getattr(config, 'mtp_num_layers', None) and not per_token:
        raise ValueError(
            'multi-token prediction needs config.calculate_per_token_loss=True: without it a micro-batch with no '
            'trained token makes the gradient non-finite'
        )
    if trains and wrapped[0]:
        _check_scaling(chunks, per_token)
    elif trains:
        _check_bare(config, groups)
        if is_megatron(optimizer):
            raise ValueError("Megatron's optimizer needs chunks wrapped in DistributedDataParallel, got bare chunks")
    if wrapped[0] and optimizer is not None and not is_megatron(optimizer):
        raise ValueError(
            'chunks wrapped in DistributedDataParallel keep their gradients in main_grad, which a torch optimizer '
            f'does not see; use megatron.core.optimizer.get_megatron_optimizer, got {type(optimizer).__name__}'
        )
    if len(chunks) > 1 and group_size(groups.pp) == 1:
        raise ValueError(f'{len(chunks)} chunks need a pipeline of several stages, got pipeline parallel size 1')
    cpu.check_config(config, len(chunks))


def _check_scaling(chunks: Sequence[Any], per_token: bool) -> None:
    """DDP decided on its gradient scale when it was built; the flag must not have changed since."""
    for chunk in chunks:
        for buffer in chunk.buffers:
            averaged = getattr(chunk.ddp_config, 'average_in_collective', False)
            expected = 1.0 if per_token or averaged else 1.0 / group_size(chunk.dp_cp_group)
            if abs(buffer.gradient_scaling_factor - expected) > 1e-12:
                raise ValueError(
                    f'config.calculate_per_token_loss={per_token} would scale gradients wrongly: '
                    f'DistributedDataParallel was built for the other value (its scale is '
                    f'{buffer.gradient_scaling_factor:g}, expected {expected:g}); set '
                    'the flag before wrapping the model'
                )


def _check_bare(config: Any, groups: Groups) -> None:
    several = [
        name for name, group in (('DP', groups.dp), ('CP', groups.cp), ('PP', groups.pp)) if group_size(group) > 1
    ]
    if getattr(config, 'sequence_parallel', False) and group_size(groups.tp) > 1:
        several.append('SP')
    if several:
        raise ValueError(
            f'bare chunks cannot reduce gradients over {", ".join(several)}; wrap each chunk in '
            'megatron.core.distributed.DistributedDataParallel'
        )


def check_vocab_size(given: int | None, padded: int | None) -> None:
    """ValueError unless the true vocabulary fits into the model's."""
    if given is None:
        return
    if not isinstance(given, int) or given < 1 or (padded is not None and given > padded):
        upper = 'the model vocabulary' if padded is None else f"{padded}, the model's padded vocabulary"
        raise ValueError(f'vocab_size must be an int from 1 to {upper}, got {given!r}')


def vocab_shard(local_size: int, group: Any, vocab_size: int | None, padded: int | None) -> VocabShard:
    """This rank's shard for logits of `local_size` columns.

    ValueError for logits that are no equal share of the model's padded vocabulary. Collective over `group` only where
    the model does not tell its vocabulary size.
    """
    if padded is None or vocab_size is None:
        return VocabShard.from_group(local_size, group, vocab_size)
    share = padded // group_size(group)
    if local_size != share:
        fix = (
            'run the output layer with gather_output=False (parallel_output=True)'
            if local_size == padded
            else ('is its vocab_size that of its output layer?')
        )
        raise ValueError(
            f'logits must hold {share} columns on each rank, an equal share of the {padded} ids of the model, got '
            f'{local_size}; {fix}'
        )
    start = share * group_rank(group)
    return VocabShard(start, start + share, vocab_size, group)


def check_extra(loss: Callable[..., Any], extra: Mapping[str, Any], known: Collection[str]) -> None:
    """ValueError for keywords that neither the loss nor a metric takes; `known` are those that they name."""
    if isinstance(loss, SweepLoss | PooledLoss):
        reject_unknown(extra, known, f'forward_backward with {type(loss).__name__}')
        return
    named = keywords_of(loss)
    if BATCH in extra and BATCH in named:
        raise ValueError(f'{BATCH} is what MegatronModel gives a loss that names it, and no keyword of a call')
    if not named.takes_any:
        name = getattr(loss, '__name__', type(loss).__name__)
        reject_unknown(extra, {*named, *known}, f'the loss {name}')


def check_call(loss: Callable[..., Any], extra: Mapping[str, Any], training: bool) -> None:
    """ValueError where the loss cannot do with these keywords."""
    if isinstance(loss, SweepLoss):
        loss.check_call([key for key, value in extra.items() if value is not None], training)


def check_grad_mode() -> None:
    """ValueError where autograd records nothing."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise ValueError(
            'forward_backward must not be called under torch.no_grad() or torch.inference_mode(), which leave no '
            'gradient; use forward_only to evaluate'
        )


def step_scheduler(scheduler: Any) -> None:
    """Advances a Megatron scheduler by one increment, or a torch scheduler by one step."""
    if scheduler is None:
        return
    if 'increment' in inspect.signature(scheduler.step).parameters:
        scheduler.step(increment=1)
    else:
        scheduler.step()
