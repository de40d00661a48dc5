"""How far the policy has moved from the one that sampled: metrics of GRPO, GSPO and CISPO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..arguments import above_0, at_least_0, checked_arguments
from ..batch import LOG_PROBS, PER_TOKEN, TokenBatch
from ..groups import group_size
from .base import checked_keywords
from .features import IGNORED, Features, aligned, each_micro_batch
from .state import MAXIMUM, SUM, Field
from .sweep import SweepMetric

if TYPE_CHECKING:
    pass

_FARTHEST = 20.0
"""Nats. Log-ratios are bounded there, as in the losses."""


class Policy(NamedTuple):
    """One micro-batch, per token `[b, s]`; `log_ratio` and what follows is None without `old_logps`."""

    batch: TokenBatch
    new: Tensor
    plain: Tensor
    entropy: Tensor | None
    old: Tensor | None
    log_ratio: Tensor | None
    advantages: Tensor | None


class GRPOMetric(SweepMetric):
    """Statistics of the policy over the trained tokens of the global batch, nats.

    With log π the log-prob of a token now, `old` that of the policy that sampled it, d = log π − old bounded to ±20 and
    r = exp(d), means over tokens:

    - `train/mean_new_logp`: log π at temperature 1; `train/policy_confidence`: its exponential;
    - `train/mean_old_logp`, `train/logp_diff_mean`: old and log π − old, at the temperature of the loss;
    - `train/approx_kl`: r − 1 − d (k3, Schulman), an estimate of KL(old‖π); `train/token_kl_max`: the highest of a
      token, `train/token_ratio_max`: the highest r;
    - `train/entropy`;
    - `train/clip_ratio_low`: the share with r < 1 − epsilon and A < 0; `train/clip_ratio_high`: with r > 1 +
      epsilon_high and A > 0; `train/clip_ratio`: both;
    - `_high_kl_records`: the `top_k_kl` tokens with the highest KL, highest first: gsi (number of the sequence in the
      global batch, data parallel ranks one after the other), pos (in its row, or packed sequence), token_id, kl, ratio,
      logp_new, logp_old.

    What was not given (old_logps, advantages, entropies) is left out, as is everything without tokens.

    Args:
        epsilon, epsilon_high: clip range of the loss; epsilon_high None: epsilon.
        temperature: that of the sampler, for log-probs taken from `outputs['logits']`. Inside `MegatronModel` they come
            from the sweep of the loss, at its temperature. Ready `logps` stay at theirs, as all that is known of them.
        top_k_kl: how many tokens to record.
        ignore_index: label of tokens that do not count.
    """

    fields: ClassVar[Mapping[str, Field]] = {
        'tokens': SUM, 'plain': SUM, 'old_tokens': SUM, 'old': SUM, 'diff': SUM, 'kl': SUM, 'kl_max': MAXIMUM,
        'ratio_max': MAXIMUM, 'entropy_tokens': SUM, 'entropy': SUM, 'clipped_of': SUM, 'low': SUM, 'high': SUM,
    }  # fmt: skip
    needs: ClassVar[frozenset[str]] = frozenset({'entropy', 'plain_log_prob'})
    extras: ClassVar[Mapping[str, str]] = {'old_logps': LOG_PROBS, 'advantages': PER_TOKEN}

    @checked_arguments
    def __init__(
        self,
        device_mesh: Any = None,
        process_group: ProcessGroup | None = None,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        temperature: float = 1.0,
        top_k_kl: int = 0,
        ignore_index: int = IGNORED,
        **unknown: Any,
    ) -> None:
        super().__init__(device_mesh, process_group)
        if not isinstance(top_k_kl, int) or top_k_kl < 0:
            raise ValueError(f'top_k_kl must be an int >= 0, got {top_k_kl!r}')
        self.epsilon = at_least_0('epsilon', epsilon)
        self.epsilon_high = at_least_0('epsilon_high', epsilon if epsilon_high is None else epsilon_high)
        self.temperature, self.top_k_kl, self.ignore_index = above_0('temperature', temperature), top_k_kl, ignore_index
        self._records: list[dict[str, Any]] = []
        self._sequences = 0

    @checked_keywords
    def accumulate(
        self, inputs: Any = None, outputs: Any = None, *, old_logps: Any = None, advantages: Any = None
    ) -> None:
        """Takes in one micro-batch, or a list of them with their outputs as lists, or rows of one tensor.

        Args:
            inputs: `labels`, already shifted, and what says how a packed row is packed.
            outputs: `token_stats`, or `logits` (with their `vocab_shard`), or ready `logps` and `entropies`.
            old_logps, advantages: of all these micro-batches, in any form that `align_extras` takes.
        """
        if not self.is_last_stage:
            return
        given = each_micro_batch(inputs, outputs, ('token_stats', 'logits', 'logps', 'entropies'))
        pairs = [(self.marked(features), output) for features, output in given]
        extra = aligned([features for features, _ in pairs], self.extras, self.ignore_index, old_logps=old_logps,
                        advantages=advantages)  # fmt: skip
        for (features, output), mine in zip(pairs, extra):
            policy = self._policy(features, output, mine)
            self._fold(policy)
            if self.top_k_kl > 0 and policy.log_ratio is not None:
                self._record(policy, features)
            self._sequences += policy.batch.sequence_tokens.numel()

    def clipped(self, policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
        """What is clipped low, what high, and of how many: sums over this micro-batch."""
        assert policy.log_ratio is not None
        assert policy.advantages is not None
        low, high = self._beyond(policy.log_ratio)
        mask = policy.batch.mask
        down, up = low & (policy.advantages < 0) & mask, high & (policy.advantages > 0) & mask
        return down.sum(), up.sum(), mask.sum()

    def reset(self) -> None:
        super().reset()
        self._records, self._sequences = [], 0

    def calculate(self) -> dict[str, Any]:
        """The statistics as floats, the same on every rank, and a reset. Collective."""
        records = self._highest()
        result: dict[str, Any] = self.values()
        if records:
            result['_high_kl_records'] = records
        self.reset()
        return result

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), 'records': self._records, 'sequences': self._sequences}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        super().load_state_dict(kept)
        self._records, self._sequences = list(kept['records']), kept['sequences']

    def figures(self, totals: Mapping[str, float]) -> dict[str, float]:
        t = totals
        if t['tokens'] == 0:
            return {}
        mean = t['plain'] / t['tokens']
        found = {'policy_confidence': math.exp(mean), 'mean_new_logp': mean}
        if t['old_tokens'] > 0:
            found['mean_old_logp'] = t['old'] / t['old_tokens']
            found['logp_diff_mean'] = t['diff'] / t['old_tokens']
            found['approx_kl'] = t['kl'] / t['old_tokens']
            found |= {'token_kl_max': t['kl_max'], 'token_ratio_max': t['ratio_max']}
        if t['entropy_tokens'] > 0:
            found['entropy'] = t['entropy'] / t['entropy_tokens']
        if t['clipped_of'] > 0:
            low, high = t['low'] / t['clipped_of'], t['high'] / t['clipped_of']
            found |= {'clip_ratio_low': low, 'clip_ratio_high': high, 'clip_ratio': low + high}
        return {f'train/{name}': value for name, value in found.items()}

    def _policy(self, features: Features, output: Features, given: Mapping[str, Any]) -> Policy:
        batch, stats = self.read(features, output)
        new = cast(Tensor, stats.log_prob)
        old, advantages = (None if x is None else x.to(new) for x in (given.get('old_logps'), given.get('advantages')))
        log_ratio = None if old is None else (new - old).clamp(-_FARTHEST, _FARTHEST)
        plain = new if stats.plain_log_prob is None else stats.plain_log_prob
        return Policy(batch, new, plain, stats.entropy, old, log_ratio, advantages)

    def _fold(self, policy: Policy) -> None:
        mask = policy.batch.mask
        count = mask.sum()

        def total(values: Tensor) -> Tensor:
            return torch.where(mask, values, 0).sum(dtype=torch.float64)

        self.state.fold(tokens=count, plain=total(policy.plain))
        if policy.entropy is not None:
            self.state.fold(entropy_tokens=count, entropy=total(policy.entropy))
        if policy.log_ratio is not None and policy.old is not None:
            d = policy.log_ratio
            kl = torch.expm1(d) - d
            highest = torch.where(mask, kl, 0).amax() if kl.numel() else 0.0
            ratio = torch.where(mask, d.exp(), 0).amax() if kl.numel() else 0.0
            self.state.fold(old_tokens=count, old=total(policy.old), diff=total(policy.new - policy.old))
            self.state.fold(kl=total(kl), kl_max=highest, ratio_max=ratio)
            if policy.advantages is not None:
                low, high, of = self.clipped(policy)
                self.state.fold(low=low, high=high, clipped_of=of)

    def _beyond(self, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        ratio = log_ratio.exp()
        return ratio < 1 - self.epsilon, ratio > 1 + self.epsilon_high

    def _record(self, policy: Policy, features: Features) -> None:
        """Keeps this rank's highest. One host read a micro-batch."""
        assert policy.log_ratio is not None
        assert policy.old is not None
        d, labels = policy.log_ratio, policy.batch.labels
        kl = torch.where(policy.batch.mask, torch.expm1(d) - d, -1).reshape(-1)
        positions = features.get('position_ids')
        if positions is None or tuple(np.shape(positions)) != tuple(labels.shape):
            positions = _within_sequences(policy.batch.sequence_ids)
        positions = torch.as_tensor(positions)
        best = kl.sort(descending=True, stable=True)  # among equals the first: far-off tokens all have the bound's KL
        values, indices = best.values[: self.top_k_kl], best.indices[: self.top_k_kl]
        columns = [policy.batch.sequence_ids, positions.to(labels.device), labels, d.exp(), policy.new, policy.old]
        rows = [values.tolist(), *(column.reshape(-1)[indices].tolist() for column in columns)]
        for value, sequence, position, label, ratio, new, old in zip(*rows):
            if value > 0:
                record = {'gsi': self._sequences + sequence, 'pos': position, 'token_id': label, 'kl': value}
                self._records.append({**record, 'ratio': ratio, 'logp_new': new, 'logp_old': old})
        self._records = _sorted(self._records)[: self.top_k_kl]

    def _highest(self) -> list[dict[str, Any]]:
        """Of all ranks. Context parallel ranks hold other tokens of the same sequences."""
        if self.top_k_kl == 0:
            return []
        rank, cp = self._place()
        gathered = self.gather_results([(rank // cp, self._sequences, self._records)])
        sequences = {place: count for place, count, _ in gathered}
        first = {place: sum(count for other, count in sequences.items() if other < place) for place in sequences}
        every = [{**r, 'gsi': r['gsi'] + first[place]} for place, _, records in gathered for r in records]
        return _sorted(every)[: self.top_k_kl]

    def _place(self) -> tuple[int, int]:
        group = self._reduced_over()
        cp = group_size(self.mesh_group('cp'))
        rank = 0 if group is None else torch.distributed.get_rank(group)
        return rank, cp if group_size(group) % cp == 0 and group_size(group) > 1 else 1


class GSPOMetric(GRPOMetric):
    """`GRPOMetric` whose clip ratios are shares of the sequences: those whose geometric mean of r leaves the range.

    With context parallelism its `accumulate` is collective over that group: one all-reduce a micro-batch.
    """

    def clipped(self, policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
        assert policy.log_ratio is not None
        assert policy.advantages is not None
        batch = policy.batch
        low, high = self._beyond(batch.sequence_mean(policy.log_ratio))
        advantage = batch.sequence_mean(policy.advantages)
        real = batch.sequence_tokens > 0
        shared = group_size(batch.cp)  # each of these ranks counts its share of the same sequences
        down, up = low & (advantage < 0) & real, high & (advantage > 0) & real
        return down.sum() / shared, up.sum() / shared, real.sum() / shared


class CISPOMetric(GRPOMetric):
    """`GRPOMetric` whose clip ratios do not look at the sign of the advantage: `clip_ratio_high` is what `CISPOLoss`
    caps, `clip_ratio_low` what lies under 1 − epsilon, which it leaves alone."""

    def clipped(self, policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
        assert policy.log_ratio is not None
        low, high = self._beyond(policy.log_ratio)
        mask = policy.batch.mask
        return (low & mask).sum(), (high & mask).sum(), mask.sum()


def _within_sequences(ids: Tensor) -> Tensor:
    """The position of each token in its sequence, from the numbers of the sequences `[..., s]`."""
    columns = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
    last = int(ids.max()) + 1 if ids.numel() else 0
    first = columns.new_full((last,), ids.shape[-1]).scatter_reduce(0, ids.reshape(-1), columns.reshape(-1), 'amin')
    return columns - first[ids]


def _sorted(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda r: (-r['kl'], r['gsi'], r['pos']))
