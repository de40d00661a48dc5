"""Trains a sentence encoder on groups of texts: what a script needs to use InfoNCE stands here, in `train`."""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.distributed as dist

from launch import gpt, survival, weights
from launch.datasets import anchors
from launch.datasets.anchors import Groups
from launch.datasets.responses import of_all_replicas, together
from launch.figures.embedding_progress import EmbeddingRecorder, Similarities
from launch.options import steps_of
from launch.parallel import figures, orders, share_of_replica
from twinkle_megatron import EmbeddingHead, MegatronModel
from twinkle_megatron.data_format import InputFeature
from twinkle_megatron.loss import InfonceLoss
from twinkle_megatron.metric import EmbeddingMetric, TrainMetric
from twinkle_megatron.survive import StopSignals


def train(args: argparse.Namespace, stop: StopSignals) -> None:
    """Makes a sentence encoder of the language model of `args.init_weights`."""
    data, about = anchors.load(args.dataset), weights.read_about(args.init_weights)
    args.steps = steps_of(args, len(data.train))
    chunk, optimizer, scheduler = gpt.build(args, about.vocab_size)
    head = EmbeddingHead(pooling=args.pooling)
    model = MegatronModel(chunk, optimizer, scheduler, vocab_size=about.vocab_size, head=head)
    model.set_loss(InfonceLoss, temperature=args.temperature, hard_negatives=args.hard_negatives)
    model.add_metric(TrainMetric, is_training=True)
    model.add_metric(EmbeddingMetric, is_training=True)

    recorder = EmbeddingRecorder(args, active=dist.get_rank() == 0)
    before, after = evaluate(model, data.held_out, args), None
    recorder.held_out(0, before)
    tokens = survival.Tally()
    # A group that came twice in a step would be its own negative.
    order, parts = orders(len(data.train), args, distinct=True), {'tokens': tokens, 'clock': recorder.clock}
    for step, chosen in survival.steps(model, order, args, stop, **parts):
        mine = share_of_replica(chosen, args)
        model.forward_backward(inputs=micro_batches(data.train, mine, args.packed))
        model.clip_grad_and_step(args.clip_grad)
        tokens.add(data.train.tokens(chosen.tolist()))
        recorder.step()
        if step % args.log_every == 0 or step == args.steps:
            recorder.train(step, figures(model, is_training=True) | {'total_tokens': tokens.take()})
        if step % args.eval_every == 0 or step == args.steps:
            after = evaluate(model, data.held_out, args)
            recorder.held_out(step, after)
    if after is None:  # the last step was the last of an earlier part of the run
        after = evaluate(model, data.held_out, args)
    gpt.save_weights(args, chunk, about.vocab_size, about.tokenizer)
    recorder.finish(before, after)


def micro_batches(data: Groups, mine: list[torch.Tensor], packed: bool) -> list[InputFeature]:
    """Micro-batches of whole groups: their texts padded at the end or packed, with labels that mark the anchors."""
    found = []
    for groups in mine:
        texts = [torch.from_numpy(data.ids[i]).long() for i in data.texts(groups.tolist())]
        row = together(texts, packed)
        if not packed:
            lengths = torch.tensor([len(ids) for ids in texts])
            row['attention_mask'] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        starts = [int(i == data.starts[k]) for k in groups.tolist() for i in data.texts([k])]
        row['labels'] = torch.tensor(starts)
        found.append(row)
    return found


def embeddings(model: MegatronModel, data: Groups, args: argparse.Namespace) -> np.ndarray:
    """Of every text its embedding, of length 1, `[texts, D]`, on every rank. Collective."""
    mine = share_of_replica(torch.arange(len(data)), args)
    found: dict[int, np.ndarray] = {}
    for groups, rows in zip(mine, model.predict(inputs=micro_batches(data, mine, args.packed))):  # of the last stage
        found |= zip(data.texts(groups.tolist()), rows.double().cpu().numpy())
    return np.stack(of_all_replicas(model, found))


def evaluate(model: MegatronModel, data: Groups, args: argparse.Namespace) -> Similarities:
    """How similar the anchors are to the positives of all groups. Collective."""
    of_texts = embeddings(model, data, args)
    return Similarities.of(of_texts[data.starts[:-1]], of_texts[data.starts[:-1] + 1])
