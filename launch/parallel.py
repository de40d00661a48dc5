"""What every training script of this folder does alike: starting processes, ordering samples, asking metrics."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from twinkle_megatron import MegatronModel
from twinkle_megatron.megatron import cpu
from twinkle_megatron.survive import leave


def start_processes(args: argparse.Namespace) -> None:
    """Joins the processes and divides them into Megatron's tensor, pipeline and data parallel groups."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
        backend = 'nccl'
    else:
        cpu.install()
        backend = 'gloo'
    # Longer than the watch over the steps waits: that one can say which group it is.
    dist.init_process_group(backend, timeout=timedelta(seconds=args.hang_timeout + 60))
    parallel_state.initialize_model_parallel(args.tp, args.pp)


def stop_processes(code: int = 0) -> NoReturn:
    """Waits for the others and ends with this exit code."""
    dist.barrier()
    dist.destroy_process_group()
    leave(code)


def orders(samples: int, args: argparse.Namespace, distinct: bool = False) -> Iterator[torch.Tensor]:
    """For each step the numbers of its samples; all come in a new order in every epoch.

    `distinct`: no step has a sample twice; so those of an epoch that do not fill one are left out.
    """
    generator = torch.Generator().manual_seed(args.seed)
    queue = torch.empty(0, dtype=torch.int64)
    wanted = args.micro_batches * args.micro_batch_size
    for _ in range(args.steps):
        while len(queue) < wanted:
            queue = torch.cat([queue[: 0 if distinct else None], torch.randperm(samples, generator=generator)])
        chosen, queue = queue[:wanted], queue[wanted:]
        yield chosen


def share_of_replica(chosen: torch.Tensor, args: argparse.Namespace) -> list[torch.Tensor]:
    """Of samples cut into micro-batches every dp-th: those of this rank's data parallel replica."""
    return list(chosen.split(args.micro_batch_size)[parallel_state.get_data_parallel_rank() :: args.dp])


def figures(model: MegatronModel, *, is_training: bool) -> dict[str, float]:
    """What the metrics gathered since they were last asked, the same on every rank."""
    values = model.metric_values(is_training)
    model.calculate_metric(is_training)  # the same as text; it starts them anew
    return values
