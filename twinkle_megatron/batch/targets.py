"""Labels that are no ids of tokens: one entry a sequence, or a number a token.

In the place of `labels` come marks then, which say which tokens count, so that counts, padding and slices are those of
any other micro-batch. The labels themselves travel as `targets`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .micro_batches import TARGETS, describe, is_per_token
from .sequences import Packing, inside_sequences, packing_of
from .whole_rows import WholeRows

TOKEN_IDS, PER_SEQUENCE, PER_TOKEN_NUMBER = 'ids of tokens', 'one entry a sequence', 'a number a token'
"""What the labels of a call are."""

WEIGHTS = 'pooling weights'
"""The key of how much each token counts in what its sequence is pooled to; one that no caller has."""

IGNORED, COUNTED = -100, 0
"""Marks of tokens."""

POOLINGS = ('last', 'mean', 'first')
"""Of the tokens of a sequence."""


@dataclass(frozen=True)
class Labelling:
    """What the labels of a call are.

    `ignore_index`: of labels that do not count; of numbers it may be None: all count. `layout`: where the sequences of
    a pair lie, for a loss or a metric of pairs. `in_groups`: labels that are not 0 begin a group of sequences, which no
    micro-batch cuts. `pooling`: one of `POOLINGS`, where sequences are pooled to one vector or number. `needed`: there
    have to be labels. `check` raises ValueError for wrong labels of a micro-batch that are no ids.
    """

    ignore_index: int | None = IGNORED
    layout: str | None = None
    kind: str = TOKEN_IDS
    in_groups: bool = False
    pooling: str | None = None
    needed: bool = True
    check: Callable[[Tensor], None] | None = None

    @property
    def ignored(self) -> int:
        """What stands in `labels` of a micro-batch on its way, at tokens that do not count."""
        if self.kind != TOKEN_IDS:
            return IGNORED
        assert self.ignore_index is not None
        return self.ignore_index


def targets_apart(inputs: Any, kind: str) -> Any:
    """The inputs with what a sequence has in place of labels under `TARGETS`, where no padding of rows finds it."""
    if kind != PER_SEQUENCE:
        return inputs
    if isinstance(inputs, Mapping):
        return _apart(inputs, 0)
    if isinstance(inputs, Sequence) and all(isinstance(one, Mapping) for one in inputs):
        return [_apart(one, index) for index, one in enumerate(inputs)]
    return inputs  # refused with other wrong inputs


def without_labels(inputs: Any) -> Any:
    """The inputs of a call without their labels."""
    if isinstance(inputs, Mapping):
        return {key: value for key, value in inputs.items() if key != 'labels'}
    if isinstance(inputs, Sequence) and all(isinstance(one, Mapping) for one in inputs):
        return [without_labels(one) for one in inputs]
    return inputs  # refused with other wrong inputs


def _apart(feature: Mapping[str, Any], index: int) -> dict[str, Any]:
    out = {key: value for key, value in feature.items() if key != 'labels'}
    if feature.get('labels') is not None:
        out[TARGETS] = _numbers(feature['labels'], index)
    return out


def _numbers(given: Any, index: int) -> Tensor:
    try:
        return given.detach() if isinstance(given, Tensor) else torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"inputs[{index}]['labels'] must be numbers, got {describe(given)}: {error}") from error


def group_sizes(samples: Sequence[Mapping[str, Any]], size: int) -> list[int]:
    """How many of these 1-D samples go into each micro-batch of at most `size`, so that no group is cut: a group begins
    where the label is not 0. A group larger than `size` has a micro-batch of its own."""
    starts = [i for i, one in enumerate(samples) if i == 0 or bool(torch.as_tensor(one.get(TARGETS, 1)).any())]
    lengths = [b - a for a, b in zip(starts, [*starts[1:], len(samples)])]
    sizes: list[int] = []
    for length in lengths:
        if sizes and sizes[-1] + length <= size:
            sizes[-1] += length
        else:
            sizes.append(length)
    return sizes


class Marked(NamedTuple):
    """A micro-batch with marks as its labels, and where its tokens were moved, if they were: `columns` `[b, s]` says in
    which column of its row each of the caller's tokens lies now."""

    batch: dict[str, Any]
    columns: Tensor | None


def marked(batch: Mapping[str, Any], index: int, labelling: Labelling) -> Marked:
    """A micro-batch whose labels are no ids, ready for the plan: marks as its labels, and left padding moved to the end
    of each row. ValueError without labels where they are needed, or for numbers of tokens of another shape."""
    given = dict(batch)
    if labelling.kind == PER_TOKEN_NUMBER and given.get('labels') is not None:
        given[TARGETS] = _per_token(given['labels'], index, given['input_ids'])
    given.pop('labels', None)
    if labelling.needed and given.get(TARGETS) is None:
        raise ValueError(f"inputs[{index}] has no 'labels' ({labelling.kind}), got the keys {sorted(batch)}")
    if labelling.kind == PER_SEQUENCE and TARGETS in given:
        given[TARGETS] = _not_per_token(given[TARGETS], packing_of(given))
    out, columns = _without_left_padding(given)
    if TARGETS in out and out[TARGETS].device != out['input_ids'].device:
        out[TARGETS] = out[TARGETS].to(out['input_ids'].device)
    marks = torch.full_like(out['input_ids'], COUNTED, dtype=torch.int64).masked_fill(~_real(out, index), IGNORED)
    if labelling.kind == PER_TOKEN_NUMBER and TARGETS in out and labelling.ignore_index is not None:
        marks = marks.masked_fill(out[TARGETS] == labelling.ignore_index, IGNORED)
    return Marked({**out, 'labels': marks}, columns)


def _not_per_token(targets: Tensor, packing: Packing | None) -> Tensor:
    """`[n]`, or `[n, c, 1, 1]`, which nothing takes for a tensor `[b, s]`; of a packed row also from `[1, n]`."""
    if packing is not None and targets.shape == (1, packing.lengths.numel()):
        return targets[0]
    if targets.dim() < 2 or targets.shape[1:].numel() == 1:
        return targets.reshape(-1)
    return targets.flatten(1)[..., None, None]


def targets_of(inputs: Mapping[str, Any]) -> Tensor | None:
    """The labels of a micro-batch on its way, `[n]`, `[n, c]`, or a number a token `[b, s]`."""
    targets = inputs.get(TARGETS)
    return targets.flatten(1) if isinstance(targets, Tensor) and targets.dim() == 4 else targets


def counted_sequences(batch: Mapping[str, Any], labelling: Labelling) -> Tensor:
    """Which sequences of a micro-batch on its way count, bool `[n]`: they have a counted token, and their label is not
    `ignore_index`."""
    real, targets = batch['sequence_tokens'] > 0, targets_of(batch)
    named = labelling.kind == PER_SEQUENCE and labelling.ignore_index is not None
    if not named or targets is None or targets.dim() > 1:
        return real
    return real & (targets.to(real.device) != labelling.ignore_index)


def check_targets(rows: WholeRows, index: int, labelling: Labelling) -> None:
    """ValueError unless there is one entry for each sequence, and they are what the loss takes."""
    targets = targets_of(rows.batch)
    if targets is None:
        return
    if labelling.kind == PER_SEQUENCE and len(targets) != rows.count:
        raise ValueError(
            f"inputs[{index}]['labels'] must have one entry for each of the {rows.count} "
            f'{"sequences" if rows.packing is None else "packed sequences"}, got shape {tuple(targets.shape)}'
        )
    if labelling.check is not None:
        try:
            labelling.check(targets)
        except ValueError as error:
            told = str(error).removeprefix('labels ')
            raise ValueError(f"inputs[{index}]['labels']{' ' if told.startswith('must ') else ': '}{told}") from error


def _per_token(given: Any, index: int, ids: Tensor) -> Tensor:
    targets = _numbers(given, index)
    targets = targets[..., 0] if targets.shape == (*ids.shape, 1) else targets
    if targets.shape != ids.shape:
        raise ValueError(
            f"inputs[{index}]['labels'] must be a number for each token, of the shape of input_ids, "
            f'{tuple(ids.shape)}, got {tuple(targets.shape)}; for a number a sequence, let the head pool: '
            "ScalarHead(pooling='last')"
        )
    return targets if targets.is_floating_point() else targets.to(torch.float64)


def _real(batch: Mapping[str, Any], index: int) -> Tensor:
    """Which tokens are no padding and not masked by `completion_mask`, bool `[b, s]`."""
    ids = batch['input_ids']
    real = torch.ones_like(ids, dtype=torch.bool)
    for key in ('attention_mask', 'completion_mask'):
        mask = batch.get(key)
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            real = real & (mask != 0)
        elif mask is not None and key == 'completion_mask':
            raise ValueError(
                f"inputs[{index}]['completion_mask'] must have the shape of input_ids, {tuple(ids.shape)}, got "
                f'{describe(mask)}'
            )
    inside = inside_sequences(tuple(ids.shape), packing_of(batch), ids.device)
    return real if inside is None else real & inside


def _without_left_padding(batch: Mapping[str, Any]) -> Marked:
    """Rows that begin with padding, their tokens moved to the front in order."""
    ids, mask = batch['input_ids'], batch.get('attention_mask')
    if not isinstance(mask, Tensor) or mask.shape != ids.shape or ids.shape[1] == 0:
        return Marked(dict(batch), None)
    if not bool(((mask[:, 0] == 0) & (mask != 0).any(1)).any()):
        return Marked(dict(batch), None)
    begin = (mask != 0).long().argmax(1, keepdim=True)  # the first token of each row; 0 for one without any
    width = ids.shape[1]
    columns = (torch.arange(width, device=ids.device) - begin) % width
    moved = dict(batch)
    for key, value in batch.items():
        if is_per_token(value, ids.shape):
            moved[key] = _moved(value, columns)
    return Marked(moved, columns)


def moved_like(value: Any, columns: Tensor) -> Any:
    """A keyword of a custom loss with what belongs to tokens `[b, s]`, or to those of each of b rows, moved as
    `columns` say; anything else as it is."""
    rows, width = columns.shape
    if isinstance(value, (list, tuple)) and len(value) == rows:
        each = [torch.as_tensor(one) if np.shape(one) == (width,) else one for one in value]
        return [x[_inverse(at)] if isinstance(x, Tensor) and x.shape == (width,) else x for x, at in zip(each, columns)]
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in 'biuf' else value
    if not isinstance(tensor, Tensor) or not is_per_token(tensor, (rows, width)):
        return value
    moved = _moved(tensor, columns)
    return moved.numpy() if isinstance(value, np.ndarray) else moved


def _inverse(columns: Tensor) -> Tensor:
    return torch.empty_like(columns).scatter_(0, columns, torch.arange(len(columns), device=columns.device))


def _moved(value: Tensor, columns: Tensor) -> Tensor:
    at = columns.to(value.device)
    return torch.empty_like(value).scatter_(1, at if value.dim() == 2 else at[..., None].expand_as(value), value)


def pool_weights(rows: WholeRows, pooling: str) -> Tensor:
    """How much each token counts in what its sequence is pooled to, float64 `[b, s]`: `pooling` is one of `POOLINGS`,
    over the counted tokens."""
    counted = rows.labels != IGNORED
    flat, ids = counted.reshape(-1), rows.ids.reshape(-1)
    if pooling == 'mean':
        return counted.double() / rows.spread(rows.tokens.clamp(min=1))
    at = torch.arange(flat.numel(), device=flat.device)
    first = pooling == 'first'
    outside = flat.numel() if first else -1
    found = torch.full((rows.count,), outside, device=flat.device)
    found.scatter_reduce_(0, ids, at.masked_fill(~flat, outside), 'amin' if first else 'amax')
    return (flat & (at == found[ids])).view(counted.shape).double()
