"""Reads what `accumulate` is given: one micro-batch or a list of them, tensors, numpy arrays or plain lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import WholeRows, align_extras, trained_labels
from ..data_format import InputFeature

IGNORED = -100
"""The label of a token that is not trained and not counted."""

Features = Mapping[str, Any]


def micro_batches(inputs: Any, outputs: Any) -> list[tuple[list[Features], Features]]:
    """Each dictionary of `outputs` with the inputs that it was computed from.

    `outputs` may be a list aligned with the list `inputs`, or one dictionary over all of `inputs`. None or an empty
    list stand for a rank without data. ValueError where the two cannot be paired.
    """
    features = _dicts(inputs, 'inputs')
    if outputs is None:
        return []
    if isinstance(outputs, Mapping):
        return [(features, outputs)]
    results = _dicts(outputs, 'outputs')
    if features and len(results) != len(features):
        raise ValueError(
            f'outputs must hold one entry for each of the {len(features)} micro-batches of inputs, got {len(results)}'
        )
    return [([feature], result) for feature, result in zip(features, results)] or [([], result) for result in results]


def each_micro_batch(inputs: Any, outputs: Any, keys: Sequence[str]) -> list[tuple[Features, Features]]:
    """Every micro-batch of `inputs` with its own outputs.

    Of one dictionary of outputs over several micro-batches, each of `keys` is a list with one entry a micro-batch, or
    one tensor that holds the rows of all. ValueError where neither fits.
    """
    pairs: list[tuple[Features, Features]] = []
    for features, output in micro_batches(inputs, outputs):
        given = [key for key in keys if output.get(key) is not None]
        if len(features) == 1 and not any(isinstance(output[key], list | tuple) for key in given):
            pairs.append((features[0], output))
            continue
        parts = {key: _parts(key, output[key], features) for key in given}
        pairs += [(f, {**output, **{key: part[i] for key, part in parts.items()}}) for i, f in enumerate(features)]
    return pairs


def _parts(key: str, value: Any, features: Sequence[Features]) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        if len(value) != len(features):
            raise ValueError(f"outputs['{key}'] must hold one entry a micro-batch, {len(features)}, got {len(value)}")
        return value
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    shapes = [tuple(_rows(labels_of(f)).shape) for f in features]
    rows = [rows for rows, _ in shapes]
    longest = max((length for _, length in shapes), default=0)
    equal = len({length for _, length in shapes}) <= 1
    samples = all(np.ndim(f['labels']) == 1 for f in features)  # a call pads them, and leaves room behind
    padded = samples and isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] >= longest
    if not isinstance(value, Tensor) or value.shape[0] != sum(rows) or not (equal or padded):
        raise ValueError(
            f"outputs['{key}'] of {len(features)} micro-batches must be a list with one entry each, or one tensor with "
            f'the rows of all, which then are equally long, got {_what(value)} for labels {shapes}'
        )
    parts = value.split(rows) if equal else [x[:, :n] for x, (_, n) in zip(value.split(rows), shapes)]
    flat = [labels_of(f) for f in features]
    return [x[0] if y is not None and y.dim() == 1 else x for x, y in zip(parts, flat)]


def _rows(labels: Tensor | None) -> Tensor:
    if labels is None:
        raise ValueError('inputs must hold labels, got none')
    return labels.reshape(1, -1) if labels.dim() < 2 else labels


def aligned(
    features: Sequence[Features], kinds: Mapping[str, str], ignore_index: int, **extra: Any
) -> list[dict[str, Any]]:
    """Keywords of `accumulate` over these micro-batches, aligned with the labels of each; see `align_extras`.

    The slices that `MegatronModel` feeds bring theirs aligned already.
    """
    given = {key: value for key, value in extra.items() if value is not None}
    if not features or not given:
        return [{} for _ in features]
    if len(features) == 1 and 'sequence_ids' in features[0]:
        return [given]
    rows = [WholeRows.of(f, ignore_index) for f in features]
    found = align_extras(given, kinds, rows)
    shapes = [tuple(np.shape(f['labels'])) for f in features]
    return [{key: value.view(shape) for key, value in part.items()} for part, shape in zip(found, shapes)]


def _dicts(value: Any, name: str) -> list[Features]:
    if value is None:
        return []
    items = [value] if isinstance(value, Mapping) else value
    if not isinstance(items, Sequence) or isinstance(items, str) or not all(isinstance(i, Mapping) for i in items):
        raise ValueError(f'{name} must be a dictionary or a list of dictionaries, got {_what(value)}')
    return list(items)


def _what(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f'{type(value).__name__} of {", ".join(sorted({type(item).__name__ for item in value}))}'
    return type(value).__name__


def labels_of(features: Features) -> Tensor | None:
    """The labels as int64, or None where there are none."""
    labels = features.get('labels')
    return None if labels is None else _integers(labels, 'labels').to(torch.int64)


def counted_of(features: Features, labels: Tensor) -> Tensor:
    """Which tokens count, as bool: not ignored, and `completion_mask`, if there is one, not 0."""
    inputs = InputFeature(labels=labels)
    mask = features.get('completion_mask')
    if mask is not None:
        inputs['completion_mask'] = as_tensor(mask, 'completion_mask')
    return trained_labels(inputs, IGNORED) != IGNORED


def token_count(features: Sequence[Features]) -> Tensor | None:
    """Counted tokens of these micro-batches, or None where one has no labels. Labels may be numbers of any kind."""
    total = None
    for feature in features:
        labels = feature.get('labels')
        if labels is None:
            return None
        labels = as_tensor(labels, 'labels')
        count = counted_of(feature, labels).sum()
        total = count if total is None else total + count.to(total.device)
    return total


def as_tensor(value: Any, name: str) -> Tensor:
    """A tensor as it is; numpy arrays and (nested) lists copied into one on the CPU. ValueError if they are ragged."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f'{name} must be a tensor, an array or a list of equally long lists: {error}') from error


def _integers(value: Any, name: str) -> Tensor:
    tensor = as_tensor(value, name)
    if tensor.numel() == 0:
        return tensor  # an empty list carries no dtype
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f'{name} must hold integer ids, got {tensor.dtype}')
    return tensor
