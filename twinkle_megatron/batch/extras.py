"""Keywords of a call (advantages, log-probs of other policies) as tensors aligned with the labels of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from .micro_batches import describe
from .vectors import align_vectors
from .whole_rows import WholeRows

PER_TOKEN, LOG_PROBS, PER_PAIR = 'per token', 'log-probs', 'per pair'
OUTPUTS, VECTORS, HEADS, CONSTANT = 'outputs', 'vectors', 'heads', 'constant'
"""What a keyword is. `PER_TOKEN` values are aligned with the labels. So are `LOG_PROBS`, of which one number for a
whole sequence would be none of its tokens'. `PER_PAIR` ones are one number for each pair of sequences. `OUTPUTS` are
what another model's forward pass returned, of which `logps` count, as `LOG_PROBS`. `VECTORS` are several numbers for
each token, see `align_vectors`. `HEADS` are one thing for each micro-batch, which belongs to it as it is. `CONSTANT`
ones go to every micro-batch as they are."""


def align_extras(
    extra: Mapping[str, Any],
    kinds: Mapping[str, str],
    rows: Sequence[WholeRows],
    shifted: bool = True,
    order: Sequence[int] | None = None,
    pairs: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """The keywords of a call over these micro-batches, one dict a micro-batch.

    What `kinds` calls `PER_TOKEN` becomes a float tensor `[b, s]`, 0 where nothing is trained. It may be given as

    - one number for each sequence: a tensor or array `[S]` or `[S, 1]`, a list of numbers or 0-d tensors;
    - a row for each sequence, in a list (ragged or not) or as `[S, L]`: of its trained tokens alone, as a sampler
      returns them, or of all its tokens (and perhaps padding behind), aligned with the labels;
    - a tensor aligned with the labels, `[b, s]`, or a list of one for each micro-batch, as `forward_only` returns them,

    where S counts the sequences of the call in order, each one of a packed row by itself. With `shifted` False rows of
    all tokens are aligned with `input_ids` (entry i is of token i) and shifted here. `order` says which samples of the
    call became the sequences of these rows, and `pairs` which pairs, where that is not the order in which they were
    given. ValueError, naming the keyword and the sample, for any other length. None stays None.

    What it calls `LOG_PROBS` must not be one number for a sequence that has several trained tokens. `OUTPUTS` is a
    dictionary whose `logps` have such a form, or a list of such, one a micro-batch. `PER_PAIR` is a tensor, an array or
    a list of one number for each pair of the call, in order, and becomes a float tensor `[p]`.
    """
    out: list[dict[str, Any]] = [{} for _ in rows]
    for key, value in extra.items():
        kind = kinds.get(key, CONSTANT)
        how = _How(shifted, order, spreads=kind == PER_TOKEN)
        if value is None or kind == CONSTANT:
            parts: Sequence[Any] = [value] * len(rows)
        elif not rows:
            parts = []
        elif kind == HEADS:
            parts = _one_each(key, value, len(rows))
        elif kind == VECTORS:
            parts = align_vectors(key, value, rows, shifted, order)
        elif kind == PER_PAIR:
            split = split_by_pair(key, value, [row.count // 2 for row in rows], pairs)
            parts = [part.to(row.labels.device) for part, row in zip(split, rows)]
        else:  # what stands at ignored tokens may be NaN, and must not get into sums of gradients
            parts = [
                part.masked_fill(row.labels == row.ignore_index, 0)
                for part, row in zip(_aligned(key, _log_probs(key, value, kind), rows, how), rows)
            ]
        for mine, part in zip(out, parts):
            mine[key] = part
    return out


def _one_each(key: str, value: Any, count: int) -> Sequence[Any]:
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(given) != count:
        raise ValueError(f'{key} must be a list with one entry for each of the {count} micro-batches, got {len(given)}')
    return given


class _How(NamedTuple):
    """See `align_extras`; `spreads`: one number a sequence stands for all of its tokens."""

    shifted: bool
    order: Sequence[int] | None
    spreads: bool


def _log_probs(key: str, value: Any, kind: str) -> Any:
    """Of outputs, their log-probs."""
    if kind != OUTPUTS:
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(one, Mapping) for one in value):
        each = [_log_probs(f'{key}[{i}]', one, kind) for i, one in enumerate(value)]
        return [x for one in each for x in (one if isinstance(one, (list, tuple)) else [one])]
    if not isinstance(value, Mapping) or value.get('logps') is None:
        got = sorted(value) if isinstance(value, Mapping) else describe(value)
        raise ValueError(f"{key} must be a dictionary with 'logps', the log-prob of each label, got {got}")
    return value['logps']


def split_by_pair(key: str, value: Any, pairs: Sequence[int], order: Sequence[int] | None = None) -> list[Tensor]:
    """One number for each pair of a call, as a float tensor `[p]` for each micro-batch of so many pairs, which are
    those of `order`, else in the order given."""
    whole = _as_given(key, value, 'pair')
    if isinstance(whole, list) and all(np.size(item) == 1 for item in whole if not isinstance(item, Tensor)):
        numbers = [_numbers(key, item, i, 'pair') for i, item in enumerate(whole)]
        whole = torch.from_numpy(np.concatenate([*numbers, np.zeros(0)]))
    if not isinstance(whole, Tensor) or whole.numel() != sum(pairs):
        got = describe(value) if not isinstance(value, list) else f'a list of {len(value)} entries'
        raise ValueError(f'{key} must be one number for each of the {sum(pairs)} pairs of the call, got {got}')
    flat = whole.reshape(-1) if order is None else whole.reshape(-1)[list(order)]
    return list(flat.split(list(pairs)))


def _aligned(key: str, value: Any, rows: Sequence[WholeRows], how: _How) -> list[Tensor]:
    shifted, order = how.shifted, how.order
    whole = _as_given(key, value)
    sequences = sum(row.count for row in rows)
    if isinstance(whole, Tensor):
        aligned = len(rows) == 1 and (order is None or rows[0].packing is None)  # else nobody knows the row
        if whole.dim() == 0:
            _check_spread(key, how, rows, 'one number')
            return [row.spread(whole.expand(row.count)) for row in rows]
        if whole.dim() == 1 and aligned and (1, len(whole)) == rows[0].labels.shape and len(whole) != sequences:
            whole = whole[None]  # aligned with 1-D labels, or with those of one packed row
        if aligned and whole.shape == rows[0].labels.shape and whole.dim() == 2:
            return [_on(_unshifted(whole, rows[0]) if not shifted else whole, rows[0])]
        if whole.dim() == 2 and whole.shape[0] == sequences and whole.shape[1] == 1:
            whole = whole[:, 0]
        if whole.dim() == 1 and whole.shape[0] == sequences:
            _check_spread(key, how, rows, f'one number for each of the {sequences} sequences')
            whole = whole if order is None else whole[list(order)]
            return [row.spread(part) for row, part in zip(rows, whole.split([row.count for row in rows]))]
        if whole.dim() == 2 and len(whole) == sum(len(row.labels) for row in rows) != sequences:
            whole = list(whole.split([len(row.labels) for row in rows]))
        else:
            whole = list(whole)
    shapes = [tuple(row.labels.shape) for row in rows]
    matrices = [part for part in whole if isinstance(part, Tensor) and part.dim() == 2]
    if len(matrices) == len(whole) == len(rows) and (
        len(rows) != sequences or [tuple(part.shape) for part in matrices] == shapes
    ):
        return [_micro_batch(key, i, part, row, shifted) for i, (part, row) in enumerate(zip(matrices, rows))]
    if len(whole) != sequences:
        raise ValueError(
            f'{key} must have one entry for each of the {sequences} sequences of the call, or be aligned with the '
            f'labels, {shapes}, got {len(whole)} entries'
        )
    whole = whole if order is None else [whole[i] for i in order]
    out, first = [], 0
    for row in rows:
        out.append(_by_sequence(key, whole[first : first + row.count], row, first, how))
        first += row.count
    return out


def _check_spread(key: str, how: _How, rows: Sequence[WholeRows], got: str) -> None:
    if not how.spreads and any(row.trained.any() and int(row.tokens.max()) > 1 for row in rows):
        raise ValueError(
            f'{key} must be log-probs of every trained token, got {got}; sums over the sequences of pairs go into '
            'ref_chosen_logps and ref_rejected_logps'
        )


def _as_given(key: str, value: Any, of: str = 'sample') -> Tensor | list[Any]:
    """Tensors and arrays as tensors of floats; lists as lists, of numbers only as a tensor."""
    if not isinstance(value, (list, tuple, np.ndarray)) or (isinstance(value, np.ndarray) and value.dtype != object):
        try:
            tensor = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f'{key} must be numbers, got {describe(value)}: {error}') from error
        return tensor if tensor.is_floating_point() else tensor.double()
    items = [item.detach() if isinstance(item, Tensor) else item for item in value]
    if (
        items
        and all(np.ndim(item) == 0 for item in items if not isinstance(item, Tensor))
        and not any(isinstance(item, Tensor) and item.dim() for item in items)
    ):
        return torch.tensor([_numbers(key, item, i, of)[0] for i, item in enumerate(items)], dtype=torch.float64)
    return [torch.as_tensor(item) if isinstance(item, np.ndarray) else item for item in items]


def _on(value: Tensor, row: WholeRows) -> Tensor:
    floats = value if value.is_floating_point() else value.to(torch.float64)
    return floats.to(row.labels.device)


def _micro_batch(key: str, index: int, value: Tensor, row: WholeRows, shifted: bool) -> Tensor:
    if value.shape != row.labels.shape:
        raise ValueError(
            f'{key}[{index}] must have the shape of the labels of its micro-batch, {tuple(row.labels.shape)}, got '
            f'{tuple(value.shape)}'
        )
    return _on(value if shifted else _unshifted(value, row), row)


def _unshifted(value: Tensor, row: WholeRows) -> Tensor:
    """Entry i + 1 at place i: what belongs to a token stands where it is predicted."""
    return torch.cat([value[:, 1:], value.new_full((len(value), 1), torch.nan)], 1)  # nobody told that one


def _by_sequence(key: str, entries: Sequence[Any], row: WholeRows, first: int, how: _How) -> Tensor:
    values = np.zeros(row.trained.size, dtype=np.float64)
    for number, entry in enumerate(entries):
        sample = first + number if how.order is None else how.order[first + number]
        flat = _numbers(key, entry, sample)
        at = slice(row.starts[number], row.starts[number] + row.lengths[number])
        trained = row.trained[at]
        if flat.size == 1 and (how.spreads or trained.sum() <= 1):
            values[at][trained] = flat[0]
        elif flat.size == trained.sum():
            values[at][trained] = flat
        elif flat.size >= trained.size:
            aligned = flat[: trained.size] if how.shifted else np.append(flat[1:], np.nan)[: trained.size]
            values[at] = np.where(trained, aligned, 0)
        else:
            one = '1 entry, ' if how.spreads else ''
            raise ValueError(
                f'{key} of sample {sample} must have {one}{trained.sum()} (its trained tokens) or '
                f'{trained.size} (all of its tokens), got {flat.size}'
            )
    return torch.from_numpy(values).reshape(row.labels.shape).to(row.labels.device)


def _numbers(key: str, entry: Any, sample: int, of: str = 'sample') -> np.ndarray:
    try:
        if isinstance(entry, Tensor):
            if entry.dim() > 1 and entry.numel() != max(entry.shape):
                raise ValueError(f'one {of} has one row, and these are several: {tuple(entry.shape)}')
            return entry.double().cpu().numpy().reshape(-1)
        if entry is None:  # numpy would read it as NaN
            raise TypeError('None stands for no number')
        if isinstance(entry, (list, tuple)):
            entry = [float(x) for x in entry]
        return np.asarray(entry, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise ValueError(f'{key} of {of} {sample} must be numbers, got {describe(entry)}: {error}') from error


def split_extra(
    extra: Mapping[str, Any],
    batches: Sequence[Mapping[str, Any]],
    order: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """The keywords of a custom loss, which does not say what they are, one dict a micro-batch.

    A tensor, array or list with one entry a sample is split in sample order (`order`: see `align_extras`); anything
    else goes to every micro-batch. `counts` are the samples of each, where they are not its rows.
    """
    rows = [int(batch['input_ids'].shape[0]) for batch in batches] if counts is None else counts
    out: list[dict[str, Any]] = [{} for _ in rows]
    for key, value in extra.items():
        sized = isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0
        by_sample = (sized or isinstance(value, (list, tuple))) and len(cast(Any, value)) == sum(rows)
        if by_sample and order is not None:
            value = [value[i] for i in order] if isinstance(value, (list, tuple)) else value[list(order)]
        first = 0
        for part, count in zip(out, rows):
            part[key] = value[first : first + count] if by_sample else value
            first += count
    return out
