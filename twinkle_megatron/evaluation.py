"""One loss and some metrics on one micro-batch: a single sweep over the logits serves them all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .arguments import keywords_of
from .batch import Counts, Labelling, TokenBatch, targets_of
from .batch.targets import IGNORED, TARGETS, WEIGHTS, counted_sequences
from .custom_loss import BATCH, Weights, custom_share, overrides_call
from .data_format import InputFeature, ModelOutput
from .groups import Groups, group_size
from .loss.base import SweepLoss, sweep_for
from .loss.infonce import Coupled, InfonceLoss
from .loss.pooled import PooledLoss, with_gradient
from .metric import Metric
from .seen import Pooled, PooledHead, Seen
from .vocab_parallel import LinearHead, Logits, TokenStats, VocabShard
from .vocab_parallel.logits import local_size


class Evaluation:
    """The loss and the metrics of one call, over a global batch of known size.

    `totals` are what a loss that couples its batch is told, see `SweepLoss.totals`. `coupled` is what InfoNCE over
    several micro-batches is told, one entry each.

    Args:
        loss: a `Loss` or a callable `(inputs, outputs, **extra)`.
        metrics: fed once a micro-batch.
        groups: of this rank.
        shard_of: the vocabulary shard for a number of local columns.
        facts: what metrics are told beside, such as the learning rate.
        head: what stands in place of the logits; None: nothing does.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        metrics: Sequence[Metric],
        groups: Groups,
        shard_of: Callable[[int], VocabShard],
        facts: Mapping[str, Any],
        head: PooledHead | None = None,
    ) -> None:
        self.loss, self.head = loss, head
        self.temperature = float(getattr(loss, 'temperature', 1.0))
        self._metrics = [_accepted(metric, facts) for metric in metrics]
        self._groups = groups
        self._shard_of = shard_of
        wanted = set(getattr(loss, 'needs', {'log_prob'}))
        self.needs = frozenset(wanted.union(*(getattr(metric, 'needs', ()) for metric in metrics)))
        self.labelling = _labelling(loss, metrics, head)
        self.ignore_index = self.labelling.ignored
        self.keeps = False
        self.totals: Tensor | None = None
        self.coupled: list[Coupled] | None = None

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
        given = set(given) - {BATCH}
        return frozenset(key for key in given if key in named or (named.takes_any and key not in self.extras))

    @property
    def over(self) -> str:
        """Of what the loss is a mean: a name in `Counts`."""
        per_sequence = self.head is not None and self.head.pooling is not None
        own = getattr(self.loss, 'over', None)
        if own is not None and own not in Counts._fields:
            raise ValueError(f'over must be one of {", ".join(Counts._fields)}, got {own!r}')
        return own or ('sequences' if per_sequence else 'tokens')

    @property
    def per_token(self) -> bool:
        """Whether there is a result for each token: a log-prob, or a value."""
        return self.head is None or self.head.pooling is None

    @property
    def couples(self) -> bool:
        """Whether the loss needs sums over the global batch first: those of `first_pass`, as `totals`."""
        return isinstance(self.loss, SweepLoss) and self.loss.couples > 0

    @property
    def gathers(self) -> bool:
        """Whether the loss looks at the embeddings of the whole global batch."""
        if not isinstance(self.loss, InfonceLoss) or self.is_foreign:
            return False
        return self.loss.use_batch and type(self.loss).contribution is InfonceLoss.contribution

    def pooled(self) -> Evaluation:
        """What only finds out what the head gives."""
        return Evaluation(OutputsAlone(), [], self._groups, self._shard_of, {}, self.head)

    @property
    def can_be_revisited(self) -> bool:
        """Whether the loss can be computed from what is kept of a forward pass: it reads no logits."""
        return not self.is_foreign and not (isinstance(self.loss, SweepLoss) and self.loss.reads_logits)

    def without_metrics(self) -> Evaluation:
        """The loss alone."""
        return Evaluation(self.loss, [], self._groups, self._shard_of, {}, self.head)

    def looking(self) -> Evaluation:
        """What finds the outputs without the loss, and keeps what the loss can be computed from."""
        silent = _Silent(self.loss, self.needs) if self.head is None else OutputsAlone()
        looking = Evaluation(silent, [], self._groups, self._shard_of, {}, self.head)
        looking.keeps = self.can_be_revisited
        return looking

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
        return not isinstance(self.loss, SweepLoss | PooledLoss) or overrides_call(self.loss)

    @property
    def may_fail_alone(self) -> bool:
        """Whether the loss may fail on one rank of a micro-batch while its peers go on: somebody else's code."""
        return self.is_foreign or type(self.loss).__module__.partition('.')[0] != __package__

    def see(self, model: Any, logits: Logits, batch: dict[str, Any]) -> Seen | Pooled:
        """Statistics of logits `[b, s, V/tp]`, in any memory layout, for the labels `[b, s]` of `batch`: one collective
        over TP, and those of a linear head. Or what the head of the last stage, `model`, gives."""
        if self.head is not None:
            return self.head.read(model, logits, batch, self._groups)
        labels, shard = batch['labels'], self.shard_of(logits)
        return Seen(logits, shard, sweep_for(self.loss, logits, labels, shard, self.needs))

    def shard_of(self, logits: Logits) -> VocabShard:
        """Which ids this rank's columns are."""
        return self._shard_of(local_size(logits))

    def contribution(
        self,
        batch: dict[str, Any],
        extra: Mapping[str, Any],
        seen: Seen | Pooled,
        counts: Counts,
        micro_batches: int,
        number: int,
    ) -> Tensor | None:
        """This micro-batch's summand of the global loss: summed over micro-batches and DP×CP ranks it is that loss.
        None where it cannot be had because another data parallel rank has failed.

        `batch` is this rank's slice, `number` its place among this replica's micro-batches; `counts` and
        `micro_batches` are those of the global batch, `extra` the keywords of the call, those per token aligned with
        the labels.
        """
        features = cast(InputFeature, batch)
        if isinstance(self.loss, SweepLoss) and isinstance(seen, Seen) and not self.is_foreign:
            tokens = TokenBatch.of(features, self.ignore_index, counts, self._groups.cp, self.totals)
            own = {key: value for key, value in extra.items() if key in self.loss.extras}
            if self.loss.reads_logits:
                own |= {'logits': seen.logits, 'shard': seen.shard}
            return self.loss.contribution(tokens, seen.stats, **own)
        if isinstance(self.loss, PooledLoss) and isinstance(seen, Pooled) and not self.is_foreign:
            tokens = TokenBatch(batch, batch['labels'], self.ignore_index, counts, self._groups.cp)
            targets = targets_of(batch)
            if self.gathers and targets is not None:
                return self._share(seen.found, targets, counts, number)
            return self.loss.contribution(tokens, seen, targets)
        weights = Weights.of(counts, micro_batches, group_size(self._groups.cp), self.head)
        tokens = TokenBatch(batch, batch['labels'], self.ignore_index, counts, self._groups.cp)
        return custom_share(self.loss, cast(InputFeature, self._told(batch)), seen, extra, tokens, weights)

    def _share(self, embeddings: Tensor, targets: Tensor, counts: Counts, number: int) -> Tensor | None:
        """Of a loss over the embeddings of the whole global batch. Where there are several micro-batches it has been
        found before the schedule; else one gather and one reduce-scatter over DP."""
        found = self.couple(embeddings, targets) if self.coupled is None else self.coupled[number]
        if found is None:
            return None
        cp = group_size(self._groups.cp)
        gradient = None if found.gradient is None else found.gradient / cp
        return with_gradient(embeddings, found.losses.sum() / (max(counts.groups, 1) * cp), gradient)

    def couple(self, embeddings: Tensor | None, targets: Tensor | None) -> Coupled | None:
        """The losses of these anchors among the embeddings of all data parallel ranks. Collective over DP. `embeddings`
        None: this rank has none to give, since something failed; None on all ranks then."""
        assert isinstance(self.loss, InfonceLoss)
        starts = None if targets is None else targets != 0
        wanted = torch.is_grad_enabled()
        with torch.no_grad():
            return self.loss.couple(embeddings, starts, self._groups.dp, gradient=wanted)

    def feed(
        self, batch: dict[str, Any], extra: Mapping[str, Any], seen: Seen | Pooled, counts: Counts, share: Tensor
    ) -> None:
        """Gives the metrics one micro-batch, whose summand of the loss is `share`."""
        if not self._metrics:
            return
        features = self._told(batch)
        outputs = seen.outputs()
        if self.is_foreign:
            outputs[seen.name] = seen.source
        if self.head is None and self.ignore_index != -100:  # what metrics know as ignored
            labels = features['labels']
            features['labels'] = labels.masked_fill(labels == self.ignore_index, -100)
        told = _detached(outputs)
        told['num_tokens'] = self._stands_for(batch)
        told['loss'] = share.detach().double() * getattr(counts, self._weighs_by)
        failed: Exception | None = None
        for metric, facts, names in self._metrics:
            try:
                metric.accumulate(
                    cast(InputFeature, features),
                    told,
                    **facts,
                    **{name: extra[name] for name in names if name in extra},
                )
            except Exception as error:  # the others are fed: some are collective, and other ranks may not have failed
                failed = failed or error
        if failed is not None:
            raise failed

    @property
    def _weighs_by(self) -> str:
        """What a metric's mean of losses is over."""
        return 'tokens' if self.head is None else self.over

    def _stands_for(self, batch: Mapping[str, Any]) -> Tensor:
        """How many of these a micro-batch has on this rank; what every context parallel rank has is shared out."""
        if self._weighs_by == 'tokens':
            return (batch['labels'] != self.ignore_index).sum()
        counted = counted_sequences(batch, self.labelling)
        targets = targets_of(batch)
        count = (targets != 0).sum() if self._weighs_by == 'groups' and targets is not None else counted.sum()
        return count / group_size(self._groups.cp)

    def _told(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs as a custom loss or a metric gets them: with the labels of the caller."""
        if self.head is None:
            return dict(batch)
        told = {
            key: value for key, value in batch.items() if key not in (TARGETS, WEIGHTS, 'labels', 'completion_mask')
        }
        targets = targets_of(batch)
        if targets is not None:
            told['labels'] = targets
        if self.head.pooling is None:
            told['completion_mask'] = (batch['labels'] != IGNORED).long()
        return told


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


class _Silent(SweepLoss):
    """Stands for a loss, finds what it needs, and is 0."""

    def __init__(self, loss: Any, needs: frozenset[str]) -> None:
        super().__init__(int(getattr(loss, 'ignore_index', -100)))
        self.temperature, self.layout = float(getattr(loss, 'temperature', 1.0)), getattr(loss, 'layout', None)
        self.chunk_size, self._needs = getattr(loss, 'chunk_size', None), needs

    @property
    def needs(self) -> frozenset[str]:
        return self._needs

    def contribution(self, batch: TokenBatch, stats: TokenStats, **extra: Any) -> Tensor:
        return torch.zeros((), device=batch.labels.device)


class OutputsAlone(PooledLoss):
    """A loss of nothing, for what the head gives; needs no labels."""

    reads = ('embeddings', 'values')
    over = 'sequences'
    labelled = False

    def contribution(self, batch: TokenBatch, seen: Pooled, targets: Tensor | None) -> Tensor:
        return seen.found.new_zeros(())


def _labelling(loss: Callable[..., Any], metrics: Sequence[Metric], head: PooledHead | None) -> Labelling:
    for metric in metrics:
        _check_metric(metric, loss, head)
    layout = _one_layout([loss, *metrics])
    if head is None:
        return Labelling(int(getattr(loss, 'ignore_index', -100)), layout=layout)

    def check(targets: Tensor) -> None:
        head.check_targets(targets)
        if isinstance(loss, PooledLoss):
            loss.check_targets(targets)

    return Labelling(
        getattr(loss, 'ignore_index', None),
        kind=head.labels,
        in_groups=layout == 'groups',
        pooling=head.pooling,
        needed=isinstance(loss, PooledLoss) and loss.labelled,
        check=check,
    )


def _check_metric(metric: Metric, loss: Callable[..., Any], head: PooledHead | None) -> None:
    """ValueError for a metric of what the model does not give."""
    reads, gives = getattr(metric, 'reads', None), 'logits' if head is None else head.gives
    if reads is not None and reads != gives:
        name = getattr(loss, '__name__', type(loss).__name__)
        why = 'the model' if head is None else repr(head)
        raise ValueError(
            f'{type(metric).__name__} is computed from {reads}, but with the loss {name} {why} gives {gives}; '
            'set_metric replaces the metrics added before'
        )


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


def _detached(outputs: ModelOutput) -> ModelOutput:
    out = {key: value.detach() if isinstance(value, Tensor | LinearHead) else value for key, value in outputs.items()}
    stats = outputs.get('token_stats')
    if stats is not None:
        out['token_stats'] = stats.detach()
    return cast(ModelOutput, out)
