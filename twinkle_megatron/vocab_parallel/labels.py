"""Labels out of range: an error on every rank of the group, without a host sync on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .shard import VocabShard

_LAG = 2


@dataclass
class _Pending:
    """A mark on its way from the GPU, and how many calls have been made since."""

    event: torch.cuda.Event
    flag: Tensor
    message: str
    age: int = 0


_pending: list[_Pending] = []


def check_given(target: object) -> None:
    """ValueError for no target where one is needed."""
    if target is None:
        raise ValueError(
            'target must be a tensor of global ids, got None; token_stats(logits, shard=shard) gives what needs none'
        )


def check_target(target: Tensor, lead: tuple[int, ...], device: torch.device) -> None:
    """ValueError unless `target` is an integer tensor of the logits' leading shape on their device. No collective."""
    if not isinstance(target, Tensor):
        raise ValueError(f'target must be a tensor of global ids, got {type(target).__name__}')
    if target.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise ValueError(f'target must hold integer ids, got {target.dtype}')
    if tuple(target.shape) != lead:
        raise ValueError(
            f'target must have the shape of the logits without their last dim, {lead}, got {tuple(target.shape)}'
        )
    if target.device != device:
        raise ValueError(f'target must be on the device of the logits, {device}, got {target.device}')


def raise_for(target: Tensor, bad: Tensor, shard: VocabShard, ignore_index: int) -> None:
    """ValueError if a label of `target[...]` is marked in `bad[...]`, which is the same on all ranks.

    On CUDA the mark is read back asynchronously and raised by a later call.
    """
    message = f'target must hold ids in [0, {shard.vocab_size}) or ignore_index {ignore_index}'
    if shard.size > 1:
        message += ', the same on every rank of the tensor parallel group'
    if bad.device.type == 'cuda':
        _raise_later(bad, message)
    elif bad.any():
        raise ValueError(f'{message}; {_what_is_bad(target, bad, shard, ignore_index)}')


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """ValueError if one of `ids` is outside `[0, vocab_size)`; on CUDA a later call raises it."""
    bad = (ids < 0) | (ids >= vocab_size)
    message = f'ids must lie in [0, {vocab_size})'
    if bad.device.type == 'cuda':
        _raise_later(bad, message)
    elif bad.any():
        raise ValueError(f'{message}, got [{int(ids.min())}, {int(ids.max())}]')


def _raise_later(bad: Tensor, message: str) -> None:
    flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(bad.any(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    _pending.append(_Pending(event, flag, f'an earlier call was wrong: {message}'))


def _what_is_bad(target: Tensor, bad: Tensor, shard: VocabShard, ignore_index: int) -> str:
    outside = bad & ((target < 0) | (target >= shard.vocab_size)) & (target != ignore_index)
    shown = outside if outside.any() else bad
    where = [tuple(index) for index in shown.nonzero()[:3].tolist()]
    got = f'got {[int(target[index]) for index in where]} at {where}, {int(shown.sum())} in all'
    if outside.any():
        return f'{got}; are the labels of another tokenizer, or do they count ids of the padded vocabulary?'
    return f'{got}, where another rank was given another label; do all ranks of the group read the same batch?'


def raise_pending(wait: bool = False) -> None:
    """Raises what calls on CUDA found: with `wait` all of it (a host sync), else what is `_LAG` calls old.

    It goes by calls, not by how far the GPU has come: the ranks of a group have to raise at the same call, else those
    that go on wait in a collective for those that raised. By then the GPU is long past the older call.
    """
    for entry in _pending:
        entry.age += 1
    while _pending and (wait or _pending[0].age >= _LAG):
        oldest = _pending.pop(0)
        oldest.event.synchronize()
        if oldest.flag.item():
            _pending.clear()
            raise ValueError(oldest.message)
