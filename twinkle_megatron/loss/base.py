"""What a loss is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..arguments import checked_arguments, reject_unknown
from ..batch import CONSTANT, LOG_PROBS, OUTPUTS, PER_TOKEN, TokenBatch, WholeRows, align_extras, check_pairs
from ..data_format import InputFeature, LossOutput, ModelOutput
from ..groups import tensor_parallel_group
from ..vocab_parallel import Logits, TokenStats, VocabShard, token_stats
from ..vocab_parallel.logits import local_size

REDUCTIONS = ('mean', 'sum', 'none')


class Loss:
    """A loss is called as `loss(inputs, outputs, **extra)` and returns `{'loss': ..., 'num_tokens': ...}`.

    A subclass overrides `__call__`; a plain function of the same form that returns a scalar tensor will do too.
    `inputs['labels']` are already shifted and aligned with the logits. `num_tokens` 0 says that `loss` is a mean,
    above 0 that it is a sum over that many tokens, which `MegatronModel` divides by the tokens of the global batch; of
    what a head gives one a sequence, a sum over sequences.
    """

    reads: ClassVar[tuple[str, ...] | None] = None
    """What it can be computed from: 'logits', or 'embeddings' or 'values' of a head in their place; None: of whatever
    `MegatronModel` has."""

    @property
    def needs(self) -> frozenset[str]:
        """Statistics that `MegatronModel` has to find in its sweep over the logits, by their names in `TokenStats`."""
        return frozenset({'log_prob'})

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, **extra: Any) -> LossOutput:
        raise NotImplementedError(f'{type(self).__name__} must define __call__(inputs, outputs, **extra)')


class SweepLoss(Loss):
    """A loss of the per-token statistics that one sweep over the logits finds. A subclass gives `contribution`.

    Called by hand, `outputs` holds `token_stats`, or `logits`, or ready `logps` `[...]` (and `entropies`). Logits are
    this rank's vocabulary shard, as `outputs['vocab_shard']` says or, without it, when Megatron's tensor parallel group
    has several ranks. The call's keywords are those of `extras`.
    """

    reads = ('logits',)
    temperature = 1.0
    chunk_size: int | None = None
    inplace_backward = False

    extras: ClassVar[Mapping[str, str]] = {}
    """The keywords of a call, and what each of them is: see `align_extras`."""

    over: ClassVar[str] = 'tokens'
    """Of what it is a mean, 'tokens', 'sequences' or 'pairs' (names in `Counts`): how calls weigh that are accumulated
    before one step."""

    reads_logits: ClassVar[bool] = False
    """Whether `contribution` is given the logits and their `shard` beside the statistics."""

    layout: str | None = None
    """Where the sequences of a pair lie, 'interleaved' or 'separated'; None: it knows no pairs."""

    def __init__(self, ignore_index: int = -100) -> None:
        if not isinstance(ignore_index, int):
            raise ValueError(f'ignore_index must be an int, got {ignore_index!r}')
        self.ignore_index = ignore_index

    def contribution(self, batch: TokenBatch, stats: TokenStats, **extra: Any) -> Tensor:
        """This micro-batch's summand of the loss: summed over micro-batches and DP×CP ranks it is the loss of the
        global batch. `extra` holds what was given of `extras`, aligned with `batch.labels`."""
        raise NotImplementedError(f'{type(self).__name__} must define contribution(batch, stats)')

    @property
    def couples(self) -> int:
        """How many sums over the global batch `contribution` needs, as `TokenBatch.totals`; 0: none."""
        return 0

    def totals(self, batch: TokenBatch, stats: TokenStats, **extra: Any) -> Tensor:
        """This micro-batch's summands of those sums, `[couples]`.

        `MegatronModel` finds them in a forward pass of their own, where there are several micro-batches.
        """
        raise NotImplementedError(f'{type(self).__name__} couples its batch and must define totals(batch, stats)')

    def check_call(self, given: Collection[str], training: bool) -> None:
        """ValueError unless these keywords of a call go together; `training`: a gradient is wanted."""

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, **extra: Any) -> LossOutput:
        batch, stats, extra = self._by_hand(inputs, outputs, extra)
        return LossOutput(loss=self.contribution(batch, stats, **extra), num_tokens=0)

    def _by_hand(
        self, inputs: InputFeature, outputs: ModelOutput, extra: dict[str, Any]
    ) -> tuple[TokenBatch, TokenStats, dict[str, Any]]:
        training = outputs.get('logits') is not None and torch.is_grad_enabled()
        batch, given = self.aligned(inputs, extra, training)
        stats = self._statistics(batch, outputs)
        assert stats.log_prob is not None
        return replace(batch, labels=batch.labels.to(stats.log_prob.device)), stats, given

    def aligned(
        self, inputs: InputFeature, extra: Mapping[str, Any], training: bool
    ) -> tuple[TokenBatch, dict[str, Any]]:
        """Of a call by hand: its tokens, and the keywords that were given, aligned with their labels. ValueError for
        keywords that the loss does not take, or that do not go together."""
        reject_unknown(extra, self.extras, f'{type(self).__name__}.__call__')
        batch = TokenBatch.of(inputs, self.ignore_index)
        given = {key: value for key, value in extra.items() if value is not None}
        self.check_call(given, training)
        if any(self.extras[key] != CONSTANT for key in given):
            whole = WholeRows.of({**inputs, 'labels': batch.labels}, self.ignore_index)
            if self.layout is not None:
                check_pairs(whole.count)
            (given,) = align_extras(given, self.extras, [whole])
            along = (PER_TOKEN, LOG_PROBS, OUTPUTS)
            given = {k: v.view(batch.labels.shape) if self.extras[k] in along else v for k, v in given.items()}
        return batch, given

    def _statistics(self, batch: TokenBatch, outputs: ModelOutput) -> TokenStats:
        ready = outputs.get('token_stats')
        if ready is not None:
            return ready
        logits = outputs.get('logits')
        if logits is not None:
            shard = outputs.get('vocab_shard') or VocabShard.from_group(local_size(logits), tensor_parallel_group())
            return sweep_for(self, logits, batch.labels.to(logits.device), shard, self.needs)
        logps = outputs.get('logps')
        if logps is None:
            raise ValueError(f"outputs must hold 'logits' or 'logps', got the keys {sorted(outputs)}")
        found = {'log_prob': logps, 'entropy': outputs.get('entropies')}
        lacks = sorted(name for name in self.needs if found.get(name) is None)
        if lacks:
            raise ValueError(
                f"{type(self).__name__} needs {lacks} of the whole distribution: give outputs['logits'], from 'logps' "
                'alone they cannot be had'
            )
        ignored = batch.labels.to(logps.device) == self.ignore_index
        for name, values in found.items():
            if values is not None and values.shape != batch.labels.shape:
                key = {'log_prob': 'logps', 'entropy': 'entropies'}[name]
                raise ValueError(
                    f'{key} must have the shape of labels, {tuple(batch.labels.shape)}, got {tuple(values.shape)}'
                )

        def counted(values: Tensor) -> Tensor:  # sums of half precision would overflow
            return values.to(torch.promote_types(values.dtype, torch.float32)).masked_fill(ignored, 0)

        return TokenStats(**{name: None if x is None else counted(x) for name, x in found.items()})


class TokenLoss(SweepLoss):
    """A mean of per-token values over the trained tokens. A subclass gives the value of each token.

    `reduction`: 'mean' over the trained tokens, 0 when there are none (torch gives NaN there); 'sum', which reports how
    many tokens it sums over; 'none', the per-token tensor. Inside `MegatronModel` 'mean' and 'sum' both train the mean
    over the tokens of the global batch, and 'none' is refused.
    """

    @checked_arguments
    def __init__(self, ignore_index: int = -100, reduction: str = 'mean', **unknown: Any) -> None:
        super().__init__(ignore_index)
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of 'mean', 'sum', 'none', got {reduction!r}")
        self.reduction = reduction

    def token_losses(self, stats: TokenStats) -> Tensor:
        """The loss of each token `[...]`, 0 where ignored."""
        raise NotImplementedError

    def contribution(self, batch: TokenBatch, stats: TokenStats, **extra: Any) -> Tensor:
        return self.token_losses(stats).sum() / batch.tokens

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, **extra: Any) -> LossOutput:
        batch, stats, _ = self._by_hand(inputs, outputs, extra)
        if self.reduction == 'none':
            return LossOutput(loss=self.token_losses(stats), num_tokens=0)
        if self.reduction == 'sum':
            return LossOutput(loss=self.token_losses(stats).sum(), num_tokens=batch.count.clamp(min=1))
        return LossOutput(loss=self.contribution(batch, stats), num_tokens=0)


def sweep_for(
    loss: Callable[..., Any], logits: Logits, labels: Tensor, shard: VocabShard, needs: Collection[str]
) -> TokenStats:
    """One sweep over the logits at this loss's temperature, tile size and `ignore_index`, which finds all of `needs`.

    Only a `SweepLoss` may have the gradient written into the logits' storage: it does not read them again. (A linear
    head has no such storage.)
    """
    return token_stats(
        logits,
        labels,
        shard=shard,
        temperature=getattr(loss, 'temperature', 1.0),
        ignore_index=getattr(loss, 'ignore_index', -100),
        entropy='entropy' in needs,
        mean_logit='mean_logit' in needs,
        argmax='argmax' in needs,
        plain_log_prob='plain_log_prob' in needs,
        chunk_size=getattr(loss, 'chunk_size', None),
        reuse_storage=isinstance(loss, SweepLoss) and loss.inplace_backward,
    )
