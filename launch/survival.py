"""A run that is ended goes on where it was: checkpoints of its folder, signals, and a watch over steps that hang."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from launch.earlier import folder_of, hold, start_of
from twinkle_megatron import MegatronModel
from twinkle_megatron.survive import AGAIN, StopSignals, Watchdog

SAME = ('loss', 'seed', 'steps', 'micro_batches', 'micro_batch_size')
"""Options that say which samples a step has, and of how many steps the learning rate is made."""


class Tally:
    """A count since it was last taken, the same on every rank, which goes on with the run."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count

    def take(self) -> int:
        """The count, which begins anew."""
        count, self._count = self._count, 0
        return count

    def state_dict(self) -> dict[str, Any]:
        return {'count': self._count}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self._count = kept['count']


def find_start(args: argparse.Namespace) -> int:
    """The step that the run goes on after, as rank 0 finds it (`launch/earlier.py`), the same on every rank; its folder
    is locked for rank 0. SystemExit with the reason where it cannot start. Collective."""
    found: list[Any] = [0, None]
    if dist.get_rank() == 0:
        try:
            hold(args.run)
            found[0] = start_of(args)
        except (ValueError, OSError) as refused:
            found[1] = str(refused)
    dist.broadcast_object_list(found, device=torch.device('cuda') if torch.cuda.is_available() else None)
    start, refusal = found
    if refusal is not None:
        raise SystemExit(refusal)
    return start


def steps(
    model: MegatronModel, orders: Iterator[torch.Tensor], args: argparse.Namespace, stop: StopSignals, **parts: Any
) -> Iterator[tuple[int, torch.Tensor]]:
    """The steps that are left, from 1, and the samples of each. What follows a step in the caller's loop is part of it.

    Before the first of them the last checkpoint is loaded, where there is one to go on from: what the caller has done
    until then, it has done with the weights of the start. Between two steps checkpoints are saved, every
    `args.save_every` of them, and where a rank has been told to end, the process ends after one, with exit code 85.

    Args:
        parts: what else has a state of its own on each rank, with `state_dict` and `load_state_dict`. In another layout
            only a `Tally`, which is the same on every rank, goes on.
    """
    if args.start:
        _load(model, args, parts)
    with Watchdog(args.hang_timeout, model.groups) as watchdog:
        for step, chosen in enumerate(orders, start=1):
            if step <= args.start:
                continue
            watchdog.beat(f'step {step}')
            yield step, chosen
            ends = stop.agreed() and step < args.steps
            if ends or (args.save_every and step % args.save_every == 0):
                watchdog.beat(f'the save after step {step}')
                _save(model, args, parts)
            if ends:
                _end(step, args, stop)


def _end(step: int, args: argparse.Namespace, stop: StopSignals) -> None:
    stop.ignore()
    if dist.get_rank() == 0:
        told = f'stopped after step {step} of {args.steps}, saved in {folder_of(args)}'
        print(f'{told}; the same command with --resume auto goes on', flush=True)
    dist.barrier()
    sys.exit(AGAIN)


def _save(model: MegatronModel, args: argparse.Namespace, parts: dict[str, Any]) -> None:
    of_ranks = {name: model.groups.gather_objects(part.state_dict()) for name, part in parts.items()}
    state = {'of_run': _of_run(args), 'layout': _layout(args), 'parts': of_ranks}
    model.save(folder_of(args), state=state, keep=args.keep)


def _of_run(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in SAME}


def _layout(args: argparse.Namespace) -> list[int]:
    return [args.tp, args.pp, args.dp]


def _load(model: MegatronModel, args: argparse.Namespace, parts: dict[str, Any]) -> None:
    state = model.load(folder_of(args), step=args.start)
    before, here = state['of_run'], _of_run(args)
    other = [name for name in SAME if before[name] != here[name]]
    if other:
        option = '--' + other[0].replace('_', '-')
        raise SystemExit(
            f'the run in {args.run} was begun with {option} {before[other[0]]}, got {here[other[0]]}; go on with '
            'that, or begin another one with --name'
        )
    same_layout = state['layout'] == _layout(args)
    for name, part in parts.items():
        of_ranks = state['parts'][name]
        if same_layout or isinstance(part, Tally):
            part.load_state_dict(of_ranks[dist.get_rank() if same_layout else 0])
    if dist.get_rank() == 0:
        print(f'goes on after step {args.start} of {args.steps}, from {folder_of(args)}', flush=True)
