"""Mean squared error of values, for reward and value models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import checked_arguments, reject_unknown
from ..batch import TokenBatch, describe
from ..data_format import InputFeature, LossOutput, ModelOutput
from ..groups import group_size
from ..seen import Pooled
from .base import REDUCTIONS
from .pooled import PooledLoss

READS = ('values', 'logits', 'embeddings')
"""Keys of `outputs` in which predictions are looked for, the first first."""


class MSELoss(PooledLoss):
    """Mean of (v − y)² over what counts in the global batch, v being what the model says and y the label.

    Args:
        reduction: 'mean' over what counts, 0 when nothing does; 'sum', which reports how many squares it sums; 'none',
            the tensor of squares. Inside `MegatronModel` 'mean' and 'sum' both train the mean over the global batch,
            and 'none' is refused.
        ignore_index: label that does not count, also of a whole sequence; None: all count, as they should where −100 is
            a value to be predicted, and as those of embeddings always do.

    Inside `MegatronModel` v is what a `ScalarHead` gives: a value for each token `[b, s]`, split over CP as the tokens
    are, against labels of the same shape, aligned with the tokens; where `completion_mask` or `attention_mask` is 0 a
    token does not count. Or, pooled, one for each sequence `[n]`, the same on all CP ranks, which share the sum out;
    or embeddings `[n, H]` against labels `[n, H]`. No collectives. Kept for backward: the differences.

    Called by hand, v is `outputs['values']`, else `outputs['logits']`, else `outputs['embeddings']`. Shapes must be
    equal, but for a last dim of 1 that one of the two may have: ValueError for what torch would broadcast. Squares are
    taken in float32 (float64 of float64). What stands where nothing counts is never read.
    """

    reads = ('values', 'embeddings')

    @checked_arguments
    def __init__(self, reduction: str = 'mean', ignore_index: int | None = -100, **unknown: Any) -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of 'mean', 'sum', 'none', got {reduction!r}")
        if ignore_index is not None and (not isinstance(ignore_index, int) or isinstance(ignore_index, bool)):
            raise ValueError(f'ignore_index must be an int or None, got {ignore_index!r}')
        self.reduction, self.ignore_index = reduction, ignore_index

    def contribution(self, batch: TokenBatch, seen: Pooled, targets: Tensor | None) -> Tensor:
        assert targets is not None
        values, labels = _alike(seen.name, seen.found, targets.to(seen.found.device))
        if seen.per_token:
            return _squares(values, labels, batch.mask).sum() / batch.tokens
        squares = _squares(values, labels, self._counted(seen.name, labels))
        entries = batch.sequences * max(1, labels[:1].numel())
        return squares.sum() / (entries * group_size(batch.cp))

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, **extra: Any) -> LossOutput:
        reject_unknown(extra, (), f'{type(self).__name__}.__call__')
        name, found, labels = _read(inputs, outputs)
        values, labels = _alike(name, found, labels)
        counted = self._counted(name, labels)
        if name != 'embeddings':
            counted = counted & _unmasked(inputs, labels)
        squares = _squares(values, labels, counted)
        if self.reduction == 'none':
            return LossOutput(loss=squares, num_tokens=0)
        count = counted.sum().clamp(min=1)
        if self.reduction == 'sum':
            return LossOutput(loss=squares.sum(), num_tokens=count)
        return LossOutput(loss=squares.sum() / count, num_tokens=0)

    def _counted(self, name: str, labels: Tensor) -> Tensor:
        if self.ignore_index is None or name == 'embeddings':
            return torch.ones_like(labels, dtype=torch.bool)
        return labels != self.ignore_index


def _squares(values: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """0 where it does not count, whatever stands there."""
    return (torch.where(counted, values, 0) - torch.where(counted, labels, 0)).square()


def _alike(name: str, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """In one shape and dtype. ValueError where torch would broadcast one to the other."""
    shapes = tuple(values.shape), tuple(labels.shape)
    if values.shape == (*labels.shape, 1):
        values = values[..., 0]
    elif labels.shape == (*values.shape, 1):
        labels = labels[..., 0]
    if values.shape != labels.shape:
        raise ValueError(
            f"labels must have the shape of outputs['{name}'], {shapes[0]} (a last dim of 1 may be missing), got "
            f'{shapes[1]}: torch would broadcast them to each other, or fail'
        )
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.to(dtype), labels.to(dtype)


def _read(inputs: InputFeature, outputs: ModelOutput) -> tuple[str, Tensor, Tensor]:
    name = next((key for key in READS if outputs.get(key) is not None), None)
    values: Any = None if name is None else outputs.get(name)
    if name is None or not isinstance(values, Tensor) or not values.is_floating_point():
        raise ValueError(
            "outputs must hold 'values' (or 'logits'), a tensor of floats, got "
            f'{sorted(outputs) if name is None else describe(values)}'
        )
    labels = inputs.get('labels')
    if labels is None:
        raise ValueError(f"inputs must hold 'labels', the numbers to be predicted, got the keys {sorted(inputs)}")
    try:
        return name, values, torch.as_tensor(labels).to(values.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f'labels must be numbers, got {describe(labels)}: {error}') from error


def _unmasked(inputs: InputFeature, labels: Tensor) -> Tensor:
    """What neither mask of the shape of the labels leaves out."""
    out = torch.ones_like(labels, dtype=torch.bool)
    for key in ('completion_mask', 'attention_mask'):
        mask: Any = inputs.get(key)
        mask = None if mask is None else torch.as_tensor(mask).to(labels.device)
        if mask is not None and mask.shape == labels.shape:
            out = out & (mask != 0)
        elif mask is not None and key == 'completion_mask':
            raise ValueError(
                f'completion_mask must have the shape of labels, {tuple(labels.shape)}, got {tuple(mask.shape)}'
            )
    return out
