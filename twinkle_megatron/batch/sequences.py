"""Which tokens belong to which sequence: padded rows, packed rows, and their slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .micro_batches import describe, is_per_token


class Packing(NamedTuple):
    """Where the n sequences of a packed row `[1, T]` lie.

    `boundaries` int32 `[n + 1]`: the first token of each in memory, from 0, and the end of the last one. `lengths`
    int32 `[n]`: its tokens; what follows them up to the next sequence is padding.
    """

    boundaries: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor, name: str) -> Packing:
        """Without the empty sequences that fill a `cu_seqlens` of fixed size."""
        real = lengths > 0
        boundaries = torch.cat([starts[:-1][real], starts[-1:]])
        if not real.any() or boundaries[0] != 0:
            raise ValueError(
                f'{name} must hold a sequence with tokens, and no room before the first such one, got starts '
                f'{starts.tolist()} and lengths {lengths.tolist()}; leave a row without tokens out'
            )
        return cls(boundaries, lengths[real])


def packing_of(batch: Mapping[str, Any]) -> Packing | None:
    """How a micro-batch `[1, T]` is packed, None for padded rows.

    Packed is what carries `cu_seqlens` (with `cu_seqlens_padded` where each sequence is followed by padding of its own)
    or Megatron's `packed_seq_params`, or one row whose `position_ids` restart at 0. Sequences without tokens, with
    which a `cu_seqlens` is filled up, do not count, nor do several tokens of position 0 at the end, which are padding.
    ValueError for boundaries that are none.
    """
    given = _given_boundaries(batch)
    if given is not None:
        return given
    ids, positions = batch['input_ids'], batch.get('position_ids')
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
    last = int((positions[0] != 0).nonzero()[-1]) + 1 if (positions[0] != 0).any() else ids.shape[1]
    if ids.shape[1] - last > 1 and mask is None:  # padding has position 0 throughout, and no sequence one token
        boundaries = torch.cat([starts[starts < last], starts.new_tensor([last])])
        return Packing(boundaries, boundaries.diff())
    boundaries = torch.cat([starts, torch.tensor([ids.shape[1]], dtype=torch.int32, device=starts.device)])
    return Packing(boundaries, boundaries.diff())


def _given_boundaries(batch: Mapping[str, Any]) -> Packing | None:
    true, stored, name = batch.get('cu_seqlens'), batch.get('cu_seqlens_padded'), 'cu_seqlens'
    params = batch.get('packed_seq_params')
    if params is not None and true is None:
        true = getattr(params, 'cu_seqlens_q', None)
        stored, name = getattr(params, 'cu_seqlens_q_padded', None), 'packed_seq_params.cu_seqlens_q'
        if true is None:
            raise ValueError(f'packed_seq_params must hold cu_seqlens_q, got {describe(params)}')
    if true is None:
        return None
    ids = batch['input_ids']
    true = _boundaries(true, name, ids)
    if stored is None:
        return Packing.of(true, true.diff(), name)
    stored = _boundaries(stored, name + '_padded', ids)
    if stored.shape != true.shape or bool((stored.diff() < true.diff()).any()):
        raise ValueError(
            f'{name}_padded must have room for every sequence of {name}, got {stored.tolist()} for {true.tolist()}'
        )
    return Packing.of(stored, true.diff(), name)


def _boundaries(given: Any, name: str, ids: Tensor) -> Tensor:
    flat = torch.as_tensor(given).reshape(-1).to(torch.int32)
    sound = ids.shape[0] == 1 and flat.numel() >= 2 and int(flat[0]) == 0 and bool((flat.diff() >= 0).all())
    if not sound or int(flat[-1]) > ids.shape[1]:
        raise ValueError(
            f'{name} must rise from 0 to at most T for a packed row [1, T], got {flat.tolist()} for '
            f'input_ids {tuple(ids.shape)}'
        )
    return flat


def sequence_ids(shape: tuple[int, ...], packing: Packing | None, device: torch.device) -> Tensor:
    """The number of each token's sequence, int64 of `shape` `[b, s]`: the row of padded rows, else the packed one.

    What follows the last packed sequence counts to it.
    """
    if packing is None:
        return torch.arange(shape[0], device=device)[:, None].expand(shape)
    starts = packing.boundaries[1:-1].to(device)
    return torch.bucketize(torch.arange(shape[1], device=device), starts, right=True)[None]


def inside_sequences(shape: tuple[int, ...], packing: Packing | None, device: torch.device) -> Tensor | None:
    """Where a packed row `[1, T]` holds tokens and no padding, bool; None where all of it does, as far as is known."""
    if packing is None:
        return None
    starts, lengths = packing.boundaries[:-1].to(device), packing.lengths.to(device)
    whose = sequence_ids(shape, packing, device)[0]
    return (torch.arange(shape[1], device=device) - starts[whose] < lengths[whose])[None]


def sequence_lengths(batch: Mapping[str, Any], packing: Packing | None) -> Tensor:
    """Tokens of each sequence of the micro-batch, `[n]`; for padded rows what `attention_mask` says, else all."""
    if packing is not None:
        return packing.lengths
    ids, mask = batch['input_ids'], batch.get('attention_mask')
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return (mask != 0).sum(1)
    return torch.full((ids.shape[0],), ids.shape[1], device=ids.device)


def shift_labels(inputs: Mapping[str, Any], ignore_index: int = -100) -> Tensor:
    """Labels aligned with the logits, from those aligned with the tokens.

    `labels[..., i]` is the token at i + 1, and `ignore_index` at the end of each sequence: never the first token of the
    next packed one, nor one of the padding that a 2-D `attention_mask` tells. Shift before the context parallel split,
    whose ranks lack the token that follows a chunk.

    Args:
        inputs: `labels` (else `input_ids`) `[b, s]`, `[s]`, or packed `[1, T]` with `position_ids`, `cu_seqlens` or
            `packed_seq_params`.
    """
    given = inputs.get('labels')
    tokens = torch.as_tensor(inputs['input_ids'] if given is None else given)
    rows = tokens.reshape(1, -1) if tokens.dim() == 1 else tokens
    shifted = torch.cat([rows[:, 1:], rows.new_full((rows.shape[0], 1), ignore_index)], 1)
    aligned = _as_row(inputs, rows)
    mask = aligned.get('attention_mask')
    if mask is not None and mask.shape == rows.shape:
        shifted[:, :-1] = shifted[:, :-1].masked_fill(mask[:, 1:] == 0, ignore_index)
    packing = packing_of({**inputs, 'input_ids': rows, **aligned})
    if packing is not None:
        ends = packing.boundaries[:-1] + packing.lengths - 1
        shifted[:, ends.long().to(rows.device)] = ignore_index
        inside = inside_sequences(tuple(rows.shape), packing, rows.device)
        assert inside is not None
        shifted = shifted.masked_fill(~inside, ignore_index)
    return shifted.view(tokens.shape)


def _as_row(inputs: Mapping[str, Any], rows: Tensor) -> dict[str, Tensor]:
    """`position_ids` and `attention_mask` in the shape of `rows`."""
    keys = [key for key in ('position_ids', 'attention_mask') if inputs.get(key) is not None]
    tensors = {key: torch.as_tensor(inputs[key]) for key in keys}
    return {key: x.view(rows.shape) if x.numel() == rows.numel() else x for key, x in tensors.items()}


def spread_out(batch: Mapping[str, Any], packing: Packing, multiple: int, ignore_index: int) -> Spread:
    """A packed row in which every sequence has a multiple of `multiple` tokens, the added ones ignored."""
    room = -(-packing.boundaries.diff() // multiple) * multiple
    boundaries = torch.cat([room.new_zeros(1), room.cumsum(0).to(torch.int32)])
    if torch.equal(boundaries, packing.boundaries):
        return Spread(dict(batch), packing, None)
    shape = batch['input_ids'].shape
    used = int(packing.boundaries[-1])
    whose = sequence_ids((1, used), packing, packing.boundaries.device)[0]
    columns = torch.arange(used, device=whose.device) + (boundaries - packing.boundaries)[whose]
    out = dict(batch)
    for key, value in batch.items():
        if is_per_token(value, shape):
            fill = ignore_index if key == 'labels' else 0
            out[key] = value.new_full((1, int(boundaries[-1]), *value.shape[2:]), fill)
            out[key][:, columns.to(value.device)] = value[:, :used]
    return Spread(out, Packing(boundaries, packing.lengths), columns)


class Spread(NamedTuple):
    """A packed row with more room, and in which column each of its former tokens lies now; None where nothing moved."""

    batch: dict[str, Any]
    packing: Packing
    columns: Tensor | None
