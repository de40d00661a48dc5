"""Samples packed into micro-batches by a budget of tokens, equally many on every data parallel replica.

What no micro-batch may cut is a unit: a sample, a pair, a group. Each replica says how many micro-batches its units
need (`least_bins`), all take the largest number (`agreed_bins`), and each spreads its units evenly over so many
(`balanced`). A micro-batch is one packed row (`packed_row`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..groups import Groups, raise_together
from .micro_batches import TARGETS, _collate, describe, is_per_token, pad_micro_batch
from .targets import Labelling, group_sizes, targets_apart


class Units(NamedTuple):
    """What no micro-batch cuts: `members` are the numbers of the samples of each, `tokens` the room that it takes,
    `kind` is 'sample', 'pair' (chosen before rejected) or 'group'."""

    members: list[list[int]]
    tokens: list[int]
    kind: str


class Packed(NamedTuple):
    """Which samples of a call each packed row has, in its order, and which pairs, where there are such; both by their
    numbers in the call. `lengths` are the tokens of every sample of it."""

    rows: list[list[int]]
    pairs: list[int] | None
    lengths: list[int]

    @property
    def order(self) -> list[int]:
        """The numbers of the samples, row by row."""
        return [i for row in self.rows for i in row]


def pack(
    inputs: Any,
    micro_batch_size: int | None,
    max_tokens: Any,
    labelling: Labelling,
    groups: Groups,
    multiple: int = 1,
    legal: Callable[[int], int] = lambda bins: bins,
) -> Packed:
    """Divides the samples of this replica among as many packed rows as every other replica has, of at most
    `max_tokens` each; fewer where it has not so many units.

    `legal` makes a number of rows one that the schedule takes, no smaller; `multiple`: see `units_of`. Collective over
    the layout, one all-gather of two numbers, which every rank enters even after an error of its own; then all of them
    raise. ValueError for inputs that are not samples, a budget below the longest unit, or a `micro_batch_size` beside
    it.
    """
    error: Exception | None = None
    units, lengths, own = Units([], [], 'sample'), [], 0
    try:
        if micro_batch_size is not None:
            raise ValueError(
                f'micro_batch_size ({micro_batch_size!r}) and max_tokens_per_micro_batch ({max_tokens!r}) both say '
                'what a micro-batch holds; give one of them'
            )
        lengths = lengths_of(inputs)
        samples = [inputs] if isinstance(inputs, Mapping) else inputs
        units = units_of(targets_apart(samples, labelling.kind), labelling.layout, labelling.in_groups, multiple)
        check_budget(max_tokens, units)
        own = least_bins(units.tokens, max_tokens)
    except Exception as caught:  # raised on every rank
        error = caught
    bins = balanced(units.tokens, legal(agreed_bins(own, groups, error)), max_tokens)
    rows = [row for row in samples_of_bins(units, bins, labelling.layout) if row]
    return Packed(rows, [i for one in bins for i in one] if units.kind == 'pair' else None, lengths)


def lengths_of(inputs: Any) -> list[int]:
    """Tokens of each of the 1-D samples of a call. ValueError for anything else."""
    samples = [inputs] if isinstance(inputs, Mapping) else inputs
    lengths = []
    if not isinstance(samples, Sequence) or isinstance(samples, str):
        raise ValueError(f'inputs must be a list of InputFeature dicts, got {describe(inputs)}')
    for index, sample in enumerate(samples):
        ids = sample.get('input_ids') if isinstance(sample, Mapping) else None
        try:
            shape = () if ids is None else tuple(np.shape(ids))
        except ValueError:  # lists of several lengths
            shape = ()
        if len(shape) != 1:
            got = f'input_ids of shape {shape}' if shape else describe(sample if ids is None else ids)
            raise ValueError(
                f'max_tokens_per_micro_batch packs samples, but inputs[{index}] must be one then, with input_ids [s], '
                f'got {got}; give the samples one by one, or leave max_tokens_per_micro_batch out'
            )
        lengths.append(shape[0])
    return lengths


def units_of(samples: Sequence[Mapping[str, Any]], layout: str | None, in_groups: bool, multiple: int = 1) -> Units:
    """The units of a list of 1-D samples.

    Pairs are samples 2i and 2i + 1 where `layout` is 'interleaved', i and i + n/2 where it is 'separated'. `in_groups`:
    a group begins at each sample whose label (`TARGETS`, see `targets_apart`) is not 0. Each sample takes its tokens,
    at least one, rounded up to a `multiple`: 2 · cp where each packed sequence is split over cp ranks. ValueError for
    an odd number of samples of pairs.
    """
    lengths = lengths_of(samples)
    numbers = list(range(len(lengths)))
    if layout is not None:
        if len(lengths) % 2:
            raise ValueError(
                f'inputs must hold pairs of a chosen and a rejected sample ({layout}), got {len(lengths)} samples'
            )
        half = len(lengths) // 2
        members = [[2 * i, 2 * i + 1] if layout == 'interleaved' else [i, half + i] for i in range(half)]
        kind = 'pair'
    elif in_groups:
        members, first = [], 0
        for size in group_sizes(samples, 1):
            members.append(numbers[first : first + size])
            first += size
        kind = 'group'
    else:
        members, kind = [[i] for i in numbers], 'sample'
    room = [-(-max(n, 1) // multiple) * multiple for n in lengths]
    return Units(members, [sum(room[i] for i in unit) for unit in members], kind)


def check_budget(max_tokens: Any, units: Units) -> None:
    """ValueError unless it is an int that the largest unit fits in."""
    if not isinstance(max_tokens, Integral) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ValueError(f'max_tokens_per_micro_batch must be an int >= 1, got {max_tokens!r}')
    longest = max(units.tokens, default=0)
    if longest <= int(max_tokens):
        return
    at = units.members[units.tokens.index(longest)]
    which = f'sample {at[0]}' if len(at) == 1 else f'samples {", ".join(map(str, at))}'
    raise ValueError(
        f'max_tokens_per_micro_batch must be at least the longest {units.kind}, {longest} tokens ({which}), got '
        f'{max_tokens}; {"shorten it" if len(at) == 1 else "shorten its samples"}, or raise the budget'
    )


def least_bins(units: Sequence[int], budget: int) -> int:
    """How many bins of at most `budget` units of these sizes take when packed first-fit decreasing: at most 11/9 of the
    least number possible, + 6/9. ValueError for a unit that is larger than the budget."""
    return len(_first_fit(units, budget))


def balanced(units: Sequence[int], bins: int, budget: int) -> list[list[int]]:
    """Numbers of the units of each of `bins` bins, none of which holds more than `budget`.

    The largest unit goes first, each into the emptiest bin: the fullest then holds at most 4/3 − 1/(3·bins) of what the
    best division needs, and at most one unit more than the emptiest. Where that breaks the budget, the bins are those
    of `least_bins`, and the fullest are cut in two until there are enough. Within a bin units are in input order, and
    bins in that of their first units; there are empty ones, at the end, only where there are fewer units than bins.
    ValueError for fewer bins than `least_bins`.
    """
    found = _longest_first(units, range(len(units)), bins)
    if any(sum(units[i] for i in one) > budget for one in found):
        found = _first_fit(units, budget)
        if len(found) > bins:
            raise ValueError(f'{len(found)} bins are needed for a budget of {budget}, got {bins}')
        while len(found) < bins:
            cut = [one for one in found if len(one) > 1]
            if not cut:
                break
            fullest = max(cut, key=lambda one: (sum(units[i] for i in one), -min(one)))
            found.remove(fullest)
            found += _longest_first(units, fullest, 2)
    full = sorted(sorted(one) for one in found if one)
    return full + [[] for _ in range(bins - len(full))]


def _first_fit(units: Sequence[int], budget: int) -> list[list[int]]:
    """Each unit, the largest first, in the first bin with room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in _decreasing(units, range(len(units))):
        if units[i] > budget:
            raise ValueError(f'the budget must be at least the largest unit, {units[i]} (number {i}), got {budget}')
        at = next((k for k, left in enumerate(room) if left >= units[i]), None)
        if at is None:
            at = len(bins)
            bins.append([])
            room.append(budget)
        bins[at].append(i)
        room[at] -= units[i]
    return bins


def _longest_first(units: Sequence[int], which: Sequence[int], bins: int) -> list[list[int]]:
    """Each of these units, the largest first, in the bin that holds least, and of such in one with the fewest units."""
    out: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, 0, k) for k in range(bins)]
    for i in _decreasing(units, which):
        load, count, k = heap[0]
        out[k].append(i)
        heapq.heapreplace(heap, (load + units[i], count + 1, k))
    return out


def _decreasing(units: Sequence[int], which: Sequence[int]) -> list[int]:
    return sorted(which, key=lambda i: (-units[i], i))


def samples_of_bins(units: Units, bins: Sequence[Sequence[int]], layout: str | None) -> list[list[int]]:
    """The numbers of the samples of each bin of units, in the order in which they lie in its row: of separated pairs
    all chosen ones first."""
    if layout == 'separated':
        return [[units.members[i][side] for side in (0, 1) for i in one] for one in bins]
    return [[sample for i in one for sample in units.members[i]] for one in bins]


def packed_row(samples: Sequence[Mapping[str, Any]], ignore_index: int = -100) -> dict[str, Any]:
    """1-D samples as one packed row `[1, T]`, with `cu_seqlens` int32 `[n + 1]`, on the CPU.

    Every value of the length of its sample is concatenated, `TARGETS` are stacked, other values become lists.
    `position_ids` are the samples' own, or count from 0 in each. A sample without tokens takes one that is ignored and
    that `completion_mask` masks, so that what belongs to the samples is aligned with the sequences of the row. There is
    no `attention_mask`: ValueError for a sample that masks any of its tokens, and as for samples of padded rows.
    """
    lengths = torch.tensor([len(sample['input_ids']) for sample in samples])
    rows = _collate([dict(sample) for sample in samples], ignore_index)
    _check_whole(samples, rows.pop('attention_mask'), lengths)
    rows = pad_micro_batch(rows, len(samples), max(int(lengths.max()), 1), ignore_index)
    shape = tuple(rows['input_ids'].shape)
    if not bool(lengths.all()) and 'completion_mask' not in rows:
        rows['completion_mask'] = (torch.arange(shape[1])[None] < lengths[:, None]).long().to(rows['input_ids'].device)
    room = lengths.clamp(min=1)
    columns = torch.arange(shape[1])
    if 'position_ids' not in rows:
        rows['position_ids'] = columns.expand(shape).to(rows['input_ids'].device)
    at = (columns[None] < room[:, None]).reshape(-1).nonzero()[:, 0]
    for key, value in rows.items():
        if key != TARGETS and is_per_token(value, shape):
            rows[key] = value.flatten(0, 1)[at.to(value.device)][None]
    rows['cu_seqlens'] = torch.cat([room.new_zeros(1), room.cumsum(0)]).to(torch.int32)
    return rows


def _check_whole(samples: Sequence[Mapping[str, Any]], mask: Tensor, lengths: Tensor) -> None:
    if 'attention_mask' not in samples[0]:
        return
    attended = (mask != 0).sum(1).cpu()
    if not torch.equal(attended, lengths):
        first = int((attended != lengths).nonzero()[0])
        raise ValueError(
            "'attention_mask' of a sample must be 1 throughout where samples are packed "
            f'(max_tokens_per_micro_batch), but one of {int(lengths[first])} tokens masks '
            f'{int(lengths[first] - attended[first])}; leave its padding out'
        )


def agreed_bins(own: int, groups: Groups, error: Exception | None = None) -> int:
    """The largest of the numbers of bins of all ranks.

    Collective over the whole layout, whose ranks all enter it, one with an `error` of its own too: then all of them
    raise. One all-gather of two numbers.
    """
    row = torch.tensor([float(error is not None), float(own)], dtype=torch.float64)
    table = groups.gather_everyone(row)
    if bool(table[:, 0].any()):
        raise_together(groups, error)
    return int(table[:, 1].max())


def in_input_order(
    results: Sequence[Tensor], samples: Sequence[Sequence[int]], lengths: Sequence[int] | None
) -> list[Tensor]:
    """What was found in packed rows, one tensor a sample in input order; none for no results.

    `samples` are those of each row in its order. `lengths` are the tokens of every sample of the call, by its number:
    `[1, T]` a row becomes `[s]` a sample. None: results have one entry a sample, `[n, ...]` a row.
    """
    found: dict[int, Tensor] = {}
    for result, numbers in zip(results, samples):
        if lengths is None:
            found.update(zip(numbers, result.unbind(0)))
        else:
            parts = result[0].split([max(lengths[i], 1) for i in numbers])
            found.update({i: part[: lengths[i]] for i, part in zip(numbers, parts)})
    return [found[i] for i in sorted(found)]
