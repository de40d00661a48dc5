"""Trains a student on what a teacher thinks of each token: what a script needs to use `GKDLoss` stands in `train`.

The teacher is a second model beside the student, or elsewhere, and then a file tells its best tokens. With
cross-entropy the student learns from the text alone, and is measured by the teacher.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from launch import gpt, survival
from launch.datasets import best_tokens, data
from launch.datasets.best_tokens import BestTokens, Sequences
from launch.datasets.samples import micro_batches
from launch.figures.distillation_progress import DistillationRecorder
from launch.options import steps_of
from launch.parallel import figures, orders, share_of_replica
from twinkle_megatron import MegatronModel
from twinkle_megatron.data_format import InputFeature
from twinkle_megatron.loss import ChunkedCrossEntropyLoss, GKDLoss
from twinkle_megatron.metric import SUM, Accuracy, LossMetric, Metric, TrainMetric
from twinkle_megatron.metric.base import checked_keywords
from twinkle_megatron.survive import StopSignals
from twinkle_megatron.vocab_parallel import cross_entropy


class Batch(NamedTuple):
    """This replica's micro-batches, and the keywords that tell the loss of the teacher."""

    inputs: list[InputFeature]
    teacher: dict[str, Any]


def train(args: argparse.Namespace, stop: StopSignals) -> None:
    """Trains the student."""
    known = data.load(args.dataset) if args.teacher_weights else best_tokens.load(args.dataset)
    args.steps = steps_of(args, len(known.train))
    chunk, optimizer, scheduler = gpt.build(args, known.vocab_size)
    model = MegatronModel(chunk, optimizer, scheduler, vocab_size=known.vocab_size, head=args.head)
    divergence = GKDLoss(**loss_options(args))
    loss = divergence if args.loss == 'gkd' else ChunkedCrossEntropyLoss()
    model.set_loss(loss)
    model.add_metric(TrainMetric, is_training=True)
    for metric in (LossMetric, CrossEntropy, Accuracy):
        model.add_metric(metric)
    batches = Elsewhere(known, args) if isinstance(known, BestTokens) else Beside(known, args, model)

    recorder = DistillationRecorder(args, batches.teacher_loss(), active=dist.get_rank() == 0)
    recorder.held_out(0, measured(model, batches.held_out(), divergence))
    for step, chosen in survival.steps(model, orders(len(known.train), args), args, stop, clock=recorder.clock):
        model.set_loss(loss)
        inputs, teacher = batches.train(chosen)
        model.forward_backward(inputs=inputs, **(teacher if loss is divergence else {}))
        model.clip_grad_and_step(args.clip_grad)
        recorder.step()
        if step % args.log_every == 0 or step == args.steps:
            recorder.train(step, figures(model, is_training=True))
        if step % args.eval_every == 0 or step == args.steps:
            recorder.held_out(step, measured(model, batches.held_out(), divergence))
    gpt.save_weights(args, chunk, known.vocab_size, known.tokenizer)
    recorder.finish()


def loss_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of the divergence."""
    mode = 'topk_remote' if args.teacher_weights is None else 'full' if args.topk is None else 'topk_local'
    names = ('temperature', 'topk', 'topk_tail') if args.loss == 'gkd' else ()
    return {'teacher_mode': mode, 'beta': args.beta, **{name: getattr(args, name) for name in names}}


def measured(model: MegatronModel, batch: Batch, divergence: GKDLoss) -> dict[str, float]:
    """Divergence, cross entropy and accuracy over all held-out samples."""
    model.set_loss(divergence)
    model.forward_only(inputs=batch.inputs, **batch.teacher)
    return figures(model, is_training=False)


class Beside:
    """Samples of text, and a teacher whose forward pass goes before that of the student."""

    def __init__(self, dataset: data.Dataset, args: argparse.Namespace, model: MegatronModel) -> None:
        self._dataset, self._args, self._model = dataset, args, model
        self._teacher = model.teacher(gpt.frozen(args, args.teacher_weights), vocab_size=dataset.vocab_size)

    def train(self, chosen: torch.Tensor) -> Batch:
        """These samples of those to train on. Collective."""
        inputs = micro_batches(self._dataset.train, chosen, self._args)
        learns = self._args.loss == 'gkd'
        return Batch(inputs, {'teacher': self._teacher.heads(inputs)} if learns else {})

    def held_out(self) -> Batch:
        """All held-out samples. Collective."""
        samples = self._dataset.held_out
        inputs = micro_batches(samples, torch.arange(len(samples)), self._args)
        return Batch(inputs, {'teacher': self._teacher.heads(inputs)})

    def teacher_loss(self) -> float:
        """Cross entropy of the teacher on the held-out samples, nats per token, on every rank. Collective."""
        inputs, teacher = self.held_out()
        mine = [0.0, 0.0]
        for row, (head, shard) in zip(inputs, teacher['teacher']):  # on other than the last stage there is none
            labels = row.get('labels')
            assert labels is not None
            mine[0] += float(cross_entropy(head, labels, shard=shard).sum())
            mine[1] += float((labels != data.IGNORE).sum())
        groups = self._model.groups
        nats, tokens = np.sum(groups.gather_objects(mine if groups.owns_result else [0.0, 0.0]), 0)
        return float(nats / tokens)


class Elsewhere:
    """Sequences, and the best tokens of a teacher elsewhere for each token."""

    def __init__(self, dataset: BestTokens, args: argparse.Namespace) -> None:
        self._dataset, self._args = dataset, args

    def train(self, chosen: torch.Tensor) -> Batch:
        """These sequences of those to train on."""
        return self._batch(self._dataset.train, chosen)

    def held_out(self) -> Batch:
        """All held-out sequences."""
        return self._batch(self._dataset.held_out, torch.arange(len(self._dataset.held_out)))

    def teacher_loss(self) -> None:
        """Not known: the label need not be among the best tokens."""

    def _batch(self, sequences: Sequences, chosen: torch.Tensor) -> Batch:
        device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        pad = torch.nn.utils.rnn.pad_sequence
        inputs, mine = [], share_of_replica(chosen, self._args)
        for numbers in mine:
            rows = [sequences.inputs_and_labels(i) for i in numbers.tolist()]
            ids, labels = ([torch.from_numpy(row[k]).long().to(device) for row in rows] for k in (0, 1))
            inputs.append(InputFeature(input_ids=pad(ids, True), labels=pad(labels, True, padding_value=data.IGNORE)))
        told = [i for numbers in mine for i in numbers.tolist()]
        return Batch(inputs, {
            'teacher_topk_logprobs': [sequences.log_probs[i] for i in told],
            'teacher_topk_indices': [sequences.indices[i] for i in told],
        })  # fmt: skip


class CrossEntropy(Metric):
    """Mean cross entropy per trained token, nats, from the log-probs of the labels, whatever the loss."""

    fields = {'nats': SUM, 'tokens': SUM}  # noqa: RUF012

    @checked_keywords
    def accumulate(self, inputs: Any = None, outputs: Any = None) -> None:
        """Takes in one micro-batch: `labels`, and the `logps` of these."""
        trained = inputs['labels'] != data.IGNORE
        self.state.fold(nats=-outputs['logps'][trained].sum(), tokens=trained.sum())

    def figures(self, totals: Mapping[str, float]) -> dict[str, float]:
        """`cross_entropy`, nats per token."""
        return {'cross_entropy': totals['nats'] / max(totals['tokens'], 1)}
