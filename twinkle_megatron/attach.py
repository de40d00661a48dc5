"""This package's losses and metrics inside somebody else's training script, whose schedule and loss function stay."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor

from .batch import Counts
from .custom_loss import overrides_call
from .evaluation import Evaluation
from .groups import Groups, raise_together
from .loss.base import TokenLoss
from .loss.build import build_loss
from .loss.cross_entropy import ChunkedCrossEntropyLoss, CrossEntropyLoss
from .metric import Metric, build_metric
from .metric.base import STEP_KEYWORDS, checked_keywords
from .metric.state import SUM
from .plugin import is_address
from .vocab_parallel import Logits, VocabShard, cross_entropy

logger = logging.getLogger('twinkle_megatron')

HEADS = ('logits', 'linear')
_KEY = '_twinkle_attached'
_ONE = Counts(tokens=1, sequences=1)
"""Metrics get sums: nothing is divided by counts that nobody knows."""


def attach(
    model: Any,
    loss: Any = 'cross_entropy',
    metrics: Any = (),
    *,
    vocab_size: int | None = None,
    head: str = 'logits',
    **init: Any,
) -> Attached:
    """From now on the model's forward with labels returns this loss of each token, `[b, s]`, in place of Megatron's.

    Called at the top of a script's `forward_step(data_iterator, model)`, on every pipeline stage:

        attached = attach(model, 'chunked_cross_entropy', ['accuracy'], label_smoothing=0.1)

    The script's own loss function, its masks, its counts and its `lm loss` stay. A token with `loss_mask` 0, or with
    the label `ignore_index` (-100), has loss 0 and gradient exactly 0, whatever its label and its logits are; so the
    gradient is what Megatron makes of a sum over the others: with `calculate_per_token_loss` the global token mean
    under every layout, without it the mean of the micro-batches' means. Multi-token prediction goes on training on
    plain cross entropy.

    Args:
        model: the chunk that the forward step got, wrapped or bare. On chunks before the last nothing is changed.
        loss: a loss whose value is a mean of per-token values (`TokenLoss`): a class (made with `init`), its name, or
            an instance.
        metrics: classes, names (both for training and for evaluation) or instances (for training).
        vocab_size: the true one. None: that of the model, with the padding, which is what Megatron's own loss does.
        head: 'logits'; or 'linear', which never builds them. See `MegatronModel`.

    A second call for the same model returns the same `Attached`; the chunks of an interleaved pipeline share one. No
    collective. ValueError for other arguments than the first time, for a loss that is no mean of per-token values, for
    a metric that needs more than tokens, and for a model or a configuration where the hook is not reached.
    """
    from .megatron.compatibility import check_features

    inner = _unwrapped(model)
    wanted = _Wanted.of(loss, metrics, vocab_size, head, init)
    held = vars(inner).get(_KEY)
    if held is not None:
        found = held()
        found._check_same(wanted)
        return found
    check_features(inner.config)
    groups = _groups_of(inner)
    found = _sibling(inner, groups)
    if found is None:
        found = Attached(groups, wanted)
    else:
        found._check_same(wanted)
    found._add(inner)
    return found


class Attached:
    """What `attach` returns: the metrics, and the way back.

    `calculate` and `values` are collective: every rank of the layout calls them, on every pipeline stage.
    """

    def __init__(self, groups: Groups, wanted: _Wanted) -> None:
        self.groups = groups
        self.loss = made_loss(wanted.loss, wanted.init)
        self._wanted = wanted
        self._metrics = made_metrics(wanted.metrics, groups)
        if not _is_plain(self.loss):
            for metrics in self._metrics.values():
                metrics.append(PlainLoss(device_mesh=groups, process_group=groups.dp_cp))
        self._chunks: dict[int | None, Any] = {}
        self._hooks = ExitStack()
        self._mask: Tensor | None = None
        self._labels: Tensor | None = None
        self._inputs: dict[str, Tensor] = {}
        self._told = False
        self._error: Exception | None = None
        _LIVE.add(self)

    @property
    def owns_output(self) -> bool:
        """True on the one rank of the layout that should print: of the last stage, the first over TP, DP and CP."""
        return self.groups.owns_output

    def mask(self, loss_mask: Tensor | None) -> None:
        """Tells which tokens of the next forward count, `[b, s]`, 0 where not; for scripts that do not hand
        `loss_mask` to the model. None: those that the labels say."""
        self._mask = loss_mask

    def on_step(self, **facts: Any) -> None:
        """Tells the training metrics about an optimizer step: `lr`, `step`, `gradient_accumulation_steps`,
        `grad_norm`. Every rank calls it."""
        for metric in self._metrics[True]:
            if hasattr(metric, 'on_step'):
                metric.on_step(**facts)

    def calculate(self, is_training: bool = True) -> dict[str, Any]:
        """What the metrics of training (or of evaluation) say, for display, the same on every rank; resets them.

        Where the loss is not plain cross entropy there is the key 'plain lm loss': the cross entropy of the counted
        tokens at temperature 1, in nats. What a metric has raised since the last call is raised now, on every rank,
        and the metrics of that time are lost. Collective.
        """
        self._raise_together()
        return {
            key: value for metric in self._metrics[is_training] for key, value in (metric.calculate() or {}).items()
        }

    def values(self, is_training: bool = True) -> dict[str, float]:
        """The same as floats, for loggers, without a reset, of those metrics that have `values`. Collective."""
        self._raise_together()
        metrics = [metric for metric in self._metrics[is_training] if hasattr(metric, 'values')]
        return {key: value for metric in metrics for key, value in metric.values().items()}

    def remove(self) -> None:
        """Gives the model its own loss back."""
        self._hooks.close()
        for chunk in self._chunks.values():
            vars(chunk).pop(_KEY, None)
        self._chunks.clear()
        _LIVE.discard(self)

    def _raise_together(self) -> None:
        error, self._error = self._error, None
        try:
            raise_together(self.groups, error)
        except Exception:
            for metric in (*self._metrics[True], *self._metrics[False]):
                metric.reset()
            raise

    def _check_same(self, wanted: _Wanted) -> None:
        other = [name for name, a, b in zip(_Wanted._fields, self._wanted, wanted) if not _same(a, b)]
        if other:
            raise ValueError(
                f'the model is attached already, with another {other[0]}: {getattr(self._wanted, other[0])!r}, got '
                f'{getattr(wanted, other[0])!r}; call attached.remove() first. Instances have to be made once, outside '
                'of the forward step'
            )

    def _has_room_for(self, model: Any, groups: Groups) -> bool:
        """Whether the chunk belongs to the same model, cut for the interleaved schedule."""
        stage = getattr(model, 'vp_stage', None)
        return self.groups == groups and stage is not None and None not in self._chunks and stage not in self._chunks

    def _add(self, model: Any) -> None:
        if getattr(model, 'post_process', True):
            _check_model(model, self._wanted.head)
            self._hook(model)
        setattr(model, _KEY, lambda: self)  # a function: copying the model must not copy process groups
        self._chunks[_vp_stage(model)] = model

    def _hook(self, model: Any) -> None:
        from .megatron import checks
        from .megatron.heads import head_taken, logits_taken

        padded, size = getattr(model, 'vocab_size', None), self._wanted.vocab_size
        checks.check_vocab_size(size, padded)
        config, reference = model.config, weakref.ref(model)
        shards: dict[int, VocabShard] = {}

        def shard_of(local_size: int) -> VocabShard:
            if local_size not in shards:
                shards[local_size] = checks.vocab_shard(local_size, self.groups.tp, size or padded, padded)
            return shards[local_size]

        facts = {'loss_reduction': 'sum', 'gradient_accumulation_steps': 1}
        evaluations = {
            mode: Evaluation(self.loss, metrics, self.groups, shard_of, facts)
            for mode, metrics in self._metrics.items()
        }

        def on_logits(logits: Logits, labels: Tensor) -> Tensor:
            chunk = reference()
            assert chunk is not None
            evaluation = evaluations[bool(chunk.training)]
            if (
                getattr(config, 'mtp_num_layers', None) and labels is not self._labels
            ):  # rolled labels: not the main head
                shard = evaluation.shard_of(logits)
                return cross_entropy(logits, labels, shard=shard, ignore_index=self.loss.ignore_index).contiguous()
            return self._losses(evaluation, chunk, logits, labels).contiguous()

        take = logits_taken if self._wanted.head == 'logits' else head_taken
        self._hooks.enter_context(take(model, on_logits))
        names = list(inspect.signature(model.forward).parameters)
        before = model.register_forward_pre_hook(
            lambda _, args, kwargs: self._before(names, args, kwargs), with_kwargs=True
        )
        after = model.register_forward_hook(lambda *_: self._after())
        self._hooks.callback(before.remove)
        self._hooks.callback(after.remove)

    def _before(self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Marks the tokens that do not count in the labels that the model gets: all its heads leave them out."""
        given = dict(zip(names, args)) | kwargs
        labels, mask = given.get('labels'), given.get('loss_mask')
        mask, self._mask = (self._mask if mask is None else mask), None
        self._inputs = {
            name: given[name] for name in ('input_ids', 'position_ids') if isinstance(given.get(name), Tensor)
        }
        if labels is None:
            self._labels = None
            return None
        if mask is not None:
            if mask.numel() != labels.numel():
                raise ValueError(
                    f'loss_mask must have an entry for each label, {tuple(labels.shape)}, got {tuple(mask.shape)}'
                )
            labels = labels.masked_fill(mask.reshape(labels.shape) == 0, self.loss.ignore_index)
        else:
            self._tell_once()
        self._labels = labels
        at = names.index('labels')
        if at < len(args):
            return (*args[:at], labels, *args[at + 1 :]), kwargs
        return args, {**kwargs, 'labels': labels}

    def _after(self) -> None:
        self._labels, self._inputs = None, {}

    def _losses(self, evaluation: Evaluation, model: Any, logits: Logits, labels: Tensor) -> Tensor:
        seen = evaluation.see(model, logits, {'labels': labels})
        losses = self.loss.token_losses(seen.stats)  # type: ignore[union-attr]  # there is no pooled head here
        if losses.shape != labels.shape:
            raise ValueError(
                f'{type(self.loss).__name__}.token_losses must return a loss for each label, {tuple(labels.shape)}, '
                f'got {tuple(losses.shape)}'
            )
        try:
            if self._metrics[bool(model.training)]:
                share = losses.detach().double().sum()
                evaluation.feed(self._inputs | {'labels': labels}, {}, seen, _ONE, share)
        except Exception as error:  # raised by `calculate`, on every rank: here the other stages would wait for ever
            self._error = self._error or error
        return losses

    def _tell_once(self) -> None:
        if not self._told and any(self._metrics.values()):
            logger.warning(
                'twinkle_megatron: the script hands no loss_mask to the model, so metrics count every label but %d; '
                'call attached.mask(loss_mask) before the model where it masks others',
                self.loss.ignore_index,
            )
        self._told = True


class PlainLoss(Metric):
    """The cross entropy of the counted tokens at temperature 1, in nats, beside a loss that is another one.

    Key: `plain lm loss`; none without counted tokens.
    """

    reads = 'logits'
    fields = {'nats': SUM, 'tokens': SUM}  # noqa: RUF012
    needs = frozenset({'plain_log_prob'})

    @checked_keywords
    def accumulate(self, inputs: Any = None, outputs: Any = None) -> None:
        """Takes in one micro-batch: `labels`, and `token_stats` with `plain_log_prob`."""
        self.state.fold(
            nats=-outputs['token_stats'].plain_log_prob.double().sum(), tokens=(inputs['labels'] != -100).sum()
        )

    def figures(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The mean."""
        return {'plain lm loss': totals['nats'] / totals['tokens']} if totals['tokens'] else {}


def made_loss(loss: Any, init: Mapping[str, Any]) -> TokenLoss:
    """The loss that `attach` is given. ValueError for one that it cannot train."""
    if is_address(loss):
        raise ValueError(f"{loss!r} is an address: load it first, with load_plugin({loss!r}, 'loss', ...)")
    made = build_loss(loss, **init)
    name = getattr(made, '__name__', type(made).__name__)
    tokenwise = getattr(type(made), 'contribution', None) is TokenLoss.contribution
    if not isinstance(made, TokenLoss) or not tokenwise or made.couples or overrides_call(made):
        raise ValueError(
            f'attach needs a loss whose value is a mean of per-token values, a TokenLoss such as CrossEntropyLoss, but '
            f'{name} is not: what it divides by is known only once all micro-batches have been counted, which nobody '
            "does inside somebody else's schedule; train it with MegatronModel.forward_backward, which counts first"
        )
    if made.ignore_index >= 0:
        raise ValueError(
            f'ignore_index must be negative here, no id of the vocabulary, got {made.ignore_index}: the script would '
            'count the ignored tokens all the same; mask them in its loss_mask'
        )
    return made


def made_metrics(metrics: Sequence[Any], groups: Groups) -> dict[bool, list[Metric]]:
    """Those of training and those of evaluation. ValueError for one that needs more than tokens and their losses."""
    made: dict[bool, list[Metric]] = {True: [], False: []}
    for metric in metrics:
        if is_address(metric):
            raise ValueError(f"{metric!r} is an address: load it first, with load_plugin({metric!r}, 'metric', ...)")
        for mode in (True, False) if isinstance(metric, (str, type)) else (True,):
            one = build_metric(metric, device_mesh=groups, process_group=groups.dp_cp)
            _check_metric(one)
            made[mode].append(one)
    return made


def _check_metric(metric: Metric) -> None:
    parameters = inspect.signature(metric.accumulate).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - STEP_KEYWORDS
    more = sorted(keywords.union(getattr(metric, 'extras', {})))
    if getattr(metric, 'reads', None) not in (None, 'logits'):
        more = [str(metric.reads)]
    if more:
        raise ValueError(
            f'{type(metric).__name__} is computed from {", ".join(more)}, which a pretraining script does not have; '
            'use it with MegatronModel'
        )


class _Wanted(NamedTuple):
    """The arguments of `attach`."""

    loss: Any
    metrics: tuple[Any, ...]
    vocab_size: int | None
    head: str
    init: dict[str, Any]

    @classmethod
    def of(cls, loss: Any, metrics: Any, vocab_size: int | None, head: str, init: dict[str, Any]) -> _Wanted:
        several = tuple(metrics) if isinstance(metrics, (list, tuple)) else (metrics,)
        if head not in HEADS:
            raise ValueError(f"head must be 'logits' or 'linear', got {head!r}")
        return cls(loss, several, vocab_size, head, init)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, TokenLoss):
        return a is b or (type(a) is type(b) and vars(a) == vars(b))
    return a is b or bool(a == b)


def _is_plain(loss: TokenLoss) -> bool:
    """Whether it is what Megatron trains too."""
    return (
        type(loss) in (CrossEntropyLoss, ChunkedCrossEntropyLoss)
        and loss.temperature == 1
        and not any(getattr(loss, name) for name in ('dft', 'label_smoothing', 'z_loss'))
    )


_LIVE: weakref.WeakSet[Attached] = weakref.WeakSet()


def _sibling(model: Any, groups: Groups) -> Attached | None:
    if _vp_stage(model) is None:
        return None
    return next((one for one in _LIVE if one._has_room_for(model, groups)), None)


def _vp_stage(model: Any) -> int | None:
    """Which of several chunks of a rank it is; None where there is one."""
    several = (getattr(model.config, 'virtual_pipeline_model_parallel_size', None) or 1) > 1
    return getattr(model, 'vp_stage', None) if several else None


def _unwrapped(model: Any) -> Any:
    from .megatron.checks import unwrap

    if isinstance(model, (list, tuple)):
        raise ValueError(f'model must be one chunk, as a forward step gets it, got a {type(model).__name__}')
    return unwrap([model])[0][0]


def _groups_of(model: Any) -> Groups:
    """Those that the model was built with, where it holds them all, else Megatron's global ones."""
    collection = getattr(model, 'pg_collection', None)
    names: tuple[str, ...] = ('tp', 'cp', 'pp', 'dp', 'dp_cp')
    whole = all(getattr(collection, name, None) is not None for name in names)
    return Groups.from_megatron(collection if whole else None)


def _check_model(model: Any, head: str) -> None:
    from .megatron.heads import has_loss_hook, why_no_linear_head

    name, config = type(model).__name__, model.config
    takes: Callable[..., Any] = model.forward
    if not has_loss_hook(model) or 'labels' not in inspect.signature(takes).parameters:
        raise ValueError(
            f'{name} computes no loss from labels as GPTModel does, by compute_language_model_loss, so there is '
            'nothing to attach to'
        )
    obstacle = why_no_linear_head(model, config) if head == 'linear' else None
    if obstacle is not None:
        raise ValueError(f"head='linear' cannot be had: {obstacle}; use head='logits'")
