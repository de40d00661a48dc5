"""Policy gradient losses on groups of responses: GRPO and its variants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..arguments import above_0, at_least_0, checked_arguments
from ..batch import CONSTANT, LOG_PROBS, PER_TOKEN, TokenBatch
from ..vocab_parallel import TokenStats
from .base import SweepLoss

FARTHEST = 20.0
"""Nats. Log-ratios are bounded there: the exponential of a token farther off than that says nothing, overflows in the
end, and gets no gradient."""


class GRPOLoss(SweepLoss):
    """Group relative policy optimisation (Shao et al., arXiv 2402.03300, eq. 3; clip-higher: arXiv 2503.14476).

    Per trained token, with the log-ratio d = log π(token) − old_logp bounded to ±20 nats, r = exp(d), the advantage A
    and e = ref_logp − log π:

        −min(r·A, clip(r, 1 − clip_range, 1 + clip_range_high)·A) + beta·(exp(e) − e − 1) − entropy_coef·H

    The mean over the tokens of each sequence is averaged over the sequences of the global batch that have any.

    Args:
        clip_range: also `epsilon`.
        clip_range_high: also `epsilon_high`; None: `clip_range`.
        beta: weight of the KL divergence to the reference policy (k3, Schulman), which needs `ref_logps`.
        entropy_coef: weight of the entropy −Σ p log p, from the same sweep as the log-prob, differentiable.
        temperature: logits are divided by it for log-probs and entropy: that of the sampler. Ready `logps` stay at
            theirs.
        ignore_index: label of tokens that do not count.

    Call keywords, each in any form that `align_extras` takes:
        advantages: None gives 0 with a gradient path, so that log-probs can be had without.
        old_logps: log-probs of the policy that sampled, nats; None: those of now, so that r = 1.
        ref_logps: log-probs of the reference policy, nats.

    Logits `[..., V/tp]` are sharded over TP, all else is replicated over it. Collectives: those of the sweep. Kept for
    backward: a few numbers a token. ValueError for an unknown keyword and for extras that fit no sequence.
    """

    extras: ClassVar[Mapping[str, str]] = {'old_logps': LOG_PROBS, 'ref_logps': LOG_PROBS, 'advantages': PER_TOKEN}
    over: ClassVar[str] = 'sequences'

    @checked_arguments
    def __init__(
        self,
        clip_range: float = 0.2,
        clip_range_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        temperature: float = 1.0,
        ignore_index: int = -100,
        **unknown: Any,
    ) -> None:
        super().__init__(ignore_index)
        self.clip_range = at_least_0('clip_range', clip_range)
        self.clip_range_high = self.clip_range if clip_range_high is None else clip_range_high
        at_least_0('clip_range_high', self.clip_range_high)
        self.beta = at_least_0('beta', beta)
        self.entropy_coef = at_least_0('entropy_coef', entropy_coef)
        self.temperature = above_0('temperature', temperature)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({'log_prob', 'entropy'} if self.entropy_coef > 0 else {'log_prob'})

    def contribution(self, batch: TokenBatch, stats: TokenStats, **extra: Any) -> Tensor:
        logps, advantages = stats.log_prob, extra.get('advantages')
        assert logps is not None
        if advantages is None:
            return torch.where(torch.zeros_like(batch.mask), logps, 0).sum()
        old, ref, advantages = (_like(x, logps) for x in (extra.get('old_logps'), extra.get('ref_logps'), advantages))
        assert advantages is not None
        log_ratio = bounded(logps - (logps.detach() if old is None else old))
        loss = self.token_losses(self.log_weights(batch, log_ratio).exp(), advantages, logps)
        if self.beta > 0 and ref is not None:
            loss = loss + self.beta * k3(logps, ref)
        if self.entropy_coef > 0:
            assert stats.entropy is not None
            loss = loss - self.entropy_coef * stats.entropy
        return self.mean(batch, loss, extra)

    def log_weights(self, batch: TokenBatch, log_ratio: Tensor) -> Tensor:
        """The logarithm of each token's importance weight, from its log-ratio."""
        return log_ratio

    def token_losses(self, ratio: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
        """The policy loss of each token."""
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range_high)
        return -torch.minimum(ratio * advantages, clipped * advantages)

    def mean(self, batch: TokenBatch, loss: Tensor, extra: Mapping[str, Any]) -> Tensor:
        """This micro-batch's summand of the loss, from the loss of each token."""
        return batch.mean(loss, over='sequences')


class GSPOLoss(GRPOLoss):
    """`GRPOLoss` with one importance weight a sequence: the exponential of the mean log-ratio of its tokens, of all
    context parallel ranks (Zheng et al., arXiv 2507.18071, eq. 7).

    Collectives: also one all-reduce of a number a sequence over the context parallel group, forward and backward.
    """

    def log_weights(self, batch: TokenBatch, log_ratio: Tensor) -> Tensor:
        return batch.spread(batch.sequence_mean(log_ratio))


class SAPOLoss(GRPOLoss):
    """`GRPOLoss` with a soft gate in place of the clip: −A·σ(τ·(r − 1))·4/τ, with τ = tau_pos where A > 0, else tau_neg
    (arXiv 2511.20347). `tau` sets both. `clip_range` has no part in it."""

    @checked_arguments
    def __init__(
        self,
        clip_range: float = 0.2,
        clip_range_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        temperature: float = 1.0,
        tau_pos: float = 1.0,
        tau_neg: float = 1.0,
        ignore_index: int = -100,
        **unknown: Any,
    ) -> None:
        super().__init__(clip_range, clip_range_high, beta, entropy_coef, temperature, ignore_index)
        self.tau_pos, self.tau_neg = above_0('tau_pos', tau_pos), above_0('tau_neg', tau_neg)

    def token_losses(self, ratio: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
        tau = torch.full_like(ratio, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        return -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)


class CISPOLoss(GRPOLoss):
    """Policy gradient with a detached, capped importance weight: −sg(min(r, 1 + clip_range_high))·A·log π (MiniMax-M1,
    arXiv 2506.13585, eq. 4 and 5), a mean over the tokens of the global batch.

    Call keyword, beside those of `GRPOLoss`: `num_items_in_batch`, a number to divide by in place of the token count.
    """

    extras: ClassVar[Mapping[str, str]] = {**GRPOLoss.extras, 'num_items_in_batch': CONSTANT}
    over: ClassVar[str] = 'tokens'

    def token_losses(self, ratio: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
        return -ratio.clamp(max=1 + self.clip_range_high).detach() * advantages * logps

    def mean(self, batch: TokenBatch, loss: Tensor, extra: Mapping[str, Any]) -> Tensor:
        items = extra.get('num_items_in_batch')
        if items is None:
            return batch.mean(loss)
        if not items > 0:
            raise ValueError(f'num_items_in_batch must be a number > 0, got {items!r}')
        return torch.where(batch.mask, loss, 0).sum() / items


class BNPOLoss(GRPOLoss):
    """`GRPOLoss` as a mean over the tokens of the global batch: every token weighs the same, however long its sequence
    (the token mean of DAPO, arXiv 2503.14476, eq. 8)."""

    over: ClassVar[str] = 'tokens'

    def mean(self, batch: TokenBatch, loss: Tensor, extra: Mapping[str, Any]) -> Tensor:
        return batch.mean(loss)


class DRGRPOLoss(GRPOLoss):
    """`GRPOLoss` with a fixed denominator, so that long sequences are not favoured: the sum over tokens ÷ (sequences of
    the global batch · max_completion_length) (Liu et al., arXiv 2503.20783)."""

    @checked_arguments
    def __init__(
        self,
        clip_range: float = 0.2,
        clip_range_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        temperature: float = 1.0,
        max_completion_length: int = 1024,
        ignore_index: int = -100,
        **unknown: Any,
    ) -> None:
        super().__init__(clip_range, clip_range_high, beta, entropy_coef, temperature, ignore_index)
        if not isinstance(max_completion_length, int) or max_completion_length < 1:
            raise ValueError(f'max_completion_length must be an int >= 1, got {max_completion_length!r}')
        self.max_completion_length = max_completion_length

    def mean(self, batch: TokenBatch, loss: Tensor, extra: Mapping[str, Any]) -> Tensor:
        return torch.where(batch.mask, loss, 0).sum() / (batch.sequences * self.max_completion_length)


def bounded(log_ratio: Tensor) -> Tensor:
    """Within ±`FARTHEST` nats; no gradient beyond."""
    return log_ratio.clamp(-FARTHEST, FARTHEST)


def k3(logps: Tensor, ref_logps: Tensor, cap: float | None = None) -> Tensor:
    """Schulman's k3 estimate of KL(π‖ref) at each token, nats: exp(e) − e − 1 with e = ref_logps − logps, never < 0.

    Finite, with a finite gradient, however far the policies are apart: e is bounded to ±20 before the exponential is
    taken. `cap` bounds the value too.
    """
    e = bounded(ref_logps - logps)
    value = torch.expm1(e) - e
    return value if cap is None else value.clamp(max=cap)


def _like(x: Tensor | None, logps: Tensor) -> Tensor | None:
    return None if x is None else x.to(logps)
