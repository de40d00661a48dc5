"""Trains a policy on rollouts: what a script needs to use the losses of the GRPO family stands here, in `train`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from launch import gpt, survival, weights
from launch.datasets import rollouts
from launch.datasets.responses import log_probs, micro_batches
from launch.datasets.rollouts import Rollouts
from launch.figures.policy_progress import PolicyRecorder
from launch.options import steps_of
from launch.parallel import figures, orders, share_of_replica
from twinkle_megatron import MegatronModel
from twinkle_megatron.advantage import group_advantages
from twinkle_megatron.loss import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss
from twinkle_megatron.metric import (
    CISPOMetric,
    CompletionRewardMetric,
    GRPOMetric,
    GSPOMetric,
    LossMetric,
    TrainMetric,
)
from twinkle_megatron.survive import StopSignals

LOSSES: dict[str, tuple[type[GRPOLoss], type[GRPOMetric]]] = {
    'grpo': (GRPOLoss, GRPOMetric),
    'gspo': (GSPOLoss, GSPOMetric),
    'sapo': (SAPOLoss, GRPOMetric),
    'cispo': (CISPOLoss, CISPOMetric),
    'bnpo': (BNPOLoss, GRPOMetric),
    'dr-grpo': (DRGRPOLoss, GRPOMetric),
}


def train(args: argparse.Namespace, stop: StopSignals) -> None:
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
    reference = None
    if args.beta > 0:
        everything = share_of_replica(torch.arange(len(data)), args)
        reference = log_probs(lambda inputs: model.forward_only(inputs=inputs)['logps'], model, data, everything)
    tokens = survival.Tally()
    parts = {'tokens': tokens, 'rewards': rewards, 'clock': recorder.clock}
    for step, chosen in survival.steps(model, orders(len(data), args), args, stop, **parts):
        mine = share_of_replica(chosen, args)
        numbers = torch.cat(mine).tolist()
        extra: dict[str, Any] = {'advantages': advantages[numbers], 'old_logps': [data.old_logps[i] for i in numbers]}
        if reference is not None:
            extra['ref_logps'] = [reference[i] for i in numbers]
        model.forward_backward(inputs=micro_batches(data, mine, args.packed), **extra)
        model.clip_grad_and_step(args.clip_grad)
        tokens.add(sum(len(data.old_logps[i]) for i in chosen.tolist()))
        rewards.accumulate(rewards=named_rewards(data, numbers), completions=[len(data.old_logps[i]) for i in numbers])
        recorder.step()
        if step % args.log_every == 0 or step in (1, args.steps):  # the first says whether the ratios begin at 1
            recorder.train(step, figures(model, is_training=True) | rewards.values() | {'total_tokens': tokens.take()})
            rewards.reset()
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


def named_rewards(data: Rollouts, numbers: list[int]) -> dict[str, np.ndarray] | np.ndarray:
    """The rewards of these rollouts, by name where they have names."""
    chosen = data.rewards[numbers]
    return dict(zip(data.reward_names, chosen.T)) if data.reward_names else chosen
