"""A training script built as Megatron-LM's pretrain_gpt.py is: get_batch, loss_func, forward_step, and a loop.

It knows nothing of this package unless its settings say `attach`. Started by itself its arguments are a file with the
pickled `Settings` and the folder for its results, one file a rank; the process group is up.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gradients import Part, collect_grads, collect_weights
from megatron.core import parallel_state as ps
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from stock import _context_slice, plain_loss
from tiny_gpt import Layout, Spec, batches, build, initialize, unwrapped, wrap

from twinkle_megatron.attach import attach

MICRO_BATCHES = 4


@dataclass(frozen=True)
class Settings:
    """The script's arguments. `attach`: those of `attach`, by which forward_step changes the loss; None: it does not.

    `stock_loss`: Megatron's own, in float32, instead of one in float64. `hands_mask`: the model gets `loss_mask`.
    `garbage`: labels of tokens that do not count are no ids. `ddp`: of DistributedDataParallel.
    """

    spec: Spec
    layout: Layout
    attach: dict[str, Any] | None = None
    stock_loss: bool = False
    hands_mask: bool = True
    garbage: bool = False
    steps: int = 2
    evaluates: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """What a rank saw: `lm loss` of each step (on the last stage), the gradients of the first, the last weights, and
    the metrics of each step and of the evaluation."""

    lm_losses: list[float] = field(default_factory=list)
    grads: dict[str, Part] = field(default_factory=dict)
    weights: dict[str, Part] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)


ARGS: Settings
ATTACHED: list[Any] = []


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    batch = _context_slice(next(data_iterator))
    if ARGS.garbage:
        batch['labels'] = batch['labels'].masked_fill(batch['loss_mask'] == 0, 10**6)
    return [batch[name] for name in ('tokens', 'labels', 'loss_mask', 'position_ids')]


def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    losses = output_tensor.view(-1)
    loss_mask = loss_mask.view(-1)
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    return loss, num_tokens, {'lm loss': torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens, labels, loss_mask, position_ids = get_batch(data_iterator)
    if ARGS.attach is not None:
        ATTACHED[:] = [attach(model, **ARGS.attach)]
        if not ARGS.hands_mask:
            ATTACHED[0].mask(loss_mask)
    more = {'loss_mask': loss_mask} if ARGS.hands_mask else {}
    output_tensor = model(tokens, position_ids, None, labels=labels, **more)
    return output_tensor, functools.partial(loss_func, loss_mask)


def run_schedule(chunks: list[Any], seed: int, forward_only: bool = False) -> list[float]:
    """One call of Megatron's schedule; the mean of what loss_func reports, on the last stage."""
    data = list(batches(ARGS.spec, MICRO_BATCHES, rank=ps.get_data_parallel_rank(), seed=seed))
    iterators = [iter(data) for _ in chunks]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=MICRO_BATCHES,
        seq_length=data[0]['tokens'].size(1),
        micro_batch_size=data[0]['tokens'].size(0),
        forward_only=forward_only,
    )
    if not reports:
        return []
    total = torch.stack([report['lm loss'] for report in reports]).sum(0)
    dist.all_reduce(total, group=ps.get_data_parallel_group(with_context_parallel=True))
    return [float(total[0] / total[1])]


def pretrain(settings: Settings) -> Result:
    global ARGS
    ARGS, result = settings, Result()
    initialize(settings.layout)
    chunks = wrap(build(settings.spec, settings.layout), **settings.ddp)
    if not settings.stock_loss and settings.attach is None:
        for chunk in chunks:
            plain_loss(unwrapped(chunk), settings.spec)
    distributed = bool(settings.ddp.get('distributed_optimizer'))
    config = OptimizerConfig(
        optimizer='adam' if distributed else 'sgd',  # the distributed one knows no other
        adam_eps=0.1,  # Adam amplifies rounding where gradients are small beside this
        lr=0.1,
        clip_grad=0.0,
        params_dtype=settings.spec.dtype,
        use_distributed_optimizer=distributed,
        overlap_param_gather=bool(settings.ddp.get('overlap_param_gather')),
    )
    optimizer = get_megatron_optimizer(config, chunks)
    for step in range(settings.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        result.lm_losses += run_schedule(chunks, seed=step)
        if step == 0:
            result.grads = collect_grads(chunks)
        optimizer.step()
        if ATTACHED:
            result.metrics.append({**ATTACHED[0].values(), **ATTACHED[0].calculate()})
    if settings.evaluates:
        for chunk in chunks:
            chunk.eval()
        with torch.no_grad():
            result.lm_losses += run_schedule(chunks, seed=99, forward_only=True)
        for chunk in chunks:
            chunk.train()
        if ATTACHED:
            result.evaluation = ATTACHED[0].calculate(is_training=False)
    result.weights = collect_weights(chunks)
    return result


if __name__ == '__main__':
    _settings = torch.load(sys.argv[1], weights_only=False)
    torch.save(vars(pretrain(_settings)), Path(sys.argv[2]) / f'{dist.get_rank()}.pt')
