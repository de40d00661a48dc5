"""What every rank has to agree on before a pipeline schedule starts: errors, counts, shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import as_micro_batches, pad_micro_batch, sequence_boundaries, split_extra, trained_labels
from ..batch_checks import check_micro_batch, explain_fault, value_faults
from ..groups import Groups, group_rank, group_size, raise_together


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
    splits_sequences: bool

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
            splits_sequences=cp > 1,
        )

    def legal(self, micro_batches: int) -> int:
        """The least number of micro-batches >= `micro_batches` that Megatron's schedule accepts."""
        n, group = max(micro_batches, 1), self.group_of_micro_batches
        while n < group or 0 < n % group < self.pp_size:
            n += 1
        return n


class Item(NamedTuple):
    """One micro-batch of whole sequences, padded to what the schedule needs."""

    batch: dict[str, Any]
    extra: dict[str, Any]
    shape: tuple[int, int]
    boundaries: Tensor | None
    is_padding: bool


@dataclass(frozen=True)
class Plan:
    """The micro-batches of this rank, and what is true of the global batch, the same on every rank."""

    items: list[Item]
    tokens: int
    """Trained tokens of the global batch, each counted once."""
    micro_batches: int
    """Micro-batches of all data parallel replicas, padding not counted."""
    most_tokens: int
    """Tokens of the largest micro-batch of any replica, trained or not, on one context parallel rank."""


def make_plan(
    inputs: Any,
    micro_batch_size: int | None,
    extra: Mapping[str, Any],
    groups: Groups,
    limits: Limits,
    ignore_index: int,
    needs_labels: bool,
    check: Callable[[], None] = lambda: None,
) -> Plan:
    """Checks the data, counts, and pads what has to be padded. `check` is what else may be wrong on this rank alone.

    Collective over the whole layout: one all-gather of a few numbers, which every rank enters even after an error of
    its own. Then all ranks raise together.
    """
    error: Exception | None = None
    items: list[Item] = []
    counted = torch.zeros(2, dtype=torch.float64)
    try:
        check()
        items = _checked(inputs, micro_batch_size, extra, limits, ignore_index, needs_labels)
        counted = _count(items, limits, ignore_index)
    except Exception as caught:  # raised below, on every rank
        error = caught
    rows = max((item.shape[0] for item in items), default=0)
    length = max((item.shape[1] for item in items), default=0)
    known = torch.tensor([error is not None, group_rank(groups.dp), len(items), rows, length], dtype=torch.float64)
    table = groups.gather_everyone(torch.cat([known.to(counted.device), counted])).tolist()
    if any(row[0] or row[6] for row in table):
        raise_together(groups, error or _first_fault(items, limits, ignore_index))
    replicas: dict[float, list[float]] = {}
    for row in table:
        if replicas.setdefault(row[1], row[2:6]) != row[2:6]:
            raise ValueError(
                f'inputs must be the same on every TP, PP and CP rank of a data parallel replica, but differ in '
                f'replica {int(row[1])}: (micro-batches, rows, length, trained tokens) is {replicas[row[1]]} on one '
                f'rank and {row[2:6]} on another; give each rank the whole sequences of its replica'
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
    padded = _padded(items, count, rows, length, limits, ignore_index)
    return Plan(
        padded,
        tokens=int(sum(r[3] for r in seen)),
        micro_batches=int(sum(r[0] for r in seen)),
        most_tokens=int(max(r[1] * r[2] for r in seen)) // group_size(groups.cp),
    )


def _checked(
    inputs: Any,
    micro_batch_size: int | None,
    extra: Mapping[str, Any],
    limits: Limits,
    ignore_index: int,
    needs_labels: bool,
) -> list[Item]:
    batches = as_micro_batches(inputs, micro_batch_size, ignore_index)
    extras = split_extra(extra, batches)
    items = []
    for index, (batch, own) in enumerate(zip(batches, extras)):
        check_micro_batch(batch, index, needs_labels)
        shape = (int(batch['input_ids'].shape[0]), int(batch['input_ids'].shape[1]))
        boundaries = sequence_boundaries(batch)
        longest = shape[1] if boundaries is None else int(boundaries.diff().max())
        if limits.max_length is not None and longest > limits.max_length:
            raise ValueError(
                f"inputs[{index}]['input_ids'] must have at most {limits.max_length} tokens a sequence, the model's "
                f'max_sequence_length, got {longest}'
            )
        if boundaries is not None and limits.splits_sequences:
            raise ValueError(
                f'inputs[{index}] is a packed row, which cannot be split over context parallel ranks here; '
                'give padded rows [b, s]'
            )
        unequal = limits.fixed_shapes and any(other['input_ids'].shape[0] != 1 for other in batches)
        if boundaries is not None and (unequal or limits.same_shapes_everywhere):
            raise ValueError(
                f'inputs[{index}] is a packed row [1, T], but the pipeline or the expert dispatcher needs equal '
                "shapes; set config.variable_seq_lengths=True and moe_token_dispatcher_type='alltoall', or give "
                'packed rows only'
            )
        _check_attention(batch, index, batches, limits)
        if batch.get('labels') is not None:
            batch['labels'] = trained_labels(batch, ignore_index)  # type: ignore[arg-type]
        items.append(Item(batch, own, shape, boundaries, is_padding=False))
    return items


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
    if limits.splits_sequences or padded or mask.shape[-2:] != (s, s):
        raise ValueError(
            f"inputs[{index}]['attention_mask'] must be [b, s] = {(b, s)}, or [b, 1, s, s] where sequences are "
            f'neither split (CP) nor padded (SP, or PP with unequal micro-batches), got {tuple(mask.shape)}; leave it '
            'out for causal attention'
        )


def _count(items: list[Item], limits: Limits, ignore_index: int) -> Tensor:
    """Trained tokens and wrong values of these micro-batches, float64 `[2]`, on their device: no host sync."""
    tokens = [(item.batch['labels'] != ignore_index).sum() for item in items if item.batch.get('labels') is not None]
    faults = [n for item in items for n in _faults(item, limits, ignore_index).values()]
    zero = torch.zeros((), dtype=torch.int64, device=items[0].batch['input_ids'].device if items else 'cpu')
    return torch.stack([sum(tokens, start=zero), sum(faults, start=zero)]).double()


def _faults(item: Item, limits: Limits, ignore_index: int) -> dict[str, Tensor]:
    return value_faults(item.batch, limits.vocab_size, ignore_index, limits.max_length)


def _first_fault(items: list[Item], limits: Limits, ignore_index: int) -> Exception | None:
    for index, item in enumerate(items):
        for key, count in _faults(item, limits, ignore_index).items():
            if count:
                return explain_fault(key, item.batch, index, limits.vocab_size, ignore_index, limits.max_length)
    return None


def _padded(items: list[Item], count: int, rows: int, length: int, limits: Limits, ignore_index: int) -> list[Item]:
    def up(n: int) -> int:
        return -(-n // limits.multiple) * limits.multiple

    fixed = limits.fixed_shapes or limits.same_shapes_everywhere
    out = []
    for item in items:
        b, s = (rows, length) if fixed else item.shape
        # Megatron's layers take no micro-batch without a token
        out.append(item._replace(batch=pad_micro_batch(item.batch, max(b, 1), up(max(s, 1)), ignore_index)))
    b, s = (rows, length) if fixed else (1, 1)
    blank = torch.zeros(max(b, 1), up(max(s, 1)), dtype=torch.long)
    empty = {'input_ids': blank, 'labels': torch.full_like(blank, ignore_index)}
    return out + [Item(empty, {}, (blank.shape[0], blank.shape[1]), None, is_padding=True)] * (count - len(items))
