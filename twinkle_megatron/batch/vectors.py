"""Keywords that hold several numbers for each token: a teacher's logits, or its best few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .micro_batches import describe
from .whole_rows import WholeRows


def align_vectors(
    key: str, value: Any, rows: Sequence[WholeRows], shifted: bool, order: Sequence[int] | None
) -> list[Tensor]:
    """One tensor `[b, s, c]` a micro-batch, without a copy where it was given so.

    `value` may be

    - a tensor aligned with the labels, `[b, s, c]`, or with the rows of all micro-batches, `[B, ≥ s, c]`, or a list of
      one for each micro-batch;
    - for each sequence of the call a tensor `[L, c]`, or a list with a list of numbers for each token (of different
      lengths, None for a token without any): of its trained tokens alone, or of all its tokens (and perhaps padding
      behind). What is missing is −inf, in integers 0.

    With `shifted` False what is given for all tokens is aligned with `input_ids` (entry i is of token i).
    """
    whole = torch.as_tensor(value) if isinstance(value, np.ndarray) else value
    shapes = [tuple(row.labels.shape) for row in rows]
    if isinstance(whole, (list, tuple)) and len(whole) == len(rows):
        given = [tuple(part.shape[:2]) if isinstance(part, Tensor) and part.dim() == 3 else None for part in whole]
        if given == shapes:
            return [_shifted(part, shifted) for part in whole]
    sequences = sum(row.count for row in rows)
    if isinstance(whole, Tensor):
        if whole.dim() != 3:
            raise ValueError(f'{key} must be [b, s, c], several numbers for each token, got {describe(whole)}')
        if len(rows) == 1 and tuple(whole.shape[:2]) == shapes[0]:
            return [_shifted(whole, shifted)]
        fits = all(row.packing is None and whole.shape[1] >= s for row, (_, s) in zip(rows, shapes))
        if order is None and fits and len(whole) == sum(b for b, _ in shapes):
            parts = whole.split([b for b, _ in shapes])
            return [_shifted(part, shifted)[:, :s] for part, (_, s) in zip(parts, shapes)]
        whole = list(whole)
    if not isinstance(whole, (list, tuple)) or len(whole) != sequences:
        got = f'{len(whole)} entries' if isinstance(whole, (list, tuple)) else describe(value)
        raise ValueError(
            f'{key} must have one entry for each of the {sequences} sequences of the call, or be aligned with the '
            f'labels, {[(*shape, "c") for shape in shapes]}, got {got}'
        )
    entries = [_matrix(key, entry, i) for i, entry in enumerate(whole)]
    entries = entries if order is None else [entries[i] for i in order]
    dtype = next((entry.dtype for entry in entries if entry.numel()), torch.float64)
    out, first = [], 0
    for row in rows:
        names = list(range(first, first + row.count)) if order is None else order[first : first + row.count]
        out.append(_by_sequence(key, entries[first : first + row.count], row, names, shifted, dtype))
        first += row.count
    return out


def _fill(dtype: torch.dtype) -> float:
    return -torch.inf if dtype.is_floating_point else 0


def _shifted(value: Tensor, shifted: bool) -> Tensor:
    """Entry i + 1 at place i, along dim 1."""
    if shifted:
        return value
    last = value.new_full((value.shape[0], 1, value.shape[2]), _fill(value.dtype))
    return torch.cat([value[:, 1:], last], 1)


def _matrix(key: str, entry: Any, sample: int) -> Tensor:
    """`[L, c]`, ragged lists filled up."""
    try:
        if isinstance(entry, (Tensor, np.ndarray)):
            found = torch.as_tensor(entry)
        else:
            lists = [[] if one is None else list(one) for one in entry]
            width = max(map(len, lists), default=0)
            whole = all(isinstance(x, (int, np.integer)) for one in lists for x in one)
            dtype = torch.int64 if whole and width else torch.float64
            found = torch.full((len(lists), width), _fill(dtype), dtype=dtype)
            for row, one in zip(found, lists):
                row[: len(one)] = torch.tensor(one, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f'{key} of sample {sample} must hold numbers for each token: {error}') from error
    if found.dim() != 2:
        raise ValueError(f'{key} of sample {sample} must be [L, c], got {describe(found)}')
    return found


def _by_sequence(
    key: str, entries: Sequence[Tensor], row: WholeRows, names: Sequence[int], shifted: bool, dtype: torch.dtype
) -> Tensor:
    width = max([entry.shape[1] for entry in entries] + [1])  # where no token has any, too
    device = row.labels.device
    out = torch.full((row.trained.size, width), _fill(dtype), dtype=dtype, device=device)
    for number, entry in enumerate(entries):
        at = slice(row.starts[number], row.starts[number] + row.lengths[number])
        trained = torch.from_numpy(row.trained[at]).to(device)
        mine, columns = out[at], slice(0, entry.shape[1])
        given = entry.to(device=device, dtype=dtype)
        if len(entry) == int(trained.sum()) and len(entry) != len(trained):
            mine[trained, columns] = given
        elif len(entry) >= len(trained):
            aligned = given if shifted else torch.cat([given[1:], given.new_full((1, given.shape[1]), _fill(dtype))])
            mine[:, columns] = aligned[: len(trained)]
        else:
            raise ValueError(
                f'{key} of sample {names[number]} must have {int(trained.sum())} (its trained tokens) or '
                f'{len(trained)} (all of its tokens) rows, got {len(entry)}'
            )
    return out.view(*row.labels.shape, width)
