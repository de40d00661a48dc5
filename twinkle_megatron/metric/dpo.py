"""What a policy prefers: log-probs and implicit rewards of chosen and rejected sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..arguments import above_0, checked_arguments
from ..batch import check_layout, counted_pairs, split_by_pair, split_pairs
from ..batch.reference import REFERENCE, check_reference
from ..groups import group_size
from .base import checked_keywords
from .features import IGNORED, Features, aligned, each_micro_batch
from .state import SUM, Field
from .sweep import SweepMetric

PERCENT = 'rewards/accuracies'


class _Sequences(NamedTuple):
    """Of one micro-batch, `[n]`: log-probs of its sequences, those of the reference or None, trained tokens."""

    logps: Tensor
    reference: Tensor | None
    tokens: Tensor


class DPOMetric(SweepMetric):
    """Means over the pairs of the global batch. The log-prob of a sequence is the sum over its trained tokens, nats.

    - `chosen_logps`, `rejected_logps`: log π; `ref_chosen_logps`, `ref_rejected_logps`: log-probs of the reference;
    - `rewards/chosen`, `rewards/rejected`: the implicit rewards β·(log π − log reference);
    - `margin`: the reward of the chosen sequence − that of the rejected one; `accuracy`: the share of pairs where it is
      above 0.

    And Twinkle's names of the same: `logps/chosen`, `logps/rejected`, `logps/ref_chosen`, `logps/ref_rejected` (2
    decimals), `rewards/margins`, `rewards/accuracies` (a share, shown in percent).

    Without a reference only the log-probs of the policy are given, without pairs nothing. A pair without any trained
    token does not count.

    Args:
        device_mesh, process_group: as of every metric.
        beta: β of the rewards, that of the loss.
        ignore_index: label of tokens that do not count.
        layout: 'interleaved': the sequences of a micro-batch are chosen₀, rejected₀, chosen₁, …; 'separated': all
            chosen ones, then all rejected ones. In a list of 1-D samples, pairs lie so in the list as a whole.

    With context parallelism `accumulate` is collective over that group: one all-reduce of a number a sequence each for
    policy and reference.
    """

    fields: ClassVar[Mapping[str, Field]] = {
        'pairs': SUM, 'chosen': SUM, 'rejected': SUM, 'ref_pairs': SUM, 'ref_chosen': SUM, 'ref_rejected': SUM,
        'reward_chosen': SUM, 'reward_rejected': SUM, 'preferred': SUM,
    }  # fmt: skip
    extras: ClassVar[Mapping[str, str]] = REFERENCE

    @checked_arguments
    def __init__(
        self,
        device_mesh: Any = None,
        process_group: ProcessGroup | None = None,
        beta: float = 0.1,
        layout: str = 'interleaved',
        ignore_index: int = IGNORED,
        **unknown: Any,
    ) -> None:
        super().__init__(device_mesh, process_group)
        self.beta, self.layout, self.ignore_index = above_0('beta', beta), check_layout(layout), ignore_index

    @checked_keywords
    def accumulate(
        self,
        inputs: Any = None,
        outputs: Any = None,
        *,
        ref_outputs: Any = None,
        ref_logps: Any = None,
        ref_chosen_logps: Any = None,
        ref_rejected_logps: Any = None,
    ) -> None:
        """Takes in one micro-batch, or a list of them with their outputs as lists, or rows of one tensor.

        Args:
            inputs: `labels`, already shifted, and what says how a packed row is packed.
            outputs: `token_stats`, or ready `logps`, or `logits` (with their `vocab_shard`). Without any of these
                nothing is taken in.
            ref_outputs, ref_logps: log-probs of the reference at every token, see `DPOLoss`.
            ref_chosen_logps, ref_rejected_logps: its sums over the sequences, one number a pair.
        """
        if not self.is_last_stage:
            return
        ways = zip(REFERENCE, (ref_outputs, ref_logps, ref_chosen_logps, ref_rejected_logps), strict=True)
        check_reference([key for key, value in ways if value is not None])
        micro_batches = [
            (self.marked(features), output)
            for features, output in each_micro_batch(inputs, outputs, ('token_stats', 'logps', 'logits'))
            if any(output.get(key) is not None for key in ('token_stats', 'logps', 'logits'))
        ]
        per_token = aligned(
            [features for features, _ in micro_batches], self.extras, self.ignore_index, ref_logps=ref_logps,
            ref_outputs=ref_outputs,
        )  # fmt: skip
        found = [self._sequences(*both, given) for both, given in zip(micro_batches, per_token)]
        if len(found) > 1 and all(len(one.tokens) == 1 for one in found):  # samples
            found = [_joined(found)]
        pairs = [len(one.tokens) // 2 for one in found]
        chosen, rejected = (
            [None] * len(found) if ref is None else split_by_pair(key, ref, pairs)
            for key, ref in (('ref_chosen_logps', ref_chosen_logps), ('ref_rejected_logps', ref_rejected_logps))
        )
        for one, *reference in zip(found, chosen, rejected):
            self._fold(one, *reference)

    def figures(self, totals: Mapping[str, float]) -> dict[str, float]:
        t = totals
        if t['pairs'] == 0:
            return {}
        found = {f'{side}_logps': t[side] / t['pairs'] for side in ('chosen', 'rejected')}
        if t['ref_pairs'] > 0:
            n = t['ref_pairs']
            rewards = {side: t[f'reward_{side}'] / n for side in ('chosen', 'rejected')}
            found |= {f'ref_{side}_logps': t[f'ref_{side}'] / n for side in ('chosen', 'rejected')}
            found |= {f'rewards/{side}': reward for side, reward in rewards.items()}
            found |= {'accuracy': t['preferred'] / n, 'margin': rewards['chosen'] - rewards['rejected']}
        names = {
            'logps/chosen': 'chosen_logps', 'logps/rejected': 'rejected_logps', 'logps/ref_chosen': 'ref_chosen_logps',
            'logps/ref_rejected': 'ref_rejected_logps', 'rewards/margins': 'margin', PERCENT: 'accuracy',
        }  # fmt: skip
        return found | {theirs: found[name] for theirs, name in names.items() if name in found}

    def display(self, totals: Mapping[str, float]) -> dict[str, Any]:
        """4 decimals, or Twinkle's."""

        def shown(name: str, value: float) -> str:
            if name == PERCENT:
                return f'{100 * value:.1f}%'
            return f'{value:.2f}' if name.startswith('logps/') else f'{value:.4f}'

        return {name: shown(name, value) for name, value in self.figures(totals).items()}

    def _sequences(self, features: Features, output: Features, given: Mapping[str, Any]) -> _Sequences:
        batch, stats = self.read(features, output)
        logps = cast(Tensor, stats.log_prob)
        ref = given.get('ref_logps', given.get('ref_outputs'))
        ref = None if ref is None else batch.sequence_sum(ref.to(logps.device).double())
        return _Sequences(batch.sequence_sum(logps.double()), ref, batch.sequence_tokens)

    def _fold(self, one: _Sequences, ref_chosen: Tensor | None, ref_rejected: Tensor | None) -> None:
        chosen, rejected = split_pairs(one.logps, self.layout)
        real = counted_pairs(one.tokens, self.layout)
        share = group_size(self.mesh_group('cp'))  # each of these ranks knows all of the sequences

        def total(values: Tensor) -> Tensor:
            return torch.where(real, values, 0).sum(dtype=torch.float64) / share

        self.state.fold(pairs=total(real), chosen=total(chosen), rejected=total(rejected))
        if one.reference is not None:
            ref_chosen, ref_rejected = split_pairs(one.reference, self.layout)
        if ref_chosen is None or ref_rejected is None:
            return
        ref_chosen, ref_rejected = ref_chosen.to(chosen), ref_rejected.to(rejected)
        rewards = self.beta * (chosen - ref_chosen), self.beta * (rejected - ref_rejected)
        self.state.fold(
            ref_pairs=total(real),
            ref_chosen=total(ref_chosen),
            ref_rejected=total(ref_rejected),
            reward_chosen=total(rewards[0]),
            reward_rejected=total(rewards[1]),
            preferred=total(rewards[0] > rewards[1]),
        )


def _joined(samples: Sequence[_Sequences]) -> _Sequences:
    """Samples of a list as one micro-batch."""
    references = [one.reference for one in samples if one.reference is not None]
    return _Sequences(
        torch.cat([one.logps for one in samples]),
        torch.cat(references) if len(references) == len(samples) else None,
        torch.cat([one.tokens for one in samples]),
    )
