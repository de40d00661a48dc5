"""Trains a small GPT of Megatron-Core, split over processes, with this package's loss and metrics.

`launch/local.sh` prepares the data and starts this file under torchrun, once for each of tp * pp * dp processes. The
model itself stands in `launch/gpt.py`; what a script needs to use `MegatronModel` stands here, in `train`, for rollouts
in `launch/policy.py`, for pairs in `launch/preference.py`, for groups of texts in `launch/embedding.py` and beside a
teacher in `launch/distillation.py`.
"""

from __future__ import annotations

import argparse
import signal

import torch
import torch.distributed as dist

from launch import distillation, embedding, gpt, options, policy, preference, survival
from launch.datasets import data
from launch.datasets.samples import micro_batches
from launch.figures import logs
from launch.figures.progress import TextRecorder
from launch.kinds import DISTILLATION, EMBEDDINGS, LOSSES, PAIRS, ROLLOUTS, TEXT
from launch.parallel import figures, orders, start_processes, stop_processes
from twinkle_megatron import MegatronModel
from twinkle_megatron.doctor import Layout, require
from twinkle_megatron.loss import ChunkedCrossEntropyLoss
from twinkle_megatron.metric import Accuracy, LossMetric, TrainMetric
from twinkle_megatron.survive import AGAIN, StopSignals


def main() -> None:
    args = options.parse()
    if args.dataset is None:
        raise SystemExit('start this script by launch/local.sh, which prepares the data first')
    stop = StopSignals()
    start_processes(args)
    logs.start(args.run / 'logs', dist.get_rank(), dist.get_world_size())
    if args.doctor:
        sizes = {'layers': args.layers, 'heads': args.heads, 'hidden_size': args.hidden_size}
        require(Layout(tp=args.tp, pp=args.pp, **sizes), paths=[str(args.run)])
    args.start = survival.find_start(args)
    trains = {TEXT: train, ROLLOUTS: policy.train, PAIRS: preference.train, EMBEDDINGS: embedding.train}
    trains[DISTILLATION] = distillation.train
    train_it = trains[DISTILLATION if args.teacher_weights else LOSSES[args.loss]]
    try:
        with logs.end_told(args.run):
            train_it(args, stop)
    except SystemExit as end:
        if end.code != AGAIN:
            raise
        code = AGAIN  # on every rank
    else:
        code = 0
    stop.ignore()
    stop_processes(code)


def train(args: argparse.Namespace, stop: StopSignals) -> None:
    """Trains on text."""
    dataset = data.load(args.dataset)
    args.steps = options.steps_of(args, len(dataset.train))
    chunk, optimizer, scheduler = gpt.build(args, dataset.vocab_size)
    model = MegatronModel(chunk, optimizer, scheduler, vocab_size=dataset.vocab_size, head=args.head)
    model.set_loss(ChunkedCrossEntropyLoss)
    model.add_metric(TrainMetric, is_training=True)
    model.add_metric(LossMetric)
    model.add_metric(Accuracy)

    recorder = TextRecorder(args, dataset.unigram_nats, active=dist.get_rank() == 0)
    recorder.held_out(0, evaluate(model, dataset.held_out, args))
    for step, chosen in survival.steps(model, orders(len(dataset.train), args), args, stop, clock=recorder.clock):
        model.forward_backward(inputs=micro_batches(dataset.train, chosen, args))
        model.clip_grad_and_step(args.clip_grad)
        recorder.step()
        if step % args.log_every == 0 or step == args.steps:
            recorder.train(step, figures(model, is_training=True))
        if step % args.eval_every == 0 or step == args.steps:
            recorder.held_out(step, evaluate(model, dataset.held_out, args))
    gpt.save_weights(args, chunk, dataset.vocab_size, dataset.tokenizer)
    recorder.finish()


def evaluate(model: MegatronModel, samples: data.Samples, args: argparse.Namespace) -> dict[str, float]:
    """Loss and accuracy over all held-out samples."""
    model.forward_only(inputs=micro_batches(samples, torch.arange(len(samples)), args))
    return figures(model, is_training=False)


if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends every process without a traceback
    main()
