"""Groups and shares of data for a layout such as 'tp2 pp2', and a count of the collectives that ran."""

import math
from typing import Any

import torch
import torch.distributed as dist
from ranks import device

from tests.metric.metric_data import VOCAB, MicroBatch, losses, micro_batch
from twinkle_megatron.groups import Groups, group_rank, group_size

LENGTH = 8
# very unequal: rows and trained tokens differ, some have none
BATCHES = [
    micro_batch(seed, rows, LENGTH, trained)
    for seed, (rows, trained) in enumerate([(5, 0.9), (1, 0.1), (2, 0.0), (1, 0.9), (3, 0.5), (1, 1.0), (2, 0.2)])
]
TOTAL, TOKENS = (sum(x) for x in zip(*losses(BATCHES)))


def sizes_of(layout: str) -> dict[str, int]:
    return dict.fromkeys(('pp', 'dp', 'cp', 'tp'), 1) | {part[:2]: int(part[2:]) for part in layout.split()}


def world_of(layout: str) -> int:
    return math.prod(sizes_of(layout).values())


def groups_of(layout: str) -> Groups:
    """Groups of this rank; tp runs fastest, then cp, dp, pp."""
    sizes = sizes_of(layout)
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())

    def group(*axes: str) -> dist.ProcessGroup | None:
        dims = [list(sizes).index(axis) for axis in axes]
        width = math.prod(sizes[axis] for axis in axes)
        rest = [dim for dim in range(4) if dim not in dims]
        lists = ranks.permute(*rest, *dims).reshape(-1, width).tolist()
        return dist.new_subgroups_by_enumeration(lists)[0] if width > 1 else None

    groups = Groups(tp=group('tp'), cp=group('cp'), pp=group('pp'), dp=group('dp'), dp_cp=group('dp', 'cp'))
    dist.barrier()  # a rank that left now would break the groups that its peers still connect
    return groups


def share(groups: Groups) -> list[MicroBatch]:
    """This rank's part of BATCHES: dealt out over DP, whose last rank gets none, and cut over CP and TP."""
    dp, dealt = group_rank(groups.dp), max(group_size(groups.dp) - 1, 1)
    step, width = LENGTH // group_size(groups.cp), VOCAB // group_size(groups.tp)
    tokens = slice(group_rank(groups.cp) * step, (group_rank(groups.cp) + 1) * step)
    ids = slice(group_rank(groups.tp) * width, (group_rank(groups.tp) + 1) * width)
    return [
        (
            {key: value[:, tokens].to(device()) for key, value in inputs.items()},
            {'logits': outputs['logits'][:, tokens, ids].to(device())},
        )
        for inputs, outputs in (BATCHES[dp::dealt] if dp < dealt else [])
    ]


class Collectives:
    """Within `with`: the names of the torch.distributed collectives that run, in order."""

    NAMES = (
        'all_gather', 'all_gather_into_tensor', 'all_gather_object', 'all_reduce', 'barrier', 'broadcast',
        'broadcast_object_list', 'gather', 'reduce', 'reduce_scatter_tensor', 'send', 'recv',
    )  # fmt: skip

    def __enter__(self) -> list[str]:
        self.calls: list[str] = []
        self.real = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self.real.items():
            setattr(dist, name, self._counted(name, function))
        return self.calls

    def __exit__(self, *_: Any) -> None:
        for name, function in self.real.items():
            setattr(dist, name, function)

    def _counted(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name.removesuffix('_into_tensor'))
            return function(*args, **kwargs)

        return call
