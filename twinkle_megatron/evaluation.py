"""One loss and some metrics on one micro-batch: a single sweep over the logits serves them all."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .arguments import keywords_of
from .batch import Counts, TokenBatch
from .data_format import InputFeature, ModelOutput
from .groups import Groups, group_size
from .loss.base import SweepLoss, sweep_for
from .metric import Metric
from .vocab_parallel import LinearHead, Logits, TokenStats, VocabShard
from .vocab_parallel.logits import local_size


class Seen(NamedTuple):
    """What the head found on one micro-batch: logits `[b, s, V/tp]` and the statistics `[b, s]` of one sweep over
    them."""

    logits: Logits
    shard: VocabShard
    stats: TokenStats


class Evaluation:
    """The loss and the metrics of one call, over a global batch of known size.

    `layout` is where the sequences of a pair lie, for a loss or a metric of pairs, else None. `totals` are what a loss
    that couples its batch is told, see `SweepLoss.totals`.

    Args:
        loss: a `Loss` or a callable `(inputs, outputs, **extra)`.
        metrics: fed once a micro-batch.
        groups: of this rank.
        shard_of: the vocabulary shard for a number of local columns.
        facts: what metrics are told beside, such as the learning rate.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        metrics: Sequence[Metric],
        groups: Groups,
        shard_of: Callable[[int], VocabShard],
        facts: Mapping[str, Any],
    ) -> None:
        self.loss = loss
        self.ignore_index = int(getattr(loss, 'ignore_index', -100))
        self.temperature = float(getattr(loss, 'temperature', 1.0))
        self._metrics = [_accepted(metric, facts) for metric in metrics]
        self._groups = groups
        self._shard_of = shard_of
        wanted = set(getattr(loss, 'needs', {'log_prob'}))
        self._needs = frozenset(wanted.union(*(getattr(metric, 'needs', ()) for metric in metrics)))
        self.layout = _one_layout([loss, *metrics])
        self.totals: Tensor | None = None

    @property
    def extras(self) -> dict[str, str]:
        """What each keyword of a call is. A custom loss does not say."""
        named: dict[str, str] = {}
        for metric, _, _ in self._metrics:
            named |= getattr(metric, 'extras', {})
        return named | dict(getattr(self.loss, 'extras', {}))

    def unsaid(self, given: Collection[str]) -> frozenset[str]:
        """Those of the keywords given that a custom loss takes."""
        if not self.is_foreign:
            return frozenset()
        named = keywords_of(self.loss)
        return frozenset(key for key in given if key in named or (named.takes_any and key not in self.extras))

    @property
    def over(self) -> str:
        """Of what the loss is a mean: a name in `Counts`."""
        return self.loss.over if isinstance(self.loss, SweepLoss) else 'tokens'

    @property
    def couples(self) -> bool:
        """Whether the loss needs sums over the global batch first: those of `first_pass`, as `totals`."""
        return isinstance(self.loss, SweepLoss) and self.loss.couples > 0

    @property
    def size(self) -> int:
        """Numbers of a contribution: 1 of a loss."""
        return self.loss.size if isinstance(self.loss, _Totals) else 1

    def first_pass(self) -> Evaluation:
        """What finds `totals`: its contributions `[k]` are the summands."""
        return Evaluation(_Totals(cast(SweepLoss, self.loss)), [], self._groups, self._shard_of, {})

    @property
    def is_foreign(self) -> bool:
        """Whether the loss is a custom one, which may do anything with the logits."""
        return not isinstance(self.loss, SweepLoss)

    @property
    def may_fail_alone(self) -> bool:
        """Whether the loss may fail on one rank of a micro-batch while its peers go on: somebody else's code."""
        return self.is_foreign or type(self.loss).__module__.partition('.')[0] != __package__

    def sweep(self, logits: Logits, labels: Tensor) -> Seen:
        """Statistics of logits `[b, s, V/tp]`, in any memory layout, for labels `[b, s]`. One collective over TP, and
        those of a linear head."""
        shard = self.shard_of(logits)
        return Seen(logits, shard, sweep_for(self.loss, logits, labels, shard, self._needs))

    def shard_of(self, logits: Logits) -> VocabShard:
        """Which ids this rank's columns are."""
        return self._shard_of(local_size(logits))

    def contribution(
        self,
        inputs: dict[str, Any],
        extra: Mapping[str, Any],
        seen: Seen,
        counts: Counts,
        micro_batches: int,
    ) -> Tensor:
        """This micro-batch's summand of the global loss: summed over micro-batches and DP×CP ranks it is that loss.

        `counts` and `micro_batches` are those of the global batch, `extra` the keywords of the call, those per token
        aligned with the labels.
        """
        features = cast(InputFeature, inputs)
        outputs = self._outputs(seen)
        if isinstance(self.loss, SweepLoss):
            batch = TokenBatch.of(features, self.ignore_index, counts, self._groups.cp, self.totals)
            own = {key: value for key, value in extra.items() if key in self.loss.extras}
            if self.loss.reads_logits:
                own |= {'logits': seen.logits, 'shard': seen.shard}
            return self.loss.contribution(batch, seen.stats, **own)
        outputs['logits'] = seen.logits
        return self._foreign(features, outputs, extra, counts, micro_batches)

    def feed(self, inputs: dict[str, Any], extra: Mapping[str, Any], seen: Seen, counts: Counts, share: Tensor) -> None:
        """Gives the metrics one micro-batch, whose summand of the loss is `share`."""
        if not self._metrics:
            return
        features, outputs = cast(InputFeature, inputs), self._outputs(seen)
        if not isinstance(self.loss, SweepLoss):
            outputs['logits'] = seen.logits
        labels = inputs['labels']
        if self.ignore_index != -100:  # what metrics know as ignored
            labels = labels.masked_fill(labels == self.ignore_index, -100)
            features = cast(InputFeature, {**inputs, 'labels': labels})
        told = _detached(outputs)
        told['loss'] = share.detach().double() * counts.tokens
        told['num_tokens'] = (labels != -100).sum()
        failed: Exception | None = None
        for metric, facts, names in self._metrics:
            try:
                metric.accumulate(features, told, **facts, **{name: extra[name] for name in names if name in extra})
            except Exception as error:  # the others are fed: some are collective, and other ranks may not have failed
                failed = failed or error
        if failed is not None:
            raise failed

    @staticmethod
    def _outputs(seen: Seen) -> ModelOutput:
        assert seen.stats.log_prob is not None
        outputs = ModelOutput(token_stats=seen.stats, logps=seen.stats.log_prob, vocab_shard=seen.shard)
        if seen.stats.entropy is not None:
            outputs['entropies'] = seen.stats.entropy
        return outputs

    def _foreign(
        self,
        inputs: InputFeature,
        outputs: ModelOutput,
        extra: Mapping[str, Any],
        counts: Counts,
        micro_batches: int,
    ) -> Tensor:
        """A custom loss as a summand: a sum over tokens is divided by the global count, a mean weighs the same for
        every micro-batch."""
        logits = outputs.get('logits')
        assert logits is not None
        trains = logits.requires_grad and torch.is_grad_enabled()
        version = logits._version if isinstance(logits, Tensor) else 0
        result = self.loss(inputs, outputs, **extra)
        loss, count = (result.get('loss'), result.get('num_tokens', 0)) if isinstance(result, Mapping) else (result, 0)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.dtype.is_floating_point:
            raise ValueError(
                "a loss must return a scalar tensor of floats, or {'loss': such a tensor, 'num_tokens': n}, got "
                f'{_described(result)}'
            )
        if trains and isinstance(logits, Tensor) and logits._version != version:
            raise ValueError(
                "a loss must not write to outputs['logits'], from which gradients are computed; work on a new tensor, "
                'as in logits / temperature'
            )
        if trains and not loss.requires_grad and loss.item() != 0:
            raise ValueError(
                f'a loss must depend on the logits or logps in a way that autograd sees, got the constant '
                f'{loss.item():g}; was it detached, or made with .item() or torch.tensor()?'
            )
        weight = counts.tokens if _is_sum(count) else micro_batches * group_size(self._groups.cp)
        return loss.reshape(()) / max(weight, 1)


class _Totals(SweepLoss):
    """Stands for a loss that couples its batch, and gives its totals as if they were a loss."""

    def __init__(self, loss: SweepLoss) -> None:
        super().__init__(loss.ignore_index)
        self._loss, self.size = loss, loss.couples
        self.temperature, self.chunk_size, self.layout = loss.temperature, loss.chunk_size, loss.layout
        self.extras = loss.extras  # type: ignore[misc]

    @property
    def needs(self) -> frozenset[str]:
        return self._loss.needs

    def contribution(self, batch: TokenBatch, stats: TokenStats, **extra: Any) -> Tensor:
        return self._loss.totals(batch, stats, **extra).detach()


def _one_layout(all_of_them: Sequence[Any]) -> str | None:
    """The `layout` of the pairs, on which the loss and the metrics that have one must agree."""
    named = {type(one).__name__: one.layout for one in all_of_them if isinstance(getattr(one, 'layout', None), str)}
    if len(set(named.values())) > 1:
        raise ValueError(f'layout must be the same for the loss and the metrics of one call, got {named}')
    return next(iter(named.values()), None)


def _accepted(metric: Metric, facts: Mapping[str, Any]) -> tuple[Metric, dict[str, Any], tuple[str, ...]]:
    """The facts that this metric's `accumulate` names, or all if it takes any keyword; and the keywords of a call that
    it names."""
    parameters = inspect.signature(metric.accumulate).parameters.values()
    names = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return metric, dict(facts), names
    named = {p.name for p in parameters}
    return metric, {name: value for name, value in facts.items() if name in named}, names


def _described(result: Any) -> str:
    if isinstance(result, Tensor):
        return f'a tensor of shape {tuple(result.shape)} and {result.dtype}'
    if isinstance(result, Mapping):
        return f'{{{", ".join(f"{key!r}: {_described(value)}" for key, value in result.items())}}}'
    return type(result).__name__


def _is_sum(num_tokens: Any) -> bool:
    """Whether a loss is a sum over tokens: its `num_tokens` is above 0."""
    single = isinstance(num_tokens, Tensor) and num_tokens.numel() == 1
    given = num_tokens.item() if single else num_tokens
    count = float(given) if isinstance(given, Real) else math.nan
    if not count >= 0:
        got = given if isinstance(given, Real) else _described(num_tokens)
        raise ValueError(
            f"a loss's num_tokens must be one number: the tokens it is summed over, or 0 for a mean, got {got}"
        )
    return count > 0


def _detached(outputs: ModelOutput) -> ModelOutput:
    out = {key: value.detach() if isinstance(value, Tensor | LinearHead) else value for key, value in outputs.items()}
    stats = outputs.get('token_stats')
    if stats is not None:
        out['token_stats'] = stats.detach()
    return cast(ModelOutput, out)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *tensors: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in tensors]
        return torch.zeros(shape, dtype=torch.float32, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like))


def nothing(x: Logits, shape: tuple[int, ...] = ()) -> Tensor:
    """Zeros that send exact zeros back to `x`, whatever it holds: keeps a pipeline going without training anything."""
    return _Nothing.apply(shape, *(x.tensors if isinstance(x, LinearHead) else (x,)))
