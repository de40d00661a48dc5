"""What an earlier run of the same name has left to go on from, and that no other one is still at work there."""

from __future__ import annotations

import argparse
import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import TextIO

PATIENCE = 120.0
"""Seconds in which a file server notices that the host of a lock is gone."""

_held: dict[Path, TextIO] = {}


def folder_of(args: argparse.Namespace) -> Path:
    """Where the checkpoints of a run lie."""
    return args.run / 'checkpoints'


def start_of(args: argparse.Namespace) -> int:
    """The step that the run goes on after; 0: from the beginning. ValueError as of `checkpoint_of`."""
    found = checkpoint_of(args)
    return 0 if found is None else found[0]


def checkpoint_of(args: argparse.Namespace) -> tuple[int, Path] | None:
    """The step and the folder of the checkpoint that the run goes on from. Checkpoints are never removed: ValueError
    where there are some and `args.resume` is not 'auto', and where none of them is complete."""
    folder = folder_of(args)
    if not folder.is_dir():
        return None
    from twinkle_megatron.megatron.checkpoint_files import choose, find  # imports torch

    found = find(folder)
    if not found:
        return None
    if args.resume != 'auto':
        raise ValueError(
            f'{folder} has checkpoints of an earlier run, the last of step {max(found)}: --resume auto goes on from '
            'there; to begin anew give the run another --name, or move that folder away'
        )
    chosen = choose(folder, None)
    return next((step, path) for step, path in found.items() if path == chosen)


def hold(run: Path, patience: float = PATIENCE) -> None:
    """Locks the folder of a run for this process, until it ends, however it ends. ValueError where another process has
    it for `patience` seconds more. Without effect where the file system knows no locks."""
    run = run.resolve()
    if run in _held:
        return
    run.mkdir(parents=True, exist_ok=True)
    file = (run / 'lock').open('a+')
    told, end = False, time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or 'another process'
            if time.monotonic() > end:
                file.close()
                raise ValueError(f'{run} is in use by {who}: let it end, or give this run another --name') from None
            if not told:
                print(f'waits up to {patience:g} s for {who}, which is at work in {run}', file=sys.stderr, flush=True)
            told = True
            time.sleep(min(1.0, patience))
        except OSError:
            break
    file.truncate(0)
    file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
    file.flush()
    _held[run] = file
