"""What a micro-batch has to hold: shapes and dtypes first, then values, which may lie on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .micro_batches import describe


def check_micro_batch(batch: Mapping[str, Any], index: int, needs_labels: bool) -> None:
    """ValueError, naming the micro-batch, unless the shapes and dtypes of its tensors fit. Looks at no values."""
    where, ids = f'inputs[{index}]', batch['input_ids']
    for key in ('labels', 'completion_mask', 'position_ids', 'attention_mask', 'cu_seqlens'):
        value = batch.get(key)
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"{where}['{key}'] must be a tensor, an array or a list of numbers, got {describe(value)}")
    for key in ('labels', 'completion_mask', 'position_ids'):
        value = batch.get(key)
        if value is not None and value.shape != ids.shape:
            raise ValueError(
                f"{where}['{key}'] must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(value.shape)}"
            )
    if needs_labels and batch.get('labels') is None:
        raise ValueError(
            f"{where} has no 'labels' (ids already shifted by one, -100 where ignored), got the keys {sorted(batch)}"
        )
    for key in ('input_ids', 'labels', 'position_ids'):
        value = batch.get(key)
        if value is not None and (value.dtype.is_floating_point or value.dtype == torch.bool):
            raise ValueError(f"{where}['{key}'] must hold integer ids, got {value.dtype}")
    mask = batch.get('attention_mask')
    if mask is not None and mask.dim() != 4 and mask.shape != ids.shape:
        raise ValueError(
            f"{where}['attention_mask'] must be [b, s] = {tuple(ids.shape)} with 1 for tokens and 0 for padding, or "
            f'absent (causal), got {tuple(mask.shape)}'
        )


def check_mask(batch: Mapping[str, Any], index: int) -> None:
    """ValueError unless a 2-D mask masks nothing but the end of each row. A host read."""
    mask = batch['attention_mask']
    if bool((mask[:, 1:].int() > mask[:, :-1].int()).any()):
        raise explain_fault('attention_mask', batch, index, None, 0)


def value_faults(
    batch: Mapping[str, Any], vocab_size: int | None, ignore_index: int, max_length: int | None = None
) -> dict[str, Tensor]:
    """How many values of each key are wrong: ids out of the vocabulary, positions that the model has no embedding for,
    tokens after padding. No host sync on a GPU."""
    faults = {}
    positions = batch.get('position_ids')
    if positions is not None and max_length is not None:
        faults['position_ids'] = ((positions < 0) | (positions >= max_length)).sum()
    for key in ('input_ids', 'labels'):
        value = batch.get(key)
        if value is not None and vocab_size is not None:
            faults[key] = _outside(key, value, vocab_size, ignore_index).sum()
    mask = batch.get('attention_mask')
    if mask is not None and mask.dim() == 2:
        faults['attention_mask'] = (mask[:, 1:].int() > mask[:, :-1].int()).sum()
    return faults


def _outside(key: str, ids: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Where ids are outside the vocabulary; labels may be `ignore_index` too."""
    outside = (ids < 0) | (ids >= vocab_size)
    return outside if key == 'input_ids' else outside & (ids != ignore_index)


def explain_fault(
    key: str,
    batch: Mapping[str, Any],
    index: int,
    vocab_size: int | None,
    ignore_index: int,
    max_length: int | None = None,
) -> ValueError:
    """The error for a key in which `value_faults` found something."""
    where = f"inputs[{index}]['{key}']"
    if key == 'attention_mask':
        return ValueError(
            f"{where} must mask trailing padding only: Megatron's causal attention does not see left or inner padding; "
            'move the padding to the end of each row, or pack the rows'
        )
    value = batch[key]
    if key == 'position_ids':
        return ValueError(
            f"{where} must lie in [0, {max_length}), the model's max_sequence_length, got values from "
            f'{int(value.min())} to {int(value.max())}'
        )
    assert vocab_size is not None
    bad = value[_outside(key, value, vocab_size, ignore_index)]
    also = '' if key == 'input_ids' else f' or ignore_index {ignore_index}'
    return ValueError(
        f'{where} must hold ids in [0, {vocab_size}){also}, got {bad[:3].tolist()} ({bad.numel()} in all); does the '
        'tokenizer belong to this model?'
    )
