"""Trains a policy on pairs: what a script needs to use the preference losses stands here, in `train`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from launch import gpt, survival, weights
from launch.datasets import pairs
from launch.datasets.responses import Responses, log_probs, micro_batches
from launch.figures.preference_progress import PreferenceRecorder
from launch.options import steps_of
from launch.parallel import figures, orders, share_of_replica
from twinkle_megatron import MegatronModel
from twinkle_megatron.data_format import InputFeature
from twinkle_megatron.loss import CPOLoss, DPOLoss, ORPOLoss, SimPOLoss
from twinkle_megatron.loss.preference import PreferenceLossBase
from twinkle_megatron.metric import DPOMetric, LossMetric, TrainMetric
from twinkle_megatron.reference import Reference
from twinkle_megatron.survive import StopSignals

LOSSES: dict[str, tuple[type[PreferenceLossBase], tuple[str, ...]]] = {
    'dpo': (DPOLoss, ('beta', 'loss_type', 'sft_weight', 'label_smoothing')),
    'simpo': (SimPOLoss, ('beta', 'gamma')),
    'cpo': (CPOLoss, ('beta', 'cpo_alpha')),
    'orpo': (ORPOLoss, ('beta',)),
}
"""With their options."""


def train(args: argparse.Namespace, stop: StopSignals) -> None:
    """Trains the policy of `args.init_weights` to prefer the chosen responses."""
    data, about = pairs.load(args.dataset), weights.read_about(args.init_weights)
    args.steps = steps_of(args, len(data.train) // 2)
    chunk, optimizer, scheduler = gpt.build(args, about.vocab_size)
    model = MegatronModel(chunk, optimizer, scheduler, vocab_size=about.vocab_size, head=args.head)
    loss, names = LOSSES[args.loss]
    model.set_loss(loss, **{name: getattr(args, name) for name in names})
    model.add_metric(TrainMetric, is_training=True)
    model.add_metric(LossMetric)
    model.add_metric(DPOMetric, beta=reward_beta(args))

    recorder = PreferenceRecorder(args, reward_beta(args), active=dist.get_rank() == 0)
    policy = model.reference(cache=args.reference_cache)
    held_out = reference_log_probs(policy, model, data.held_out, args)
    # Every loss is measured by the reference, on a few held-out pairs; one that trains without it is spared the others.
    trained = reference_log_probs(policy, model, data.train, args) if loss is DPOLoss else None
    recorder.start(sums(held_out))
    after = None
    tokens = survival.Tally()
    parts = {'tokens': tokens, 'clock': recorder.clock}
    for step, chosen in survival.steps(model, orders(len(data.train) // 2, args), args, stop, **parts):
        mine = responses_of_replica(chosen, args)
        given: dict[str, Any] = {} if trained is None else {'ref_logps': in_order(trained, mine)}
        model.forward_backward(inputs=micro_batches(data.train, mine, args.packed), **given)
        model.clip_grad_and_step(args.clip_grad)
        tokens.add(int(data.train.lengths[responses_of(chosen).numpy()].sum()))
        recorder.step()
        if step % args.log_every == 0 or step == args.steps:
            recorder.train(step, figures(model, is_training=True) | {'total_tokens': tokens.take()})
        if step % args.eval_every == 0 or step == args.steps:
            values, after = evaluate(model, data.held_out, held_out, args)
            recorder.held_out(step, values)
    if after is None:  # the last step was the last of an earlier part of the run
        _, after = evaluate(model, data.held_out, held_out, args)
    gpt.save_weights(args, chunk, about.vocab_size, about.tokenizer)
    recorder.finish(sums(held_out), sums(after))


def reward_beta(args: argparse.Namespace) -> float:
    """β of the rewards that are shown: that of the loss, or 0.1 where β of the loss means another thing."""
    return args.beta if args.loss in ('dpo', 'cpo') else 0.1


def responses_of(numbers: torch.Tensor) -> torch.Tensor:
    """Of pairs the responses: chosen₀, rejected₀, chosen₁, …"""
    return torch.stack([2 * numbers, 2 * numbers + 1], 1).flatten()


def responses_of_replica(chosen: torch.Tensor, args: argparse.Namespace) -> list[torch.Tensor]:
    """Of pairs cut into micro-batches the responses of this rank's data parallel replica."""
    return [responses_of(numbers) for numbers in share_of_replica(chosen, args)]


def in_order(per_response: list[np.ndarray], mine: list[torch.Tensor]) -> list[np.ndarray]:
    """What belongs to the responses of these micro-batches."""
    return [per_response[i] for numbers in mine for i in numbers.tolist()]


def reference_log_probs(
    reference: Reference, model: MegatronModel, data: Responses, args: argparse.Namespace
) -> list[np.ndarray]:
    """Of every response the log-probs of its tokens under the reference, on every rank. Collective."""

    def compute(inputs: list[InputFeature]) -> list[torch.Tensor]:
        # The first call computes even what is cached, to compare: let it be a small one.
        return [*reference.logps(inputs[:1]), *reference.logps(inputs[1:])]

    everything = responses_of_replica(torch.arange(len(data) // 2), args)
    return log_probs(compute, model, data, everything, args.packed)


def evaluate(
    model: MegatronModel, data: Responses, reference: list[np.ndarray], args: argparse.Namespace
) -> tuple[dict[str, float], list[np.ndarray]]:
    """What the metrics say of all pairs of `data`, and the log-probs of its responses. Collective."""
    everything = responses_of_replica(torch.arange(len(data) // 2), args)
    given = in_order(reference, everything)

    def compute(inputs: list[InputFeature]) -> list[torch.Tensor]:
        return model.forward_only(inputs=inputs, ref_logps=given)['logps']

    found = log_probs(compute, model, data, everything, args.packed)
    return figures(model, is_training=False), found


def sums(per_token: list[np.ndarray]) -> np.ndarray:
    """Of each pair the log-probs of its chosen and its rejected response, `[pairs, 2]`."""
    return np.array([logps.sum() for logps in per_token]).reshape(-1, 2)
