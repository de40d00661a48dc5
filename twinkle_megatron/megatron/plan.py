"""What every rank has to agree on before a pipeline schedule starts: errors, counts, shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..batch import (
    CONSTANT,
    HEADS,
    PER_PAIR,
    Counts,
    Labelling,
    Packed,
    Packing,
    WholeRows,
    align_extras,
    check_mask,
    check_micro_batch,
    collated,
    in_input_order,
    pack,
    packing_of,
    pad_micro_batch,
    split_extra,
    spread_out,
    trained_labels,
)
from ..batch.targets import TOKEN_IDS, WEIGHTS, check_targets, marked, moved_like, pool_weights
from ..groups import Groups, group_rank, group_size, raise_together
from .item import PREFIX, Census, Item


@dataclass(frozen=True)
class Limits:
    """What the model asks of its micro-batches."""

    vocab_size: int | None
    max_length: int | None
    multiple: int
    fixed_shapes: bool
    same_shapes_everywhere: bool
    group_of_micro_batches: int
    pp_size: int
    padding_trains: bool
    cp_size: int

    @classmethod
    def of(cls, model: Any, config: Any, groups: Groups, vocab_size: int | None, chunks: int) -> Limits:
        """From an unwrapped chunk and its TransformerConfig."""
        cp, tp, pp = group_size(groups.cp), group_size(groups.tp), group_size(groups.pp)
        multiple = 2 * cp if cp > 1 else 1
        if getattr(config, 'sequence_parallel', False):
            multiple = cp * math.lcm(multiple // cp or 1, tp)
        absolute = getattr(model, 'position_embedding_type', None) == 'learned_absolute'
        experts = bool(getattr(config, 'num_moe_experts', None))
        coefficients = getattr(config, 'moe_aux_loss_coeff', 0) or 0
        summed = sum(coefficients) if isinstance(coefficients, (list, tuple)) else coefficients
        auxiliary = summed != 0 or bool(getattr(config, 'moe_z_loss_coeff', None))
        return cls(
            vocab_size=vocab_size,
            max_length=getattr(model, 'max_sequence_length', None) if absolute else None,
            multiple=multiple,
            fixed_shapes=pp > 1 and not getattr(config, 'variable_seq_lengths', False),
            same_shapes_everywhere=experts and getattr(config, 'moe_token_dispatcher_type', '') == 'allgather',
            group_of_micro_batches=(getattr(config, 'microbatch_group_size_per_vp_stage', None) or pp)
            if chunks > 1
            else 1,
            pp_size=pp if chunks > 1 else 1,
            padding_trains=experts and auxiliary,
            cp_size=cp,
        )

    def legal(self, micro_batches: int) -> int:
        """The least number of micro-batches >= `micro_batches` that Megatron's schedule accepts."""
        n, group = max(micro_batches, 1), self.group_of_micro_batches
        while n < group or 0 < n % group < self.pp_size:
            n += 1
        return n


class Extras(NamedTuple):
    """The keywords of a call, and what each is (see `align_extras`). `unsaid`: those that a custom loss takes, which
    does not say what they are."""

    given: Mapping[str, Any]
    kinds: Mapping[str, str]
    shifted: bool = True
    unsaid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Plan:
    """The micro-batches of this rank, and what is true of the global batch, the same on every rank."""

    items: list[Item]
    counts: Counts
    micro_batches: int
    """Micro-batches of all data parallel replicas, padding not counted."""
    one_each: bool
    """Whether every replica has exactly one."""
    most_tokens: int
    """Tokens of the largest micro-batch of any replica, trained or not, on one context parallel rank."""
    packed: Packed | None = None
    """Which samples the packed rows hold that were made by a budget of tokens."""

    def as_given(self, results: list[torch.Tensor], per_token: bool) -> list[torch.Tensor]:
        """What was found in each micro-batch as the caller gets it: for each sample where these were packed."""
        if self.packed is None:
            return results
        return in_input_order(results, self.packed.rows, self.packed.lengths if per_token else None)


def make_plan(
    inputs: Any,
    micro_batch_size: int | None,
    extra: Extras,
    groups: Groups,
    limits: Limits,
    labelling: Labelling,
    check: Callable[[], None] = lambda: None,
    max_tokens: int | None = None,
) -> Plan:
    """Checks the data, counts, and pads what has to be padded. `check` is what else may be wrong on this rank alone.
    With `max_tokens` samples are packed by that budget, see `pack`; None on one rank is None on all.

    Collective over the whole layout: one all-gather of a few numbers, which every rank enters even after an error of
    its own. Then all ranks raise together. With `max_tokens` another one before it.
    """
    packed: Packed | None = None
    if max_tokens is not None:
        room = 2 * limits.cp_size if limits.cp_size > 1 else 1
        packed = pack(inputs, micro_batch_size, max_tokens, labelling, groups, room, limits.legal)
    error: Exception | None = None
    items: list[Item] = []
    census = Census([], labelling, None, None)
    counted = census.row()
    try:
        check()
        items = _checked(inputs, micro_batch_size, extra, limits, labelling, packed)
        census = Census(items, labelling, limits.vocab_size, limits.max_length, packed)
        counted = census.row()
    except Exception as caught:  # raised below, on every rank
        error = caught
    rows = max((item.batch['input_ids'].shape[0] for item in items), default=0)
    length = max((item.batch['input_ids'].shape[1] for item in items), default=0)
    known = torch.tensor([error is not None, group_rank(groups.dp), len(items), rows, length], dtype=torch.float64)
    table = groups.gather_everyone(torch.cat([known.to(counted.device), counted])).tolist()
    if any(row[0] or row[-1] for row in table):
        raise_together(groups, error or census.first_fault())
    replicas: dict[float, list[float]] = {}
    for row in table:
        if replicas.setdefault(row[1], row[2:-1]) != row[2:-1]:
            raise ValueError(
                'inputs must be the same on every TP, PP and CP rank of a data parallel replica, but differ in replica '
                f'{int(row[1])}: (micro-batches, rows, length, trained tokens, sequences, pairs, chosen tokens, '
                f'groups) is {replicas[row[1]]} on one rank and {row[2:-1]} on another; give each rank the whole '
                'sequences of its replica'
            )
    seen = list(replicas.values())
    if limits.same_shapes_everywhere:
        rows, length = int(max(r[1] for r in seen)), int(max(r[2] for r in seen))
    most = int(max(r[0] for r in seen))
    count = limits.legal(most) if most else 0
    if limits.padding_trains and any(r[0] != count for r in seen):
        raise ValueError(
            f'every data parallel rank must bring {count} micro-batches (the schedule and the largest rank ask for '
            f'them), got {[int(r[0]) for r in seen]}: padding micro-batches would train the router through its '
            'auxiliary losses'
        )
    padded = _padded(items, count, rows, length, limits, labelling.ignored)
    return Plan(
        padded,
        counts=Counts(*(int(sum(column)) for column in list(zip(*seen))[3:])),
        micro_batches=int(sum(r[0] for r in seen)),
        one_each=all(r[0] == 1 for r in seen),
        most_tokens=int(max(r[1] * r[2] for r in seen)) // group_size(groups.cp),
        packed=packed,
    )


def _checked(
    inputs: Any,
    micro_batch_size: int | None,
    extra: Extras,
    limits: Limits,
    labelling: Labelling,
    packed: Packed | None,
) -> list[Item]:
    batches, order, pairs = collated(inputs, micro_batch_size, labelling, packed)
    ignore_index, layout = labelling.ignored, labelling.layout
    packings, moved = [], []
    for index, batch in enumerate(batches):
        columns = None
        if labelling.kind != TOKEN_IDS:
            check_micro_batch({k: v for k, v in batch.items() if k != 'labels'}, index, needs_labels=False)
            batches[index], columns = marked(batch, index, labelling)
            batch = batches[index]
        moved.append(columns)
        check_micro_batch(batch, index, labelling.needed)
        packings.append(packing_of(batch))
        _check_lengths(batch, packings[-1], index, batches, limits)
        _check_attention(batch, index, batches, limits)
        if batch.get('labels') is not None:
            batch['labels'] = trained_labels(batch, ignore_index)  # type: ignore[arg-type]
    whole = [WholeRows(batch, packing, ignore_index) for batch, packing in zip(batches, packings)]
    if layout is not None:
        _check_pairs(whole)
    for index, rows in enumerate(whole):
        check_targets(rows, index, labelling)
    said = {key: value for key, value in extra.given.items() if key in extra.kinds}
    constant = {key for key in said if extra.kinds[key] in (CONSTANT, HEADS)}
    aligned = align_extras(said, extra.kinds, whole, extra.shifted, order, pairs)
    counts = None if packed is None else [len(row) for row in packed.rows]
    split = split_extra({k: v for k, v in extra.given.items() if k in extra.unsaid}, batches, order, counts)
    aligned_with_tokens = sorted(key for key in said if extra.kinds[key] not in (CONSTANT, HEADS, PER_PAIR))
    if aligned_with_tokens and any(columns is not None for columns in moved):
        raise ValueError(
            f'{aligned_with_tokens[0]} cannot be aligned with tokens behind left padding; pad on the right, or pack'
        )
    for own, columns in zip(split, moved):
        if columns is not None:
            own.update({key: moved_like(value, columns) for key, value in own.items()})
    items = []
    for rows, own, raw, columns in zip(whole, aligned, split, moved):
        along = {PREFIX + key: value for key, value in own.items() if key not in constant and value is not None}
        if labelling.pooling is not None:
            along[WEIGHTS] = pool_weights(rows, labelling.pooling)
        moving = WholeRows({**rows.batch, **along}, rows.packing, ignore_index)
        items.append(_item(moving, len(items), {key: own[key] for key in constant} | raw, limits, columns))
    return items


def _check_pairs(whole: Sequence[WholeRows]) -> None:
    for index, rows in enumerate(whole):
        if rows.count % 2:
            raise ValueError(
                f'inputs[{index}] must hold whole pairs of a chosen and a rejected sequence, got {rows.count} '
                f'{"sequences" if rows.packing is None else "packed sequences"}; no micro-batch may cut a pair'
            )


def _item(rows: WholeRows, index: int, extra: dict[str, Any], limits: Limits, columns: torch.Tensor | None) -> Item:
    """With the sequence of each token, and in a packed row with room to split each sequence over CP ranks. `columns`:
    where the tokens of padded rows were moved."""
    batch, packing = dict(rows.batch), rows.packing
    shape = (int(batch['input_ids'].shape[0]), int(batch['input_ids'].shape[1]))
    if batch.get('labels') is not None:
        batch['sequence_ids'], batch['sequence_tokens'] = rows.ids, rows.tokens
    if packing is not None and limits.cp_size > 1:
        mask = batch.get('attention_mask')
        if mask is not None and mask.shape == shape:  # packing says all of it, and spreading would make holes
            check_mask(batch, index)
            del batch['attention_mask']
        batch, packing, spread = spread_out(batch, packing, 2 * limits.cp_size, rows.ignore_index)
        columns = None if spread is None else spread[None]
    return Item(batch, extra, shape, packing, columns, is_padding=False)


def _check_lengths(
    batch: Mapping[str, Any],
    packing: Packing | None,
    index: int,
    batches: Sequence[Mapping[str, Any]],
    limits: Limits,
) -> None:
    longest = int(batch['input_ids'].shape[1] if packing is None else packing.lengths.max())
    if limits.max_length is not None and longest > limits.max_length:
        raise ValueError(
            f"inputs[{index}]['input_ids'] must have at most {limits.max_length} tokens a sequence, the model's "
            f'max_sequence_length, got {longest}'
        )
    unequal = limits.fixed_shapes and any(other['input_ids'].shape[0] != 1 for other in batches)
    if packing is not None and (unequal or limits.same_shapes_everywhere):
        raise ValueError(
            f'inputs[{index}] is a packed row [1, T], but the pipeline or the expert dispatcher needs equal '
            "shapes; set config.variable_seq_lengths=True and moe_token_dispatcher_type='alltoall', or give "
            'packed rows only'
        )


def _check_attention(
    batch: Mapping[str, Any], index: int, batches: Sequence[Mapping[str, Any]], limits: Limits
) -> None:
    """A whole mask `[b, 1, s, s]` goes to the model as it is, so its micro-batch must not be split or padded."""
    mask = batch.get('attention_mask')
    if mask is None or mask.dim() == 2:
        return
    shapes = {tuple(other['input_ids'].shape) for other in batches}
    b, s = batch['input_ids'].shape
    padded = s % limits.multiple or (limits.fixed_shapes and len(shapes) > 1) or limits.same_shapes_everywhere
    if limits.cp_size > 1 or padded or mask.shape[-2:] != (s, s):
        raise ValueError(
            f"inputs[{index}]['attention_mask'] must be [b, s] = {(b, s)}, or [b, 1, s, s] where sequences are "
            f'neither split (CP) nor padded (SP, or PP with unequal micro-batches), got {tuple(mask.shape)}; leave it '
            'out for causal attention'
        )


def _padded(items: list[Item], count: int, rows: int, length: int, limits: Limits, ignore_index: int) -> list[Item]:
    def up(n: int) -> int:
        return -(-n // limits.multiple) * limits.multiple

    fixed = limits.fixed_shapes or limits.same_shapes_everywhere
    out = []
    for item in items:
        b, s = (rows, length) if fixed else item.batch['input_ids'].shape
        # Megatron's layers take no micro-batch without a token
        out.append(item._replace(batch=pad_micro_batch(item.batch, max(b, 1), up(max(s, 1)), ignore_index)))
    b, s = (rows, length) if fixed else (1, 1)
    blank = torch.zeros(max(b, 1), up(max(s, 1)), dtype=torch.long)
    empty = {'input_ids': blank, 'labels': torch.full_like(blank, ignore_index)}
    return out + [Item(empty, {}, (blank.shape[0], blank.shape[1]), None, None, is_padding=True)] * (count - len(items))
