"""Trains a small GPT of Megatron-Core, split over processes, with this package's loss and metrics.

`launch/local.sh` prepares the data and starts this file under torchrun, once for each of tp * pp * dp processes. The
model itself stands in `launch/gpt.py`; what a script needs to use `MegatronModel` stands here, in `main`.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from launch import data, gpt, options
from launch.progress import Recorder
from twinkle_megatron import MegatronModel
from twinkle_megatron.data_format import InputFeature
from twinkle_megatron.loss import ChunkedCrossEntropyLoss
from twinkle_megatron.megatron import cpu
from twinkle_megatron.metric import Accuracy, LossMetric, TrainMetric


def main() -> None:
    args = options.parse()
    if args.dataset is None:
        raise SystemExit('start this script by launch/local.sh, which prepares the data first')
    dataset = data.load(args.dataset)
    start_processes(args)

    chunk, optimizer, scheduler = gpt.build(args, dataset.vocab_size)
    model = MegatronModel(chunk, optimizer, scheduler, vocab_size=dataset.vocab_size, head=args.head)
    model.set_loss(ChunkedCrossEntropyLoss)
    model.add_metric(TrainMetric, is_training=True)
    model.add_metric(LossMetric)
    model.add_metric(Accuracy)

    recorder = Recorder(args, dataset.unigram_nats, active=dist.get_rank() == 0)
    recorder.held_out(0, evaluate(model, dataset.held_out, args))
    for step, inputs in enumerate(training_batches(dataset.train, args), start=1):
        model.forward_backward(inputs=inputs)
        model.clip_grad_and_step(args.clip_grad)
        recorder.step()
        if step % args.log_every == 0 or step == args.steps:
            recorder.train(step, figures(model, is_training=True))
        if step % args.eval_every == 0 or step == args.steps:
            recorder.held_out(step, evaluate(model, dataset.held_out, args))
    recorder.finish()
    dist.barrier()
    dist.destroy_process_group()


def start_processes(args: argparse.Namespace) -> None:
    """Joins the processes and divides them into Megatron's tensor, pipeline and data parallel groups."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
        backend = 'nccl'
    else:
        cpu.install()
        backend = 'gloo'
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    parallel_state.initialize_model_parallel(args.tp, args.pp)


def training_batches(samples: data.Samples, args: argparse.Namespace) -> Iterator[list[InputFeature]]:
    """For each step this replica's micro-batches; all samples come in a new order in every epoch."""
    generator = torch.Generator().manual_seed(args.seed)
    queue = torch.empty(0, dtype=torch.int64)
    wanted = args.micro_batches * args.micro_batch_size
    for _ in range(args.steps):
        while len(queue) < wanted:
            queue = torch.cat([queue, torch.randperm(len(samples), generator=generator)])
        chosen, queue = queue[:wanted], queue[wanted:]
        yield micro_batches(samples, chosen, args)


def micro_batches(samples: data.Samples, chosen: torch.Tensor, args: argparse.Namespace) -> list[InputFeature]:
    """The samples as micro-batches on this rank's device, every dp-th of them: those of its data parallel replica."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    mine = chosen.split(args.micro_batch_size)[parallel_state.get_data_parallel_rank() :: args.dp]

    def tensor(rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows).to(device, torch.int64)

    return [
        InputFeature(input_ids=tensor(samples.inputs[rows.numpy()]), labels=tensor(samples.labels[rows.numpy()]))
        for rows in mine
    ]


def evaluate(model: MegatronModel, samples: data.Samples, args: argparse.Namespace) -> dict[str, float]:
    """Loss and accuracy over all held-out samples."""
    model.forward_only(inputs=micro_batches(samples, torch.arange(len(samples)), args))
    return figures(model, is_training=False)


def figures(model: MegatronModel, *, is_training: bool) -> dict[str, float]:
    """What the metrics gathered since they were last asked, the same on every rank."""
    values = model.metric_values(is_training)
    model.calculate_metric(is_training)  # the same as text; it starts them anew
    return values


if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends every process without a traceback
    main()
