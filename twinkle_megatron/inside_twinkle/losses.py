"""Losses as Twinkle's `MegatronModel` calls them."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from twinkle.loss import Loss as TwinkleLoss  # type: ignore[import-not-found]

from ..arguments import reject_unknown
from ..batch import CONSTANT, HEADS, LOG_PROBS, OUTPUTS, PER_PAIR, PER_TOKEN, VECTORS, Counts, TokenBatch
from ..batch.pair_layout import counted_pairs
from ..data_format import InputFeature, LossOutput, ModelOutput
from ..groups import Groups, group_size, sum_over, tensor_parallel_group
from ..loss import InfonceLoss, MSELoss
from ..loss.base import SweepLoss
from ..loss.preference import PreferenceLossBase
from ..metric.base import STEP_KEYWORDS
from ..metric.build import METRICS
from ..vocab_parallel import TokenStats, VocabShard
from ..vocab_parallel.logits import local_size
from .rows import Rows

logger = logging.getLogger('twinkle_megatron')

ALONG_ROWS = (PER_TOKEN, LOG_PROBS, OUTPUTS)
_SUMS = Counts(tokens=1, sequences=1, pairs=1, chosen_tokens=1, groups=1)
"""Divided by these, contributions are sums, which Megatron divides by the counts reported beside them."""


def adapted_loss(cls: type, logps: bool = True) -> Any:
    """A class of that name that Twinkle's `set_loss` takes: a subclass of both `cls` and `twinkle.loss.Loss`.

    Args:
        cls: one of this package's losses, or a `SweepLoss` of your own.
        logps: whether Twinkle is to find log-probs, too, as its `forward_only` and its metrics show them. They take
            memory of the size of the logits, and the loss does not use them.
    """
    if not issubclass(cls, (SweepLoss, MSELoss, InfonceLoss)):
        raise ValueError(f'cls must be a SweepLoss, an MSELoss or an InfonceLoss, got {cls.__name__}')
    flags = {'require_logits': True, 'require_logps': logps, 'require_entropy': False, 'require_values': False}
    body = flags | {'__module__': 'twinkle_megatron.inside_twinkle', '__doc__': cls.__doc__, '__call__': _call}
    return type(cls.__name__, (cls, TwinkleLoss), body)


def _call(self: Any, inputs: InputFeature, outputs: ModelOutput, **extra: Any) -> LossOutput:
    """One micro-batch: its loss, and how many Megatron is to divide its gradient by."""
    if getattr(self, 'reduction', 'mean') == 'none':
        raise ValueError("reduction='none' gives no number to train; use 'mean' (or 'sum', which trains the same mean)")
    extra = _of_loss(self, extra)
    groups = _groups()
    if isinstance(self, InfonceLoss):
        return _contrastive(self, inputs, outputs, groups)
    rows = Rows.of(inputs)
    if isinstance(self, MSELoss):
        return _squared(self, rows, outputs, groups)
    return _swept(self, rows, outputs, extra, groups)


def _groups() -> Groups:
    return Groups() if tensor_parallel_group() is None else Groups.from_megatron()


def _of_loss(loss: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keywords of metrics, which Twinkle hands to the loss, too. ValueError for one that nobody knows."""
    kinds = getattr(loss, 'extras', {})
    mine = {key: value for key, value in extra.items() if key in kinds or key not in METRIC_KEYWORDS}
    reject_unknown(mine, {*kinds, *METRIC_KEYWORDS}, f'{type(loss).__name__}.__call__')
    for key, value in mine.items():
        given = value.get('logps') if isinstance(value, Mapping) else value
        several = given if isinstance(given, (list, tuple)) and kinds.get(key) in ALONG_ROWS else ()
        if any(isinstance(one, Tensor) and one.dim() == 2 and len(one) > 1 for one in several):
            raise ValueError(
                f'{key} must be one tensor with the rows of all samples, or a list of one entry a sample, got a list '
                'of matrices, one a micro-batch, which Twinkle cuts as if they were samples; join them with '
                'twinkle.utils.pad_and_stack_tensors'
            )
    return mine


def _metric_keywords() -> frozenset[str]:
    named = [p for cls in METRICS.values() for p in inspect.signature(cls.accumulate).parameters.values()]
    return frozenset(p.name for p in named if p.kind is p.KEYWORD_ONLY) - STEP_KEYWORDS


METRIC_KEYWORDS = _metric_keywords()


def _swept(loss: SweepLoss, rows: Rows, outputs: ModelOutput, extra: Mapping[str, Any], groups: Groups) -> LossOutput:
    logits: Any = outputs.get('logits')
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"outputs must hold 'logits', got {sorted(key for key, x in outputs.items() if x is not None)}; for "
            "task='embedding' set InfonceLoss"
        )
    logits = rows.local(logits, groups.cp)
    at = rows.local_cells(groups.cp).to(logits.device)
    if logits.shape[:-1] != at.shape:
        raise ValueError(
            f'logits must be of the tokens of this context parallel rank, {tuple(at.shape)}, as labels '
            f'{rows.shape} tell, got {tuple(logits.shape)}'
        )
    whole, given = loss.aligned(rows.inputs, extra, training=loss.reads_logits)
    _warn_without_reference(loss, given)
    batch = _local_batch(loss, whole, at, groups)
    unit = _unit(loss, given)
    if unit is not None:
        batch = TokenBatch(batch.inputs, batch.labels, batch.ignore_index, _SUMS, batch.cp)
    given = {key: _sliced(loss.extras[key], value, at, rows) for key, value in given.items()}
    shard = _shard(loss, logits)
    if loss.reads_logits:
        share = loss.contribution(batch, TokenStats(), logits=logits, shard=shard, **given)
    else:
        stats = loss._statistics(batch, {'logits': logits, 'vocab_shard': shard})  # type: ignore[typeddict-unknown-key]
        share = loss.contribution(batch, stats, **given)
    return _reported(share, 1 if unit is None else _count(unit, batch, loss), groups.cp)


def _local_batch(loss: SweepLoss, whole: TokenBatch, at: Tensor, groups: Groups) -> TokenBatch:
    """This context parallel rank's tokens of it."""
    labels = whole.labels.to(at.device)
    rows = {
        'sequence_ids': at // labels.shape[1],
        'sequence_tokens': (labels != loss.ignore_index).sum(1),
    }
    return TokenBatch(rows, labels.reshape(-1)[at], loss.ignore_index, None, groups.cp)


def _sliced(kind: str, value: Any, at: Tensor, rows: Rows) -> Any:
    """A keyword, aligned with whole rows, as the tokens of this rank need it."""
    if kind in ALONG_ROWS:
        return value.reshape(-1).to(at.device)[at]
    if kind == VECTORS:
        return value.to(at.device).flatten(0, 1)[at] if at.numel() != value[..., 0].numel() else value
    assert kind in (CONSTANT, HEADS, PER_PAIR)
    return value


def _shard(loss: Any, logits: Tensor) -> VocabShard:
    """Columns beyond the true vocabulary count: Twinkle does not tell of them."""
    size, known = local_size(logits), loss.__dict__.setdefault('_inside_twinkle', {})
    if size not in known:
        known[size] = VocabShard.from_group(size, tensor_parallel_group())
    return known[size]


def _unit(loss: SweepLoss, given: Mapping[str, Any]) -> str | None:
    """Of what the loss is a mean whose parts can be added up; None where it is more than one such mean."""
    two_means = isinstance(loss, PreferenceLossBase) and loss.nll_weight > 0
    if two_means or loss.couples or given.get('num_items_in_batch') is not None:
        return None
    return loss.over


def _count(unit: str, batch: TokenBatch, loss: SweepLoss) -> Tensor:
    tokens = batch.sequence_tokens
    if unit == 'tokens':
        return tokens.sum()
    if unit == 'sequences':
        return (tokens > 0).sum()
    return counted_pairs(tokens, str(loss.layout)).sum()


def _reported(share: Tensor, count: int | Tensor, cp: Any) -> LossOutput:
    """From this rank's share of a sum over `count` things.

    Twinkle shows Σ loss ÷ Σ count, and hands `count ÷ cp`, rounded down, to Megatron, which adds that up over all ranks
    and divides the gradient by it, also the gradient of a mean. So both are told cp times too much.
    """
    size = group_size(cp)
    count = torch.as_tensor(count, device=share.device).clamp(min=1)
    if size > 1:
        share = share + (sum_over(share.detach().clone(), cp) - share.detach())
    return LossOutput(loss=share * size, num_tokens=count * size)


def _squared(loss: MSELoss, rows: Rows, outputs: ModelOutput, groups: Groups) -> LossOutput:
    found: Any = outputs.get('logits')
    if not isinstance(found, Tensor):
        raise ValueError(
            f"outputs must hold 'logits' [b, s, 1], the values of the tokens, got {sorted(outputs)}; embeddings have "
            'no labels of their size in Twinkle'
        )
    if loss.ignore_index is None:
        raise ValueError('ignore_index must be a number: Twinkle fills labels up with -100, and that would count')
    found = rows.local(found, groups.cp)
    at = rows.local_cells(groups.cp).to(found.device)
    labels = rows.inputs['labels'].to(found.device)  # type: ignore[union-attr]
    summed = copy.copy(loss)
    summed.reduction = 'sum'
    out = MSELoss.__call__(summed, {'labels': labels.reshape(-1)[at]}, {'values': found})
    return _reported(out['loss'], (labels != loss.ignore_index).sum(), groups.cp)


def _contrastive(loss: InfonceLoss, inputs: InputFeature, outputs: ModelOutput, groups: Groups) -> LossOutput:
    if group_size(groups.cp) > 1:
        raise ValueError(
            'InfonceLoss cannot be had with context parallelism inside Twinkle, which pads and splits the labels of '
            'samples as if they were those of tokens; use cp_size=1'
        )
    labels: Any = inputs.get('labels')
    labels = None if labels is None else torch.as_tensor(labels).reshape(-1)
    out = InfonceLoss.__call__(loss, {**inputs, 'labels': labels}, outputs)
    value, replicas = out['loss'], group_size(groups.dp)
    whole = value.detach()  # every rank has it all, and the gradients of its own rows: Megatron averages these
    return LossOutput(loss=whole + replicas * (value - whole), num_tokens=0)


def _warn_without_reference(loss: Any, given: Mapping[str, Any]) -> None:
    lacks = not given and 'ref_logps' in loss.extras and 'advantages' not in loss.extras
    if lacks and not getattr(loss, 'reference_free', True) and not loss.__dict__.get('_inside_twinkle_told'):
        loss.__dict__['_inside_twinkle_told'] = True
        logger.warning('twinkle_megatron: %s was given no reference, so it is 0 in this call', type(loss).__name__)
