"""Which part of the vocabulary this rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch.distributed import ProcessGroup

from ..groups import all_gather_rows, group_device, group_rank, group_size


@dataclass(frozen=True)
class VocabShard:
    """The ids `[start, stop)` whose logits this rank holds, of a vocabulary of `vocab_size` true ids.

    Ids at or past `vocab_size` are padding: they take no probability and their gradient is exactly 0. Shards of one
    group are consecutive in rank order and may be of unequal width, or empty. `group` None: one process holds it all.
    """

    start: int
    stop: int
    vocab_size: int
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(
                f'a shard must hold ids [start, stop) with 0 <= start <= stop, got [{self.start}, {self.stop})'
            )
        if self.vocab_size < 1:
            raise ValueError(f'vocab_size must be at least 1, got {self.vocab_size}')
        if self.group is None and not (self.start == 0 and self.stop >= self.vocab_size):
            raise ValueError(
                f'group must be given for a part of the vocabulary: one process cannot hold only the ids '
                f'[{self.start}, {self.stop}) of {self.vocab_size}'
            )

    @classmethod
    def from_group(
        cls, local_size: int, group: ProcessGroup | None = None, vocab_size: int | None = None
    ) -> VocabShard:
        """The shard of this rank when the ranks of `group` hold consecutive slices of `local_size` columns each.

        Args:
            local_size: columns on this rank; ranks may differ, and a rank may have none.
            group: the tensor parallel group; None for one process.
            vocab_size: true vocabulary size when the last columns are padding; None: no padding.

        Collective over `group` (one small all-gather): build it once, not once a step. ValueError on every rank if
        one rank's `local_size` or `vocab_size` is no size, if `vocab_size` differs among ranks or exceeds the columns,
        or if every rank holds at least `vocab_size` columns, which are gathered logits and no shard. (Where one rank
        does hold all ids, and the padding fills the others, build `VocabShard(start, stop, vocab_size, group)`.)
        """
        if group is not None and not isinstance(group, ProcessGroup):
            raise ValueError(f'group must be a ProcessGroup of which this process is a member, or None, got {group!r}')
        row = [_size_or(-1, local_size), _NOT_GIVEN if vocab_size is None else _size_or(-1, vocab_size)]
        table = all_gather_rows(torch.tensor(row, device=group_device(group)), group).tolist()
        sizes, vocabs = [r[0] for r in table], [r[1] for r in table]
        _check_sound('local_size', local_size, sizes)
        _check_sound('vocab_size', vocab_size, vocabs)
        if len(set(vocabs)) > 1:
            shown = ['not given' if vocab == _NOT_GIVEN else vocab for vocab in vocabs]
            raise ValueError(f'vocab_size must be the same on every rank of the group, got {shown} in rank order')
        total, true = sum(sizes), sum(sizes) if vocab_size is None else int(vocab_size)
        if total == 0:
            raise ValueError('local_size must be > 0 on at least one rank of the group, got 0 on all of them')
        if not 1 <= true <= total:
            raise ValueError(
                f'vocab_size must lie in [1, {total}], the columns that the ranks of the group hold together, '
                f'got {true}'
            )
        if len(sizes) > 1 and min(sizes) >= true:
            raise ValueError(
                f'each rank must hold a part of the {true} ids, but every rank holds {min(sizes)} columns or '
                'more: these are gathered logits; run the output layer with gather_output=False, or pass '
                'group=None to treat them as whole'
            )
        start = sum(sizes[: group_rank(group)])
        return cls(start, start + int(local_size), true, group)

    @property
    def local_size(self) -> int:
        """Columns of the local logits, padding included."""
        return self.stop - self.start

    @property
    def true_columns(self) -> int:
        """Leading local columns that belong to the true vocabulary; the others are padding."""
        return min(max(self.vocab_size - self.start, 0), self.local_size)

    @property
    def size(self) -> int:
        """Ranks that share the vocabulary."""
        return group_size(self.group)

    def local_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Column of each global id on this rank as int32, -1 where another rank holds it (or nobody does)."""
        here = (ids >= self.start) & (ids < self.start + self.true_columns)
        return torch.where(here, ids - self.start, -1).to(torch.int32)

    def check_logits(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> None:
        """ValueError unless logits of this shape and dtype can be this rank's shard. No collective."""
        if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f'logits must be float16, bfloat16, float32 or float64, got {dtype}')
        if len(shape) < 1 or shape[-1] != self.local_size:
            gathered = len(shape) >= 1 and self.size > 1 and shape[-1] >= self.vocab_size
            hint = (
                'was the output layer run with gather_output=True?'
                if gathered
                else 'is the shard built for another layer, or the vocabulary not on the last dim?'
            )
            raise ValueError(
                f"logits must hold the {self.local_size} ids [{self.start}, {self.stop}) of this rank's shard "
                f'on the last dim, got shape {tuple(shape)}; {hint}'
            )


_NOT_GIVEN = 1 << 62


def _size_or(otherwise: int, value: object) -> int:
    return int(value) if isinstance(value, Integral) and int(value) >= 0 else otherwise


def _check_sound(name: str, here: object, ranks: list[int]) -> None:
    bad = [rank for rank, size in enumerate(ranks) if size < 0]
    if bad:
        raise ValueError(
            f'{name} must be an int >= 0 on every rank, but is not on group rank(s) {bad} (here: {here!r})'
        )
