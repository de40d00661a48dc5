"""Training steps with nothing of ours in them: Megatron's schedule and a plain loss, to test the harness itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gradients import Part, collect_grads, collect_weights
from megatron.core import parallel_state as ps
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from tiny_gpt import Layout, Spec, batches, build, initialize, unwrapped, wrap

from twinkle_megatron.megatron import cpu
from twinkle_megatron.megatron.cpu_attention import zigzag_positions


def train(spec: Spec, layout: Layout, micro_batches: int = 4, stock_loss: bool = False, **ddp: Any) -> dict[str, Part]:
    """Gradients of the global token mean of one batch, by Megatron's schedule in the layout; runs on every rank."""
    chunks = prepare(spec, layout, stock_loss, **ddp)
    backward(spec, layout, chunks, micro_batches)
    return collect_grads(chunks)


def step(spec: Spec, layout: Layout, distributed_optimizer: bool = False, **settings: Any) -> dict[str, Part]:
    """Weights after one step of Megatron's Adam with clipped gradients; runs on every rank."""
    chunks = prepare(spec, layout, distributed_optimizer=distributed_optimizer)
    config = OptimizerConfig(
        optimizer='adam',
        lr=1e-2,
        weight_decay=0.1,
        clip_grad=0.5,
        bf16=spec.dtype is torch.bfloat16,
        params_dtype=spec.dtype,
        use_distributed_optimizer=distributed_optimizer,
        **settings,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    backward(spec, layout, chunks)
    optimizer.step()
    return collect_weights(chunks)


def prepare(spec: Spec, layout: Layout, stock_loss: bool = False, **ddp: Any) -> list[Any]:
    """Groups, model and DDP, with the plain loss unless `stock_loss`."""
    initialize(layout)
    chunks = wrap(build(spec, layout), **ddp)
    cpu.check_config(chunks[0].config, len(chunks))
    for chunk in chunks if not stock_loss else ():
        plain_loss(unwrapped(chunk), spec)
    return chunks


def backward(spec: Spec, layout: Layout, chunks: list[Any], micro_batches: int = 4) -> None:
    """One pass of Megatron's schedule, gradients finalised."""
    data = [_context_slice(b) for b in batches(spec, micro_batches, rank=ps.get_data_parallel_rank())]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(data) for _ in chunks] if len(chunks) > 1 else iter(data),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=micro_batches,
        seq_length=data[0]['tokens'].size(1) * layout.cp,
        micro_batch_size=data[0]['tokens'].size(0),
    )


def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    b = next(iterator)
    out = model(b['tokens'], b['position_ids'], None, labels=b['labels'], loss_mask=b['loss_mask'])

    def loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, count = (token_losses * b['loss_mask']).sum(), b['loss_mask'].sum().int()
        return total, count, {'loss': torch.stack((total.detach(), count.to(total.dtype)))}

    return out, loss


def reference(spec: Spec, dp: int = 1, micro_batches: int = 4) -> dict[str, Part]:
    """The same gradients from one process, one bare model and no schedule."""
    initialize()
    chunks = build(spec)
    plain_loss(unwrapped(chunks[0]), spec)
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for rank in range(dp):
        for b in batches(spec, micro_batches, rank=rank):
            losses = chunks[0](b['tokens'], b['position_ids'], None, labels=b['labels'], loss_mask=b['loss_mask'])
            total, count = total + (losses * b['loss_mask']).sum(), count + b['loss_mask'].sum()
    total.backward()
    for parameter in chunks[0].parameters():
        parameter.grad /= count
    return collect_grads(chunks)


def plain_loss(model: Any, spec: Spec) -> None:
    """Replaces Megatron's cross entropy, which works in float32 only, by one over the gathered true vocabulary."""

    def loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits = gather_from_tensor_model_parallel_region(logits)[..., : spec.vocab_size]
        return F.cross_entropy(logits.permute(1, 2, 0), labels, reduction='none')

    if getattr(model, 'post_process', False):
        model.compute_language_model_loss = loss


def _context_slice(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This context parallel rank's zigzag slice of every row."""
    bounds = torch.tensor([0, batch['tokens'].size(1)])
    group = ps.get_context_parallel_group()
    positions = zigzag_positions(bounds, dist.get_world_size(group), dist.get_rank(group))
    return {name: tensor[:, positions] for name, tensor in batch.items()}
