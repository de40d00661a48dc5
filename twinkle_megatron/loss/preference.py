"""Preference losses on pairs of a chosen and a rejected sequence: DPO and its variants, SimPO, CPO, ORPO."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import above_0, at_least_0, checked_arguments
from ..batch import Pairs, TokenBatch, check_layout
from ..batch.reference import REFERENCE, check_reference
from ..vocab_parallel import TokenStats
from .base import SweepLoss

NEAREST = -1e-7
"""Nats. ORPO's mean log-probs are bounded there, where the odds of a sure sequence would be infinite."""


class Side(NamedTuple):
    """The chosen, or the rejected, sequence of each pair, `[p]`: a sum over its trained tokens, and how many they are.

    The sum is of log-probs or of log-ratios, in float64: of long sequences it is large beside what a loss looks at.
    """

    total: Tensor
    tokens: Tensor

    @property
    def mean(self) -> Tensor:
        """Per token; 0 for a sequence without any."""
        return self.total / self.tokens.clamp(min=1)


class PreferenceLossBase(SweepLoss):
    """What preference losses share: a mean over the pairs of the global batch, and one over the tokens of its chosen
    sequences,

        pair_weight · mean over pairs of pair_losses(chosen, rejected) + nll_weight · mean over tokens of −log π

    A subclass gives `pair_losses`. The log-prob of a sequence is the sum over its trained tokens, so that padded rows,
    packed ones and context parallel slices give the same. A pair without any trained token does not count; a single
    sequence without one has the log-prob 0.

    Args:
        ignore_index: label of tokens that do not count.
        layout: 'interleaved': the sequences of a micro-batch are chosen₀, rejected₀, chosen₁, …; 'separated': all
            chosen ones, then all rejected ones. A list of 1-D samples is separated as a whole: all chosen ones first.

    Logits `[..., V/tp]` are sharded over TP, all else is replicated over it. Collectives: those of the sweep, and one
    all-reduce of a number a sequence over the context parallel group, forward and backward. Kept for backward: a few
    numbers a token. ValueError, on every rank, for an odd number of sequences in a micro-batch.
    """

    over: ClassVar[str] = 'pairs'
    pair_weight: float = 1.0
    nll_weight: float = 0.0

    def __init__(self, ignore_index: int = -100, layout: str = 'interleaved') -> None:
        super().__init__(ignore_index)
        self.layout = check_layout(layout)

    def pair_losses(self, chosen: Side, rejected: Side) -> Tensor:
        """The loss of each pair `[p]`, from the log-probs of its sequences."""
        raise NotImplementedError(f'{type(self).__name__} must define pair_losses(chosen, rejected)')

    def contribution(self, batch: TokenBatch, stats: TokenStats, **extra: Any) -> Tensor:
        pairs, logps = self.pairs(batch), stats.log_prob
        assert logps is not None
        return self.combined(pairs, self.pair_losses(*self.sides(pairs, logps)), logps)

    def pairs(self, batch: TokenBatch) -> Pairs:
        """The sequences of a micro-batch as pairs."""
        return Pairs(batch, check_layout(self.layout))

    @staticmethod
    def sides(pairs: Pairs, per_token: Tensor) -> tuple[Side, Side]:
        """Chosen and rejected sequences, from values of each token."""
        chosen, rejected = (Side(*side) for side in zip(pairs.sums(per_token.double()), pairs.tokens))
        return chosen, rejected

    def combined(self, pairs: Pairs, per_pair: Tensor, logps: Tensor) -> Tensor:
        """This micro-batch's summand of the loss: of the mean over pairs of `per_pair`, and of the mean of −log π over
        the tokens of chosen sequences."""
        loss = self.pair_weight * pairs.mean(per_pair)
        if self.nll_weight > 0:
            loss = loss - self.nll_weight * pairs.chosen_mean(logps)
        return loss.to(torch.promote_types(logps.dtype, torch.float32))


class Baselines(NamedTuple):
    """KTO's estimates of KL(π‖reference), from the chosen and from the rejected sequences of a batch, nats."""

    chosen: Tensor
    rejected: Tensor


DPOType = Callable[['DPOLoss', Side, Side, Baselines | None], Tensor]


def _sigmoid(loss: DPOLoss, chosen: Side, rejected: Side, _: Baselines | None) -> Tensor:
    """DPO, Rafailov et al., arXiv 2305.18290, eq. 7; with label smoothing, cDPO: Mitchell, 'A note on DPO with noisy
    preferences', 2023."""
    h = loss.beta * (chosen.total - rejected.total)
    eps = loss.label_smoothing
    sure = -F.logsigmoid(h)
    return sure if eps == 0 else (1 - eps) * sure - eps * F.logsigmoid(-h)


def _hinge(loss: DPOLoss, chosen: Side, rejected: Side, _: Baselines | None) -> Tensor:
    """SLiC, Zhao et al., arXiv 2305.10425, on log-ratios: Liu et al., arXiv 2309.06657, eq. 10."""
    return torch.relu(1 - loss.beta * (chosen.total - rejected.total))


def _ipo(loss: DPOLoss, chosen: Side, rejected: Side, _: Baselines | None) -> Tensor:
    """IPO, Azar et al., arXiv 2310.12036, eq. 17, on log-ratios per token, as its authors recommend."""
    return (chosen.mean - rejected.mean - 1 / (2 * loss.beta)) ** 2


def _kto(loss: DPOLoss, chosen: Side, rejected: Side, z: Baselines | None) -> Tensor:
    """KTO, Ethayarajh et al., arXiv 2402.01306, eq. 8, on pairs: each side is judged against the KL of the other."""
    assert z is not None
    wins = 1 - torch.sigmoid(loss.beta * (chosen.total - z.rejected))
    losses = 1 - torch.sigmoid(loss.beta * (z.chosen - rejected.total))
    return wins + losses


LOSS_TYPES: Mapping[str, DPOType] = {'sigmoid': _sigmoid, 'hinge': _hinge, 'ipo': _ipo, 'kto': _kto}
"""The loss of each pair, from the log-ratios log π − log reference of its sequences."""

TYPE_ALIASES = {'kto_pair': 'kto'}
WITH_BASELINES = ('kto',)
"""Types that need `Baselines`."""

SCOPES = ('batch', 'micro_batch')


class DPOLoss(PreferenceLossBase):
    """Direct preference optimisation (Rafailov et al., arXiv 2305.18290) and its variants.

    With r = Σ (log π − log reference) over the trained tokens of a sequence, r̄ = r ÷ their number, and h = r_chosen −
    r_rejected, the loss of a pair is

    - 'sigmoid': −log σ(βh); with label smoothing ε: −(1 − ε)·log σ(βh) − ε·log σ(−βh);
    - 'hinge': max(0, 1 − βh) (arXiv 2305.10425, 2309.06657);
    - 'ipo': (r̄_chosen − r̄_rejected − 1/(2β))² (arXiv 2310.12036);
    - 'kto' (also 'kto_pair'): [1 − σ(β(r_chosen − z_r))] + [1 − σ(β(z_c − r_rejected))], z_c = max(0, mean of
      r_chosen), z_r = max(0, mean of r_rejected), means over the global batch, detached (arXiv 2402.01306).

    The mean over pairs, plus sft_weight times the mean of −log π over the tokens of the chosen sequences.

    Args:
        loss_type: one of the above.
        beta: β > 0: how much it costs to leave the reference.
        sft_weight: weight of the likelihood of the chosen sequences.
        reference_free: take 0 as log-probs of the reference, and ignore those that are given (which are checked).
        label_smoothing: ε in [0, 0.5], the share of pairs taken to be labelled the wrong way round; 'sigmoid' only.
        ignore_index, layout: see `PreferenceLossBase`.
        scope: where the means of 'kto' are taken. 'batch': over the global batch, for which several micro-batches are
            run forward once more, first. 'micro_batch': over each micro-batch, cheaper, but then the loss depends on
            how the batch is split. Called by hand, the micro-batch is the batch.

    Call keywords, one of these three:
        ref_logps: log-probs of the reference at every token, nats, in any form that `align_extras` takes.
        ref_outputs: what the reference's forward pass returned, a dictionary with such `logps`, or a list of them.
        ref_chosen_logps, ref_rejected_logps: sums over the sequences of the reference, one number a pair, nats.

    Without them, and without `reference_free`, training is a ValueError. `forward_only` and a call by hand on ready
    `logps` give 0, so that log-probs can be had before there is a reference.
    """

    extras: ClassVar[Mapping[str, str]] = REFERENCE

    @checked_arguments
    def __init__(
        self,
        loss_type: str = 'sigmoid',
        beta: float = 0.1,
        sft_weight: float = 0.0,
        reference_free: bool = False,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        layout: str = 'interleaved',
        scope: str = 'batch',
        **unknown: Any,
    ) -> None:
        super().__init__(ignore_index, layout)
        self.loss_type = TYPE_ALIASES.get(str(loss_type), str(loss_type))
        if self.loss_type not in LOSS_TYPES:
            known = ', '.join(repr(name) for name in (*LOSS_TYPES, *TYPE_ALIASES))
            raise ValueError(f'loss_type must be one of {known}, got {loss_type!r}')
        self.beta, self.nll_weight = above_0('beta', beta), at_least_0('sft_weight', sft_weight)
        self.label_smoothing = at_least_0('label_smoothing', label_smoothing)
        if label_smoothing > 0.5:
            raise ValueError(f'label_smoothing must lie in [0, 0.5], got {label_smoothing!r}')
        if label_smoothing > 0 and self.loss_type != 'sigmoid':
            raise ValueError(
                f"label_smoothing is defined for loss_type='sigmoid' only, got {label_smoothing!r} for {loss_type!r}"
            )
        if scope not in SCOPES:
            raise ValueError(f"scope must be 'batch' or 'micro_batch', got {scope!r}")
        self.reference_free, self.scope = bool(reference_free), scope

    @property
    def couples(self) -> int:
        return len(Baselines._fields) if self.loss_type in WITH_BASELINES and self.scope == 'batch' else 0

    def check_call(self, given: Collection[str], training: bool) -> None:
        if self.reference_free:
            return
        if not check_reference(given) and training:
            raise ValueError(
                'DPOLoss must be given a reference: ref_logps=model.reference(...).logps(inputs), or ref_outputs, or '
                'ref_chosen_logps and ref_rejected_logps; or made with reference_free=True'
            )

    def contribution(self, batch: TokenBatch, stats: TokenStats, **extra: Any) -> Tensor:
        logps = stats.log_prob
        assert logps is not None
        ratios = self._log_ratios(batch, logps, extra)
        if ratios is None:
            return torch.where(torch.zeros_like(batch.mask), logps, 0).sum()
        pairs, chosen, rejected = ratios
        z = None
        if self.loss_type in WITH_BASELINES:
            totals = batch.totals if self.couples and batch.totals is not None else None
            z = self._baselines(pairs, chosen, rejected, totals)
        return self.combined(pairs, LOSS_TYPES[self.loss_type](self, chosen, rejected, z), logps)

    def totals(self, batch: TokenBatch, stats: TokenStats, **extra: Any) -> Tensor:
        """This micro-batch's summands of the sums of r_chosen and of r_rejected, float64 `[2]`."""
        assert stats.log_prob is not None
        ratios = self._log_ratios(batch, stats.log_prob, extra)
        if ratios is None:
            return stats.log_prob.new_zeros(2, dtype=torch.float64)
        pairs, *sides = ratios
        return torch.stack([pairs.total(side.total.detach()) for side in sides])

    def _baselines(self, pairs: Pairs, chosen: Side, rejected: Side, totals: Tensor | None) -> Baselines:
        """From the sums over the global batch; None: over this micro-batch."""
        if totals is not None:
            means = totals / pairs.count
        else:
            sums = [torch.where(pairs.real, side.total.detach(), 0).sum() for side in (chosen, rejected)]
            means = torch.stack(sums) / pairs.real.sum().clamp(min=1)
        return Baselines(*means.clamp(min=0).to(chosen.total))

    def _log_ratios(
        self, batch: TokenBatch, logps: Tensor, extra: Mapping[str, Any]
    ) -> tuple[Pairs, Side, Side] | None:
        """None without a reference."""
        pairs = self.pairs(batch)
        if self.reference_free:
            return pairs, *self.sides(pairs, logps)
        per_token = extra.get('ref_logps', extra.get('ref_outputs'))
        if per_token is not None:
            return pairs, *self.sides(pairs, logps.double() - per_token.to(logps.device).double())
        if extra.get('ref_chosen_logps') is None:
            return None
        chosen, rejected = (
            side._replace(total=side.total - torch.where(pairs.real, extra[key].to(side.total), 0))
            for side, key in zip(self.sides(pairs, logps), ('ref_chosen_logps', 'ref_rejected_logps'))
        )
        return pairs, chosen, rejected


class SimPOLoss(PreferenceLossBase):
    """Simple preference optimisation (Meng et al., arXiv 2405.14734, eq. 6): −log σ(β·(l_chosen − l_rejected) − γ), l
    being the mean of log π over the tokens of a sequence.

    Args:
        beta: β > 0.
        gamma: γ, the margin that is asked for.
        ignore_index, layout: see `PreferenceLossBase`.
    """

    @checked_arguments
    def __init__(
        self,
        beta: float = 2.5,
        gamma: float = 0.5,
        ignore_index: int = -100,
        layout: str = 'interleaved',
        **unknown: Any,
    ) -> None:
        super().__init__(ignore_index, layout)
        self.beta = above_0('beta', beta)
        if not isinstance(gamma, (int, float)) or not math.isfinite(gamma):
            raise ValueError(f'gamma must be a finite number, got {gamma!r}')
        self.gamma = gamma

    def pair_losses(self, chosen: Side, rejected: Side) -> Tensor:
        return -F.logsigmoid(self.beta * (chosen.mean - rejected.mean) - self.gamma)


class CPOLoss(PreferenceLossBase):
    """Contrastive preference optimisation (Xu et al., arXiv 2401.08417, eq. 3 to 6): −log σ(β·(log π of the chosen
    sequence − that of the rejected one)), plus cpo_alpha times the mean of −log π over the tokens of the chosen ones.

    Args:
        beta: β > 0.
        cpo_alpha: also `bc_coef`; weight of the likelihood of the chosen sequences.
        ignore_index, layout: see `PreferenceLossBase`.
    """

    @checked_arguments
    def __init__(
        self,
        beta: float = 0.1,
        cpo_alpha: float = 1.0,
        ignore_index: int = -100,
        layout: str = 'interleaved',
        **unknown: Any,
    ) -> None:
        super().__init__(ignore_index, layout)
        self.beta, self.nll_weight = above_0('beta', beta), at_least_0('cpo_alpha', cpo_alpha)

    def pair_losses(self, chosen: Side, rejected: Side) -> Tensor:
        return -F.logsigmoid(self.beta * (chosen.total - rejected.total))


class ORPOLoss(PreferenceLossBase):
    """Odds ratio preference optimisation (Hong et al., arXiv 2403.07691, eq. 6 and 7): the mean of −log π over the
    tokens of the chosen sequences, plus β times the mean over pairs of −log σ(log odds_chosen − log odds_rejected).

    odds = p/(1 − p), with log p the mean log π per token, bounded to at most −1e-7, so that a sure sequence has finite
    odds.

    Args:
        beta: also `lambda_orpo`; weight of the odds ratio.
        ignore_index, layout: see `PreferenceLossBase`.
    """

    nll_weight = 1.0

    @checked_arguments
    def __init__(
        self, beta: float = 0.1, ignore_index: int = -100, layout: str = 'interleaved', **unknown: Any
    ) -> None:
        super().__init__(ignore_index, layout)
        self.beta = self.pair_weight = at_least_0('beta', beta)

    def pair_losses(self, chosen: Side, rejected: Side) -> Tensor:
        return -F.logsigmoid(log_odds(chosen.mean) - log_odds(rejected.mean))


def log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 − p)) from log p < 0, to full precision for p → 0 and p → 1; of log p > −1e-7, which is as good as
    sure, 1 − p is taken to be 1e-7, without a gradient."""
    x = log_p.clamp(max=NEAREST)
    near_1 = x > -math.log(2.0)
    log_rest = torch.where(
        near_1,
        torch.log(-torch.expm1(torch.where(near_1, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near_1, -1.0, x))),
    )
    return log_p - log_rest
