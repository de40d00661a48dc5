"""The process groups of one rank. The only module that reads Megatron's global groups."""

from __future__ import annotations

import builtins
import contextlib
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    """Ranks in `group`; `None` stands for one process."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This process's rank in `group`; 0 for `None`."""
    return 0 if group is None else dist.get_rank(group)


def group_device(group: ProcessGroup | None) -> torch.device:
    """Where tensors of a collective over `group` have to lie: the current GPU under NCCL, else the CPU."""
    if group is not None and 'nccl' in dist.get_backend(group):
        return torch.device('cuda', torch.cuda.current_device())
    return torch.device('cpu')


def tensor_parallel_group() -> ProcessGroup | None:
    """Megatron's tensor parallel group where Megatron is in use in this process, else None."""
    ps = sys.modules.get('megatron.core.parallel_state')
    if ps is None or not ps.model_parallel_is_initialized():
        return None
    return ps.get_tensor_model_parallel_group()


def data_parallel_group() -> ProcessGroup | None:
    """Megatron's data parallel group, without context parallel ranks, where Megatron is in use in this process, else
    None."""
    ps = sys.modules.get('megatron.core.parallel_state')
    if ps is None or not ps.model_parallel_is_initialized():
        return None
    return ps.get_data_parallel_group()


def check_megatron_groups() -> None:
    """ValueError where Megatron has no global groups, which its schedule and layers read unless they are given a
    `ProcessGroupCollection`."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            'no model-parallel groups: call megatron.core.parallel_state.initialize_model_parallel(...) first, or pass '
            'a ProcessGroupCollection as groups'
        )


def all_gather_rows(row: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """`row[...]` of every rank, stacked in rank order: `[ranks, ...]`, on the device of `row`. One collective.

    Not differentiable. The result is bitwise the same on all ranks of the group.
    """
    n = group_size(group)
    if n == 1:
        return row.detach()[None]
    device = group_device(group)
    mine = row.detach().to(device).contiguous()
    out = torch.empty((n, *mine.shape), dtype=mine.dtype, device=device)
    if device.type == 'cuda':
        dist.all_gather_into_tensor(out.view(-1), mine.view(-1), group=group)
    else:
        dist.all_gather(list(out.unbind(0)), mine, group=group)
    return out.to(row.device)


def sum_over(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """The sum of `x` over the ranks of the group, on the device of `x`; may write to `x`. One all-reduce.

    Not differentiable. The result is bitwise the same on all ranks.
    """
    if group_size(group) == 1:
        return x
    there = x.to(group_device(group)).contiguous()
    dist.all_reduce(there, group=group)
    return there.to(x.device)


def reduce_scatter_rows(x: torch.Tensor, group: ProcessGroup | None, overwrite: bool = False) -> torch.Tensor:
    """This rank's of the equal slices along dim 0 of the sum of `x` over the ranks. One reduce-scatter.

    Not differentiable. `overwrite`: the result may be a view of `x`, which is lost.
    """
    n = group_size(group)
    if n == 1:
        return x
    there = x.to(group_device(group)).contiguous()
    out = x.chunk(n)[group_rank(group)] if overwrite and there is x else there.new_empty(len(x) // n, *x.shape[1:])
    dist.reduce_scatter_tensor(out, there, group=group)
    return out.to(x.device)


@dataclass(frozen=True)
class Groups:
    """Tensor, context, pipeline and data parallel groups of this rank; `None` is a group of one process.

    `dp` excludes and `dp_cp` includes the context parallel ranks. Build it with `Groups.from_megatron()`.
    """

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None

    @classmethod
    def from_megatron(cls, pg_collection: Any = None) -> Groups:
        """From a `ProcessGroupCollection`, or from Megatron's global state when `pg_collection` is None.

        ValueError where neither is there.
        """
        if pg_collection is not None:
            missing = [f.name for f in fields(cls) if getattr(pg_collection, f.name, None) is None]
            if missing:
                raise ValueError(
                    f'pg_collection must hold the groups tp, cp, pp, dp and dp_cp, but lacks {", ".join(missing)}; '
                    'was it made by ProcessGroupCollection.use_mpu_process_groups()?'
                )
            return cls(**{f.name: getattr(pg_collection, f.name) for f in fields(cls)})
        check_megatron_groups()
        from megatron.core import parallel_state

        ps: Any = parallel_state  # its getters are annotated as if a group could be an int
        return cls(
            tp=ps.get_tensor_model_parallel_group(),
            cp=ps.get_context_parallel_group(),
            pp=ps.get_pipeline_model_parallel_group(),
            dp=ps.get_data_parallel_group(),
            dp_cp=ps.get_data_parallel_group(with_context_parallel=True),
        )

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, where logits and losses live."""
        return group_rank(self.pp) == group_size(self.pp) - 1

    @property
    def owns_result(self) -> bool:
        """True on one rank of each DP×CP member: last stage, first TP rank. Sums over such ranks count nothing
        twice."""
        return self.is_last_stage and group_rank(self.tp) == 0

    @property
    def owns_output(self) -> bool:
        """True on the one rank that should print: of the last stage, the first over TP, DP and CP."""
        return self.owns_result and group_rank(self.dp_cp) == 0

    @property
    def size(self) -> int:
        """Ranks of the whole layout."""
        return group_size(self.tp) * group_size(self.pp) * group_size(self.dp_cp)

    def gather_everyone(self, row: torch.Tensor) -> torch.Tensor:
        """`row[k]` of every rank of the layout as `[ranks, k]`, the same on every rank.

        One collective where the layout is the whole world, else one each over DP×CP, TP and PP.
        """
        return self._gather(row, all_gather_rows).reshape(-1, row.numel())

    def gather_objects(self, obj: Any) -> list[Any]:
        """`obj` of every rank of the layout, the same list on every rank. Pickles: for rare messages only."""

        def gather(item: Any, group: ProcessGroup | None) -> list[Any]:
            if group_size(group) == 1:
                return [item]
            out: list[Any] = [None] * group_size(group)
            dist.all_gather_object(out, item, group=group)
            return out

        return _flatten(self._gather(obj, gather), 1 if self._is_world else 3)

    @property
    def _is_world(self) -> bool:
        return dist.is_initialized() and self.size == dist.get_world_size()

    def _gather(self, item: Any, gather: Any) -> Any:
        if self._is_world:
            return gather(item, dist.group.WORLD)
        for group in (self.dp_cp, self.tp, self.pp):
            item = gather(item, group)
        return item


def _flatten(nested: list[Any], depth: int) -> list[Any]:
    return nested if depth == 1 else [x for part in nested for x in _flatten(part, depth - 1)]


def raise_together(groups: Groups, error: Exception | None) -> None:
    """Raises on every rank of the layout if it is called with an error on one; the message names the first such rank.

    Every rank calls it, with its own error or None. The exception is of the type of that error where it is a builtin
    one that can be made from a message, else a RuntimeError. One collective; another one, of pickled messages, only
    after an error.
    """
    flags = groups.gather_everyone(torch.tensor([float(error is not None)]))
    if not flags.any():
        return
    mine = None if error is None else (type(error).__name__, _text(error))
    reports = groups.gather_objects((dist.get_rank() if dist.is_initialized() else 0, mine))
    rank, (name, message) = next((rank, report) for rank, report in reports if report is not None)
    raise _alike(name, message, f'on rank {rank}') from error


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception as broken:  # the other ranks wait for this message: there has to be one
        return f'(its message cannot be read: {type(broken).__name__})'


def _alike(name: str, message: str, where: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError and the like take more than a message
            return kind(f'{where}: {message}')
    return RuntimeError(f'{where}: {name}: {message}')
