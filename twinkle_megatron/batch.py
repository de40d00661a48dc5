"""Micro-batches: collation, padding, the context parallel split, and the tokens that a loss is taken over.

Plain tensors on explicit sizes; nothing here knows Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .data_format import InputFeature

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one micro-batch that a loss is taken over.

    `labels` `[..., s]` are aligned with the logits; tokens that do not count hold `ignore_index`. `tokens` is what a
    mean over tokens divides by: the count of the whole global batch inside `MegatronModel`, else that of these labels,
    at least 1, so that the mean of no tokens is 0.
    """

    labels: Tensor
    ignore_index: int
    tokens: float | Tensor

    @classmethod
    def of(cls, inputs: InputFeature, ignore_index: int = -100, tokens: float | None = None) -> TokenBatch:
        """From `inputs['labels']` and, where given, `inputs['completion_mask']`. ValueError without labels."""
        labels = trained_labels(inputs, ignore_index)
        count = (labels != ignore_index).sum().clamp(min=1) if tokens is None else tokens
        return cls(labels, ignore_index, count)

    @property
    def count(self) -> Tensor:
        """Tokens of this micro-batch on this rank that count, int64."""
        return (self.labels != self.ignore_index).sum()


def trained_labels(inputs: InputFeature, ignore_index: int = -100) -> Tensor:
    """`labels` with `ignore_index` where `completion_mask` is 0. ValueError without labels or for unequal shapes."""
    labels = inputs.get('labels')
    if labels is None:
        raise ValueError(f"inputs must hold 'labels' (shifted, -100 where ignored), got the keys {sorted(inputs)}")
    labels = torch.as_tensor(labels)
    mask = inputs.get('completion_mask')
    if mask is None:
        return labels
    mask = torch.as_tensor(mask)
    if mask.shape != labels.shape:
        raise ValueError(
            f'completion_mask must have the shape of labels, {tuple(labels.shape)}, got {tuple(mask.shape)}; was it '
            'shifted with the labels?'
        )
    return labels.masked_fill(mask.to(labels.device, non_blocking=True) == 0, ignore_index)


def as_micro_batches(inputs: Any, micro_batch_size: int | None, ignore_index: int = -100) -> list[dict[str, Any]]:
    """The micro-batches of one call, each with 2-D tensors `[b, s]` under InputFeature's keys; nothing is copied to a
    GPU.

    `inputs` is one InputFeature or a list: of micro-batches (2-D values), or of samples (1-D values), which are
    collated into micro-batches of `micro_batch_size` (default 2), padded at the end with labels of `ignore_index`.
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
    if dims == {1}:
        size = int(micro_batch_size or min(2, len(batches)))
        return [_collate(batches[i : i + size], ignore_index) for i in range(0, len(batches), size)]
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
            if isinstance(value, Tensor) and value.shape == (b, s):
                out[key] = _grow(value, rows, length, fill.get(key, 0))
    return out


def zigzag(length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Positions of a sequence that context parallel rank `cp_rank` holds: chunks r and 2·cp − 1 − r of 2·cp equal
    chunks."""
    if length % (2 * cp_size):
        raise ValueError(
            f'a sequence must be a multiple of 2 · cp = {2 * cp_size} tokens long to be split, got {length}'
        )
    chunk = length // (2 * cp_size)
    first, last = cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(last, last + chunk)])


def split_context(batch: Mapping[str, Any], cp_size: int, cp_rank: int) -> dict[str, Any]:
    """This context parallel rank's tokens of every `[b, s]` tensor of the micro-batch; the whole batch for cp 1."""
    if cp_size == 1:
        return dict(batch)
    shape = batch['input_ids'].shape
    at = zigzag(shape[1], cp_size, cp_rank)
    return {
        key: value[:, at.to(value.device)] if isinstance(value, Tensor) and value.shape == shape else value
        for key, value in batch.items()
    }


def join_context(parts: Tensor) -> Tensor:
    """The inverse of the split: `[cp, b, s/cp]`, the ranks' parts in rank order, to `[b, s]` in input order."""
    cp_size, rows, local = parts.shape
    if cp_size == 1:
        return parts[0]
    out = parts.new_empty((rows, cp_size * local))
    for rank in range(cp_size):
        out[:, zigzag(cp_size * local, cp_size, rank).to(parts.device)] = parts[rank]
    return out


def sequence_boundaries(batch: Mapping[str, Any]) -> Tensor | None:
    """`cu_seqlens` int32 `[sequences + 1]` of a packed micro-batch `[1, T]`, None for padded rows.

    Packed is what carries `cu_seqlens`, or one row whose `position_ids` restart at 0.
    """
    ids, boundaries, positions = batch['input_ids'], batch.get('cu_seqlens'), batch.get('position_ids')
    if boundaries is not None:
        flat = boundaries.reshape(-1).to(torch.int32)
        sound = ids.shape[0] == 1 and flat.numel() >= 2 and int(flat[0]) == 0 and bool((flat.diff() >= 0).all())
        if not sound or int(flat[-1]) > ids.shape[1]:
            raise ValueError(
                f'cu_seqlens must rise from 0 to at most T for a packed row [1, T], got {flat.tolist()} for '
                f'input_ids {tuple(ids.shape)}'
            )
        return flat
    if positions is None:
        return None
    begins = positions == 0
    mask = batch.get('attention_mask')
    if mask is not None and mask.shape == ids.shape:
        begins = begins & (mask != 0)  # padding often has position 0
    if ids.shape[0] != 1:
        if (begins[:, 1:-1] & (positions[:, 2:] == 1)).any():
            raise ValueError(
                f'position_ids restart at 0 inside a row, as in a packed row, but there are {ids.shape[0]} rows; make '
                'each packed row a micro-batch [1, T] of its own'
            )
        return None
    if not begins[:, 1:].any():
        return None
    starts = begins[0].nonzero()[:, 0].to(torch.int32)
    if starts[0] != 0:
        raise ValueError(f'position_ids of a packed row must start at 0, got {int(positions[0, 0])} first')
    return torch.cat([starts, torch.tensor([ids.shape[1]], dtype=torch.int32, device=starts.device)])


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
        if all(isinstance(v, Tensor) and v.shape == (n,) for v, n in zip(values, lengths)):
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


def _grow(value: Tensor, rows: int, length: int, fill: int) -> Tensor:
    out = value.new_full((rows, length), fill)
    out[: value.shape[0], : value.shape[1]] = value
    return out


def describe(value: Any) -> str:
    """What a caller gave, for an error message."""
    if isinstance(value, Tensor):
        return f'a tensor of shape {tuple(value.shape)}'
    if isinstance(value, list) and value:
        return f'a list of {type(value[0]).__name__}'
    return type(value).__name__


def split_extra(extra: Mapping[str, Any], batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The keywords of a call, one dict a micro-batch.

    A tensor, array or list with one entry a sample is split in sample order; anything else goes to every micro-batch.
    """
    rows = [int(batch['input_ids'].shape[0]) for batch in batches]
    out: list[dict[str, Any]] = [{} for _ in rows]
    for key, value in extra.items():
        sized = isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0
        by_sample = (sized or isinstance(value, (list, tuple))) and len(cast(Any, value)) == sum(rows)
        first = 0
        for part, count in zip(out, rows):
            part[key] = value[first : first + count] if by_sample else value
            first += count
    return out
