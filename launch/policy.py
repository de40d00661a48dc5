"""Trains a policy on rollouts: what a script needs to use the losses of the GRPO family stands here, in `train`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from launch import gpt, rollouts, weights
from launch.options import steps_of
from launch.parallel import figures, orders, share_of_replica
from launch.policy_progress import PolicyRecorder
from launch.rollouts import Rollouts
from twinkle_megatron import MegatronModel
from twinkle_megatron.advantage import group_advantages
from twinkle_megatron.data_format import InputFeature
from twinkle_megatron.loss import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss
from twinkle_megatron.metric import (
    CISPOMetric,
    CompletionRewardMetric,
    GRPOMetric,
    GSPOMetric,
    LossMetric,
    TrainMetric,
)

LOSSES: dict[str, tuple[type[GRPOLoss], type[GRPOMetric]]] = {
    'grpo': (GRPOLoss, GRPOMetric),
    'gspo': (GSPOLoss, GSPOMetric),
    'sapo': (SAPOLoss, GRPOMetric),
    'cispo': (CISPOLoss, CISPOMetric),
    'bnpo': (BNPOLoss, GRPOMetric),
    'dr-grpo': (DRGRPOLoss, GRPOMetric),
}


def train(args: argparse.Namespace) -> None:
    """Trains the policy of `args.init_weights` on what it has sampled."""
    data, about = rollouts.load(args.dataset), weights.read_about(args.init_weights)
    args.steps = steps_of(args, len(data))
    chunk, optimizer, scheduler = gpt.build(args, about.vocab_size)
    model = MegatronModel(chunk, optimizer, scheduler, vocab_size=about.vocab_size, head=args.head)
    loss, metric = LOSSES[args.loss]
    model.set_loss(loss, **loss_options(args, data.temperature))
    model.add_metric(TrainMetric, is_training=True)
    model.add_metric(LossMetric, is_training=True)
    clip = {'epsilon': args.clip_range, 'epsilon_high': args.clip_range_high}
    model.add_metric(metric, is_training=True, temperature=data.temperature, **clip)
    rewards = CompletionRewardMetric(model.groups, model.groups.dp_cp)

    advantages = group_advantages(data.totals, 1, group_ids=data.groups, scale=args.advantages)
    recorder = PolicyRecorder(args, active=dist.get_rank() == 0)
    reference = reference_log_probs(model, data, args) if args.beta > 0 else None
    tokens = 0
    for step, chosen in enumerate(orders(len(data), args), start=1):
        mine = share_of_replica(chosen, args)
        numbers = torch.cat(mine).tolist()
        extra: dict[str, Any] = {'advantages': advantages[numbers], 'old_logps': [data.old_logps[i] for i in numbers]}
        if reference is not None:
            extra['ref_logps'] = [reference[i] for i in numbers]
        model.forward_backward(inputs=micro_batches(data, mine, args.packed), **extra)
        model.clip_grad_and_step(args.clip_grad)
        tokens += sum(len(data.old_logps[i]) for i in chosen.tolist())
        rewards.accumulate(rewards=named_rewards(data, numbers), completions=[len(data.old_logps[i]) for i in numbers])
        recorder.step()
        if step % args.log_every == 0 or step in (1, args.steps):  # the first says whether the ratios begin at 1
            recorder.train(step, figures(model, is_training=True) | rewards.values() | {'total_tokens': tokens})
            rewards.reset()
            tokens = 0
    gpt.save_weights(args, chunk, about.vocab_size, about.tokenizer)
    recorder.finish()


def loss_options(args: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """The keywords of the loss."""
    fixed = {'max_completion_length': args.seq_length} if args.loss == 'dr-grpo' else {}
    return {
        'clip_range': args.clip_range,
        'clip_range_high': args.clip_range_high,
        'beta': args.beta,
        'entropy_coef': args.entropy_coef,
        'temperature': temperature,
        **fixed,
    }


def micro_batches(data: Rollouts, mine: list[torch.Tensor], packed: bool) -> list[InputFeature]:
    """Micro-batches of these rollouts: rows padded at the end, or one row that holds them one after the other."""
    found = []
    for numbers in mine:
        samples = [sample(data, i) for i in numbers.tolist()]
        positions = [torch.arange(len(ids)) for ids, _ in samples]
        ids, labels = ([s[k] for s in samples] for k in (0, 1))
        if packed:
            row = InputFeature(input_ids=torch.cat(ids)[None], labels=torch.cat(labels)[None])
            row['position_ids'] = torch.cat(positions)[None]
        else:
            pad = torch.nn.utils.rnn.pad_sequence
            row = InputFeature(input_ids=pad(ids, True), labels=pad(labels, True, padding_value=-100))
        found.append(row)
    return found


def sample(data: Rollouts, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rollout as inputs and shifted labels, of which those of the completion are trained."""
    ids = torch.from_numpy(data.ids[i]).long()
    labels = ids[1:].clone()
    labels[: data.prompt_lengths[i] - 1] = -100
    return ids[:-1], labels


def named_rewards(data: Rollouts, numbers: list[int]) -> dict[str, np.ndarray] | np.ndarray:
    """The rewards of these rollouts, by name where they have names."""
    chosen = data.rewards[numbers]
    return dict(zip(data.reward_names, chosen.T)) if data.reward_names else chosen


def reference_log_probs(model: MegatronModel, data: Rollouts, args: argparse.Namespace) -> list[list[float]]:
    """Of every rollout the log-probs of its completion under the weights of now, on every rank. Collective."""
    mine = share_of_replica(torch.arange(len(data)), args)
    logps = model.forward_only(inputs=micro_batches(data, mine, packed=False))['logps']
    found = {}
    for numbers, rows in zip(mine, logps):  # of the last stage; others have none
        for i, row in zip(numbers.tolist(), rows):
            first = data.prompt_lengths[i] - 1
            found[i] = row[first : len(data.ids[i]) - 1].tolist()
    for other in model.groups.gather_objects(found if model.groups.owns_result else {}):
        found |= other
    return [found[i] for i in range(len(data))]
