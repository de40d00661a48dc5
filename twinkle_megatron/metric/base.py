"""The contract of a metric, and the one reduction that all of them share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..arguments import reject_unknown
from ..groups import Groups, all_gather_rows, group_device, group_rank, group_size
from .state import Field, State

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..vocab_parallel import VocabShard

STEP_KEYWORDS = frozenset({'lr', 'step', 'gradient_accumulation_steps', 'grad_norm', 'loss_reduction', 'call'})
"""What a training loop tells every metric. A metric names those it uses."""


def checked_keywords(accumulate: Callable[..., None]) -> Callable[..., None]:
    """Lets `accumulate` name only the keywords it uses: other `STEP_KEYWORDS` are dropped, the rest is a ValueError.

    `inspect.signature` still shows the keywords that the method itself names.
    """
    own = [p.name for p in inspect.signature(accumulate).parameters.values() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(accumulate)
    def checked(self: Metric, inputs: Any = None, outputs: Any = None, **given: Any) -> None:
        if not isinstance(self, Metric):
            name = accumulate.__qualname__.split('.')[0]
            raise ValueError(
                f"{name} must be made before it is fed, {name}(...), but the class was handed over; twinkle-kit's "
                f'add_metric makes only classes of its own: give it twinkle_megatron.inside_twinkle.{name}'
            )
        reject_unknown(given, STEP_KEYWORDS.union(own), f'{type(self).__name__}.accumulate')
        accumulate(self, inputs, outputs, **{name: value for name, value in given.items() if name in own})

    return checked


class Metric:
    """Statistics over micro-batches, data parallel and context parallel ranks: `accumulate` often, `calculate` once.

    A metric whose numbers merge by sum, minimum or maximum declares them in `fields`, folds into `self.state` in
    `accumulate` and turns the totals into `figures` (floats) and `display` (strings); the reduction is done here. Any
    other metric overrides `accumulate`, `calculate` and `reset`, and uses `gather_results`.

    Args:
        device_mesh: `Groups`, or a torch `DeviceMesh` with dims named 'pp' and 'tp'. With a pipeline, the last stage's
            numbers are handed to all stages. None: no pipeline.
        process_group: the data parallel group with context parallel ranks, over which the numbers are reduced; without
            tensor parallel ranks, which hold the same tokens. None: that of `Groups`, or this process alone.

    `calculate`, `values` and `gather_results` are collective: every rank calls them, also one that saw no data.
    ValueError if `process_group` holds several ranks of one tensor parallel group or of one pipeline.
    """

    fields: ClassVar[Mapping[str, Field]] = {}
    """The numbers of the state, in the order in which they are packed."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """Per-token statistics wanted in `outputs['token_stats']`, from the loss's own sweep over the logits."""

    reads: ClassVar[str | None] = None
    """The key in `outputs` without which there is nothing to say: 'logits' (or what a sweep over them found),
    'embeddings' or 'values'; None: whatever there is."""

    extras: ClassVar[Mapping[str, str]] = {}
    """Keywords of a call that `accumulate` names, and what each is: see `align_extras`."""

    process_group: ProcessGroup | None = None
    device_mesh: Any = None

    def __init__(self, device_mesh: Any = None, process_group: ProcessGroup | None = None, **kwargs: Any):
        if type(self).__init__ is Metric.__init__:  # a subclass with its own __init__ answers for its keywords
            reject_unknown(kwargs, ('device_mesh', 'process_group'), type(self).__name__)
        self.device_mesh = device_mesh
        self.process_group = process_group
        self.check_groups()

    def accumulate(self, inputs: Any, outputs: Any, **kwargs: Any) -> None:
        """Takes in one micro-batch, or a list of them. Not collective over the data parallel group."""
        raise NotImplementedError(f'{type(self).__name__} must define accumulate(inputs, outputs)')

    def on_step(
        self,
        *,
        lr: Any = None,
        step: int | None = None,
        gradient_accumulation_steps: int | None = None,
        grad_norm: Any = None,
    ) -> None:
        """Called on every rank after an optimizer step; does nothing unless overridden."""

    def calculate(self) -> dict[str, Any]:
        """The statistics for display, the same on every rank, and a reset. Collective."""
        totals = self.totals()
        self.reset()
        return self.display(totals)

    def values(self) -> dict[str, float]:
        """The statistics as floats, the same on every rank, without a reset. Collective.

        Empty, and without a collective, for a metric that declares no `fields`.
        """
        return self.figures(self.totals()) if self.fields else {}

    def reset(self) -> None:
        """Forgets what was accumulated."""
        self.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """What this rank has accumulated, for a checkpoint: numbers, strings, tensors, and lists and dicts of them. A
        metric that keeps more than its `fields` adds it here, and takes it in `load_state_dict`."""
        return {'fields': self.state.packed().cpu()} if self.fields else {}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave, in place of what has been accumulated."""
        self.reset()
        if self.fields:
            self.state.unpack(kept['fields'])

    def figures(self, totals: Mapping[str, float]) -> dict[str, float]:
        """`totals`, the reduced fields by name, as the statistics of this metric."""
        raise NotImplementedError(f'{type(self).__name__} declares fields and must define figures(totals)')

    def display(self, totals: Mapping[str, float]) -> dict[str, Any]:
        """`totals` as shown to people: 4 decimals, unless overridden."""
        return {name: f'{value:.4f}' for name, value in self.figures(totals).items()}

    @functools.cached_property
    def state(self) -> State:
        """The accumulated numbers of this rank."""
        return State(self.fields)

    def totals(self) -> dict[str, float]:
        """The fields reduced over all ranks, bitwise the same on each of them.

        One all-gather over the data parallel group, on the last pipeline stage; one broadcast along the pipeline.
        Groups of one rank take none.
        """
        group, pipeline = self._reduced_over(), self.mesh_group('pp')
        total = torch.empty(len(self.fields), dtype=torch.float64, device='cpu')
        if self.is_last_stage and group_size(group) > 1:
            total = self.state.merged(all_gather_rows(self.state.packed(), group).cpu())
        elif self.is_last_stage:
            total = self.state.packed()
        if group_size(pipeline) > 1:
            total = total.to(group_device(pipeline))
            dist.broadcast(total, src=_last_rank(pipeline), group=pipeline)
        return self.state.named(total)

    def gather_results(self, local_results: list[Any]) -> list[Any]:
        """The items of all ranks of `process_group` in rank order, in one list, the same on every rank.

        With a pipeline they are the items of the last stage's ranks, on every stage. Collective; pickles the items, so
        keep them small. ValueError unless `local_results` is a list.
        """
        if not isinstance(local_results, list | tuple):
            raise ValueError(f'local_results must be a list, got {type(local_results).__name__}')
        group, pipeline = self._reduced_over(), self.mesh_group('pp')
        items = list(local_results)
        if self.is_last_stage and group_size(group) > 1:
            parts: list[Any] = [None] * group_size(group)
            dist.all_gather_object(parts, items, group=group)
            items = [item for part in parts for item in part]
        if group_size(pipeline) > 1:
            box = [items]
            dist.broadcast_object_list(box, src=_last_rank(pipeline), group=pipeline, device=group_device(pipeline))
            items = box[0]
        return items

    def shard_of(self, output: Mapping[str, Any], logits: Any) -> VocabShard:
        """Which ids the columns of `logits` are: what `output['vocab_shard']` says; without it, this rank's shard where
        `device_mesh` tells a tensor parallel group of several ranks, else the whole vocabulary. Collective over that
        group the first time."""
        from ..vocab_parallel import VocabShard
        from ..vocab_parallel.logits import local_size

        given = output.get('vocab_shard')
        if given is not None:
            return given
        size = local_size(logits)
        if size not in self._shards:
            self._shards[size] = VocabShard.from_group(size, self.mesh_group('tp'))
        return self._shards[size]

    @functools.cached_property
    def _shards(self) -> dict[int, VocabShard]:
        return {}

    def mesh_group(self, name: str) -> ProcessGroup | None:
        """The group 'tp', 'pp' or 'cp' of this rank, as `device_mesh` tells it; None for one process."""
        mesh = self.device_mesh
        if isinstance(mesh, Groups):
            return getattr(mesh, name)
        if isinstance(mesh, DeviceMesh) and name in (mesh.mesh_dim_names or ()):
            return mesh.get_group(name)
        return None

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, whose numbers count."""
        pipeline = self.mesh_group('pp')
        return group_rank(pipeline) == group_size(pipeline) - 1

    def _reduced_over(self) -> ProcessGroup | None:
        if self.process_group is None and isinstance(self.device_mesh, Groups):
            return self.device_mesh.dp_cp
        return self.process_group

    def check_groups(self) -> None:
        """ValueError if `process_group` holds ranks whose tokens would count twice. No collective."""
        group = self._reduced_over()
        for name, title in (('tp', 'tensor parallel group'), ('pp', 'pipeline')):
            other = self.mesh_group(name)
            shared = _ranks(group) & _ranks(other)
            if len(shared) > 1:
                raise ValueError(
                    f'process_group must hold the data parallel and context parallel ranks only, but ranks '
                    f'{sorted(shared)} are of one {title} and their tokens would count {len(shared)} times; pass '
                    'Groups.dp_cp (Megatron: get_data_parallel_group(with_context_parallel=True))'
                )


def _ranks(group: ProcessGroup | None) -> set[int]:
    return set() if group is None else set(dist.get_process_group_ranks(group))


def _last_rank(group: ProcessGroup | None) -> int:
    return dist.get_process_group_ranks(group)[-1]
