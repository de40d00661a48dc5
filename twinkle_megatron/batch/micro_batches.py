"""One call's inputs as micro-batches of 2-D tensors: collation and padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data_format import InputFeature

DEFAULT_SIZE = 2
"""Samples of a micro-batch."""

TARGETS = 'labels that are no ids'
"""Their key on the way to the model; one that no caller has."""

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def as_micro_batches(
    inputs: Any,
    micro_batch_size: int | None,
    ignore_index: int = -100,
    sizes: Callable[[list[dict[str, Any]], int], list[int]] | None = None,
    join: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None,
) -> list[dict[str, Any]]:
    """The micro-batches of one call, each with 2-D tensors `[b, s]` under InputFeature's keys; nothing is copied to a
    GPU.

    `inputs` is one InputFeature or a list: of micro-batches (2-D values), or of samples (1-D values), which are
    collated into micro-batches of `micro_batch_size` (default `DEFAULT_SIZE`), padded at the end with labels of
    `ignore_index`; or of so many samples as `sizes` says, given the samples and that size; or by `join`, which makes
    micro-batches of all of them.
    Lists and numeric numpy arrays become tensors, ids of any integer dtype int64.
    """
    features = [inputs] if isinstance(inputs, Mapping) else inputs
    if (
        not isinstance(features, Sequence)
        or isinstance(features, str)
        or not all(isinstance(f, Mapping) for f in features)
    ):
        raise ValueError(f'inputs must be a list of InputFeature dicts, got {describe(inputs)}')
    if micro_batch_size is not None and (not isinstance(micro_batch_size, Integral) or micro_batch_size < 1):
        raise ValueError(f'micro_batch_size must be an int >= 1, got {micro_batch_size!r}')
    batches = [_tensors(feature, index) for index, feature in enumerate(features)]
    dims = {batch['input_ids'].dim() for batch in batches}
    if dims <= {2}:
        return batches
    if dims == {1} and join is not None:
        return join(batches)
    if dims == {1}:
        size = int(micro_batch_size or DEFAULT_SIZE)
        counts = [size] * -(-len(batches) // size) if sizes is None else sizes(batches, size)
        ends = list(itertools.accumulate(counts))
        return [_collate(batches[end - count : end], ignore_index) for count, end in zip(counts, ends)]
    raise ValueError(
        'inputs must be all micro-batches (input_ids [b, s]) or all samples (input_ids [s]), got input_ids with '
        f'{sorted(dims)} dims'
    )


def pad_micro_batch(batch: Mapping[str, Any], rows: int, length: int, ignore_index: int) -> dict[str, Any]:
    """The micro-batch with ignored rows and ignored trailing tokens added, `[rows, length]`."""
    b, s = batch['input_ids'].shape
    fill = {'labels': ignore_index}
    out = dict(batch)
    if (b, s) != (rows, length):
        for key, value in batch.items():
            if is_per_token(value, (b, s)):
                out[key] = _grow(value, rows, length, fill.get(key, 0))
    return out


def _tensors(feature: Mapping[str, Any], index: int) -> dict[str, Any]:
    out = {key: _plain(key, value, f"inputs[{index}]['{key}']") for key, value in feature.items()}
    ids = out.get('input_ids')
    if not isinstance(ids, Tensor) or ids.dim() not in (1, 2):
        raise ValueError(f"inputs[{index}]['input_ids'] must be [b, s], or [s] for one sample, got {describe(ids)}")
    return out


def _plain(key: str, value: Any, where: str) -> Any:
    """Numbers as a tensor that autograd takes, ids as int64; anything else as it is."""
    listed = isinstance(value, (list, tuple)) and key in InputFeature.__annotations__
    if listed or (isinstance(value, np.ndarray) and value.dtype.kind in 'biuf'):
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f'{where} must be a tensor, or numbers in equally long lists: {error}') from error
    if not isinstance(value, Tensor):
        return value
    if key in ('input_ids', 'labels', 'position_ids') and value.dtype in _INTEGERS:
        value = value.long()
    return value.clone() if value.is_inference() else value


def _collate(samples: list[dict[str, Any]], ignore_index: int) -> dict[str, Any]:
    """Samples `[s_i]` as one micro-batch `[b, max s_i]`; other values become lists."""
    lengths = [sample['input_ids'].shape[0] for sample in samples]
    keys = list(samples[0])
    if any(set(sample) != set(keys) for sample in samples):
        raise ValueError(f'the samples of a micro-batch must have the same keys, got {[sorted(s) for s in samples]}')
    out: dict[str, Any] = {}
    for key in keys:
        values = [sample[key] for sample in samples]
        if key == TARGETS:
            out[key] = _stacked(values)
        elif all(isinstance(v, Tensor) and v.shape == (n,) for v, n in zip(values, lengths)):
            fill = ignore_index if key == 'labels' else 0
            out[key] = torch.cat([_grow(v[None], 1, max(lengths), fill) for v in values])
        elif key in ('labels', 'completion_mask', 'position_ids', 'attention_mask'):
            got = ', '.join(describe(v) for v in values)
            raise ValueError(f"'{key}' of each sample must have the length of its input_ids, {lengths}, got {got}")
        elif key == 'cu_seqlens':
            raise ValueError("a packed row must be 2-D, [1, T], beside its 'cu_seqlens', got input_ids [T]")
        else:
            out[key] = values
    if 'attention_mask' not in out:
        real = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
        out['attention_mask'] = real.long()
    return out


def _stacked(targets: list[Tensor]) -> Tensor:
    """What each sample has in place of labels: one number, or equally many."""
    shapes = {tuple(target.shape) if target.numel() != 1 else () for target in targets}
    if len(shapes) > 1:
        raise ValueError(f"'labels' of samples must be one entry a sample, all of one shape, got {sorted(shapes)}")
    return torch.stack([target.reshape(next(iter(shapes))) for target in targets])


def is_per_token(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether it is a tensor `[b, s]` or `[b, s, c]`, whose entries belong to the tokens of rows of this shape."""
    return isinstance(value, Tensor) and value.dim() in (2, 3) and tuple(value.shape[:2]) == tuple(shape)


def _grow(value: Tensor, rows: int, length: int, fill: int) -> Tensor:
    out = value.new_full((rows, length, *value.shape[2:]), fill)
    out[: value.shape[0], : value.shape[1]] = value
    return out


def describe(value: Any) -> str:
    """What a caller gave, for an error message."""
    if isinstance(value, Tensor):
        return f'a tensor of shape {tuple(value.shape)}'
    if isinstance(value, list) and value:
        return f'a list of {type(value[0]).__name__}'
    return type(value).__name__
