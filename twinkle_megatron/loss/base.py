"""What a loss is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from ..arguments import reject_unknown
from ..batch import TokenBatch
from ..data_format import InputFeature, LossOutput, ModelOutput
from ..groups import tensor_parallel_group
from ..vocab_parallel import Logits, TokenStats, VocabShard, token_stats
from ..vocab_parallel.logits import local_size

REDUCTIONS = ('mean', 'sum', 'none')


class Loss:
    """A loss is called as `loss(inputs, outputs, **extra)` and returns `{'loss': ..., 'num_tokens': ...}`.

    A subclass overrides `__call__`; a plain function of the same form that returns a scalar tensor will do too.
    `inputs['labels']` are already shifted and aligned with the logits. `num_tokens` 0 says that `loss` is a mean,
    above 0 that it is a sum over that many tokens, which `MegatronModel` divides by the tokens of the global batch.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Statistics that `MegatronModel` has to find in its sweep over the logits, by their names in `TokenStats`."""
        return frozenset({'log_prob'})

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, **extra: Any) -> LossOutput:
        raise NotImplementedError(f'{type(self).__name__} must define __call__(inputs, outputs, **extra)')


class TokenLoss(Loss):
    """A mean of per-token values over the trained tokens. A subclass gives the value of each token.

    `reduction`: 'mean' over the trained tokens, 0 when there are none (torch gives NaN there); 'sum', which reports how
    many tokens it sums over; 'none', the per-token tensor. Inside `MegatronModel` 'mean' and 'sum' both train the mean
    over the tokens of the global batch, and 'none' is refused.

    Called by hand, `outputs` holds `token_stats`, or `logits`, or ready `logps` `[...]`. Logits are this rank's
    vocabulary shard, as `outputs['vocab_shard']` says or, without it, when Megatron's tensor parallel group has
    several ranks.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = 'mean', **unknown: Any) -> None:
        reject_unknown(unknown, self.arguments(), type(self).__name__)
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of 'mean', 'sum', 'none', got {reduction!r}")
        if not isinstance(ignore_index, int):
            raise ValueError(f'ignore_index must be an int, got {ignore_index!r}')
        self.ignore_index = ignore_index
        self.reduction = reduction

    @classmethod
    def arguments(cls) -> tuple[str, ...]:
        """Names that the constructor takes."""
        return ('ignore_index', 'reduction')

    temperature = 1.0
    chunk_size: int | None = None
    inplace_backward = False

    def token_losses(self, stats: TokenStats) -> Tensor:
        """The loss of each token `[...]`, 0 where ignored."""
        raise NotImplementedError

    def contribution(self, batch: TokenBatch, stats: TokenStats) -> Tensor:
        """This micro-batch's summand of the mean over `batch.tokens` tokens."""
        return self.token_losses(stats).sum() / batch.tokens

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, **extra: Any) -> LossOutput:
        reject_unknown(extra, (), f'{type(self).__name__}.__call__')
        batch = TokenBatch.of(inputs, self.ignore_index)
        stats = self._statistics(batch, outputs)
        if self.reduction == 'none':
            return LossOutput(loss=self.token_losses(stats), num_tokens=0)
        if self.reduction == 'sum':
            return LossOutput(loss=self.token_losses(stats).sum(), num_tokens=batch.count.clamp(min=1))
        return LossOutput(loss=self.contribution(batch, stats), num_tokens=0)

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
        if self.needs - {'log_prob'}:
            raise ValueError(
                f'{type(self).__name__} needs {sorted(self.needs - {"log_prob"})} of the whole distribution: give '
                "outputs['logits'], from 'logps' alone they cannot be had"
            )
        if logps.shape != batch.labels.shape:
            raise ValueError(
                f'logps must have the shape of labels, {tuple(batch.labels.shape)}, got {tuple(logps.shape)}'
            )
        return TokenStats(log_prob=logps.masked_fill(batch.labels.to(logps.device) == self.ignore_index, 0))


def sweep_for(
    loss: Callable[..., Any], logits: Logits, labels: Tensor, shard: VocabShard, needs: Collection[str]
) -> TokenStats:
    """One sweep over the logits at this loss's temperature, tile size and `ignore_index`, which finds all of `needs`.

    Only a `TokenLoss` may have the gradient written into the logits' storage: it does not read them again. (A linear
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
        chunk_size=getattr(loss, 'chunk_size', None),
        reuse_storage=isinstance(loss, TokenLoss) and loss.inplace_backward,
    )
