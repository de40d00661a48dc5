"""A run that is ended goes on where it was: checkpoints of its folder, signals, and a watch over steps that hang."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from launch.datasets.fingerprint import fingerprint
from launch.earlier import PATIENCE, checkpoint_of, folder_of, hold
from launch.figures.progress import Clock
from launch.whole_file import whole_file
from twinkle_megatron import MegatronModel
from twinkle_megatron.megatron.checkpoint_files import state_of
from twinkle_megatron.survive import AGAIN, StopSignals, Watchdog

FILES = ('dataset', 'init_weights', 'teacher_weights')
"""Options that name what has to have the same contents, wherever it lies."""
FREE = {
    *FILES, 'data', 'model', 'revision', 'tokenizer', 'tp', 'pp', 'dp', 'head', 'packed', 'doctor', 'reference_cache',
    'log_every', 'eval_every', 'save_weights', 'save_model', 'save_dtype', 'runs', 'resume', 'save_every', 'keep',
    'hang_timeout', 'name', 'run', 'start',
}  # fmt: skip
"""Options that may be others when a run goes on: its files may have moved, and every layout gives the same numbers."""


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
    """The step that the run goes on after, as rank 0 finds it (`launch/earlier.py`), the same on every rank.

    The folder of the run is locked for rank 0, and has these options as `options.json`. SystemExit with the reason,
    which rank 0 prints, where it cannot start; nothing was changed then. Collective.
    """
    found: list[Any] = [0, None]
    if dist.get_rank() == 0:
        try:
            hold(args.run, min(PATIENCE, args.hang_timeout))
            earlier = checkpoint_of(args)
            if earlier is not None:
                found[0], path = earlier
                _check_same(state_of(path)['of_run'], args)
            _save_options(args)
        except (ValueError, OSError) as refused:
            found[1] = str(refused)
        except Exception as error:
            found[1] = f'{args.run} cannot be gone on with: {type(error).__name__}: {error}'
    dist.broadcast_object_list(found, device=torch.device('cuda') if torch.cuda.is_available() else None)
    start, refusal = found
    if refusal is not None:
        _refuse(refusal)
    return start


def _refuse(why: str) -> NoReturn:
    raise SystemExit(why if dist.get_rank() == 0 else 1)


def _of_run(args: argparse.Namespace) -> dict[str, Any]:
    """What has to be the same when the run goes on."""
    options = {name: value for name, value in vars(args).items() if name not in FREE}
    files = {name: getattr(args, name, None) for name in FILES}
    return options | {name: None if path is None else fingerprint(path) for name, path in files.items()}


def _check_same(before: dict[str, Any], args: argparse.Namespace) -> None:
    here = _of_run(args)
    if here['steps'] is None:
        del here['steps']  # as many as the epochs have
    other = [name for name in here if before.get(name, here[name]) != here[name]]
    if not other:
        return
    name = other[0]
    if name in FILES:
        option = 'data' if name == 'dataset' else name
        what = f'another --{option.replace("_", "-")}: its contents are not those of the start'
    else:
        what = f'--{name.replace("_", "-")} {before[name]}, got {here[name]}'
    raise ValueError(f'the run in {args.run} was begun with {what}; go on with that, or begin another one with --name')


def _save_options(args: argparse.Namespace) -> None:
    with whole_file(args.run / 'options.json') as file:
        file.write(json.dumps(vars(args), default=str, indent=1) + '\n')


def steps(
    model: MegatronModel, orders: Iterator[torch.Tensor], args: argparse.Namespace, stop: StopSignals, **parts: Any
) -> Iterator[tuple[int, torch.Tensor]]:
    """The steps that are left, from 1, and the samples of each. What follows a step in the caller's loop is part of it.

    Before the first of them the last checkpoint is loaded, where there is one to go on from: what the caller has done
    until then, it has done with the weights of the start. Between two steps checkpoints are saved, every
    `args.save_every` of them, and where a rank has been told to end, the process ends after one, with exit code 85.

    Args:
        parts: what else has a state of its own on each rank, with `state_dict` and `load_state_dict`. In another layout
            only a `Tally`, which is the same on every rank, and the first rank's `Clock` go on.
    """
    of_run = _of_run(args) if dist.get_rank() == 0 else {}  # what rank 0 saves is kept
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
                _save(model, args, of_run, parts)
            if ends:
                _end(step, args)


def _end(step: int, args: argparse.Namespace) -> NoReturn:
    if dist.get_rank() == 0:
        told = f'stopped after step {step} of {args.steps}, saved in {folder_of(args)}'
        print(f'{told}; the same command with --resume auto goes on', flush=True)
    sys.exit(AGAIN)


def _save(model: MegatronModel, args: argparse.Namespace, of_run: dict[str, Any], parts: dict[str, Any]) -> None:
    of_ranks = {name: model.groups.gather_objects(part.state_dict()) for name, part in parts.items()}
    state = {'of_run': of_run, 'layout': _layout(args), 'parts': of_ranks}
    model.save(folder_of(args), state=state, keep=args.keep)


def _layout(args: argparse.Namespace) -> list[int]:
    return [args.tp, args.pp, args.dp]


def _load(model: MegatronModel, args: argparse.Namespace, parts: dict[str, Any]) -> None:
    try:
        state = model.load(folder_of(args), step=args.start)
    except ValueError as error:
        _refuse(f'{error}; go on with the model that the run was begun with, or begin another one with --name')
    same_layout = state['layout'] == _layout(args)
    for name, part in parts.items():
        of_ranks = state['parts'][name]
        if same_layout or isinstance(part, (Tally, Clock)):
            part.load_state_dict(of_ranks[dist.get_rank() if same_layout else 0])
    if dist.get_rank() == 0:
        print(f'goes on after step {args.start} of {args.steps}, from {folder_of(args)}', flush=True)
