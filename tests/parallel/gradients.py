"""Gradients and weights of a tiny GPT from all ranks, compared with those of one process.

return collect_grads(chunks)                # on every rank of run_ranks
worst = compare(results, reference)         # in the test: every parameter, whole
assert worst.error < 1e-10, worst
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from tiny_gpt import VOCABULARY_PARAMETERS, Spec, global_name, shard_of, unwrapped


@dataclass(frozen=True)
class Part:
    """A rank's piece of a gradient or a weight: it starts at `start` on dimension `dim` of the whole; -1: all of it."""

    tensor: torch.Tensor
    dim: int = -1
    start: int = 0

    @property
    def grad(self) -> torch.Tensor:
        return self.tensor


def collect_grads(chunks: list[Any]) -> dict[str, Part]:
    """The gradients that this rank holds, by global name: `main_grad` where DDP is used, else `grad`.

    Collective with the distributed optimizer, where each data-parallel rank has only its share: the shares are gathered
    first. A parameter that got no gradient is left out.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer:
            _gather_shares(chunk)
    return _collect(chunks, lambda parameter: getattr(parameter, 'main_grad', parameter.grad))


def collect_weights(chunks: list[Any]) -> dict[str, Part]:
    """The weights that this rank holds, by global name."""
    return _collect(chunks, lambda parameter: parameter)


def _collect(chunks: list[Any], read: Callable[[torch.nn.Parameter], torch.Tensor | None]) -> dict[str, Part]:
    parts = {}
    for model in map(unwrapped, chunks):
        for local, parameter in model.named_parameters():
            if local == 'output_layer.weight' and model.share_embeddings_and_output_weights and model.mtp_process:
                continue  # of the last stage with MTP; nothing reads it, the stage's copy of the embedding is in use
            tensor = read(parameter)
            if tensor is not None:
                name = global_name(model, local)
                dim, index, _ = shard_of(name, parameter)
                parts[name] = Part(tensor.detach().clone(), dim, index * tensor.size(dim) if dim >= 0 else 0)
    return parts


def _gather_shares(chunk: DistributedDataParallel) -> None:
    """Completes the gradient buffers, of which each data-parallel rank holds one reduced share a bucket."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shares = bucket.grad_data.view(dist.get_world_size(group), -1)
            dist.all_gather(list(shares.unbind(0)), shares[dist.get_rank(group)].clone(), group=group)


@dataclass(frozen=True)
class Worst:
    """The largest error of any parameter, relative to the largest entry of its reference, and where it is."""

    error: float
    name: str
    rank: int


def compare(ranks: list[dict[str, Part]], reference: dict[str, Part], floor: float = 1e-12) -> Worst:
    """Every rank's gradients or weights against the one-process ones, every entry of every parameter.

    AssertionError where an entry of the reference is on no rank, a parameter is unknown to it, or a value not finite.

    Rows that the reference lacks are padding of the vocabulary and are not compared; `padding_grad` looks at them.
    """
    covered = {name: torch.zeros(part.tensor.shape, dtype=torch.bool) for name, part in reference.items()}
    worst = Worst(0.0, 'none', -1)
    for rank, grads in enumerate(ranks):
        unknown = set(grads) - set(reference)
        assert not unknown, f'rank {rank} has parameters that the reference lacks: {sorted(unknown)}'
        for name, part in grads.items():
            mine, whole, seen = _aligned(part, reference[name].tensor, covered[name])
            seen.fill_(True)
            scale = max(whole.abs().max().item() if whole.numel() else 0.0, floor)
            error = (mine.double() - whole.double()).abs().max().item() / scale if mine.numel() else 0.0
            assert math.isfinite(error), f'rank {rank}: {name} is not finite'
            worst = max(worst, Worst(error, name, rank), key=lambda w: w.error)
    partly = [name for name, seen in covered.items() if not seen.all()]
    assert not partly, f'no rank holds all of: {partly}'
    return worst


def _aligned(part: Part, whole: torch.Tensor, covered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The part, the same piece of `whole` and of `covered`, all without vocabulary padding."""
    dim, start = max(part.dim, 0), part.start
    size = max(min(part.tensor.size(dim), whole.size(dim) - start), 0)
    return tuple(
        x.narrow(dim, min(at, x.size(dim)), size) for x, at in ((part.tensor, 0), (whole, start), (covered, start))
    )


def padding_grad(ranks: list[dict[str, Part]], spec: Spec) -> float:
    """The largest gradient of any vocabulary row past the true ones: 0 where padding takes no probability."""
    rows = (
        part.tensor[max(spec.vocab_size - part.start, 0) :]
        for grads in ranks
        for name, part in grads.items()
        if name in VOCABULARY_PARAMETERS
    )
    return max((row.abs().max().item() for row in rows if row.numel()), default=0.0)
