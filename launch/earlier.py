"""What an earlier run of the same name has left to go on from."""

from __future__ import annotations

import argparse
from pathlib import Path


def folder_of(args: argparse.Namespace) -> Path:
    """Where the checkpoints of a run lie."""
    return args.run / 'checkpoints'


def start_of(args: argparse.Namespace) -> int:
    """The step that the run goes on after; 0: from the beginning. Checkpoints are never removed: ValueError where there
    are some and `args.resume` is not 'auto', and where none of them is complete."""
    folder = folder_of(args)
    if not folder.is_dir():
        return 0
    from twinkle_megatron.megatron.checkpoint_files import choose, find, step_of  # imports torch

    found = find(folder)
    if not found:
        return 0
    if args.resume != 'auto':
        raise ValueError(
            f'{folder} has checkpoints of an earlier run, the last of step {max(found)}: --resume auto goes on from '
            'there; to begin anew give the run another --name, or remove that folder'
        )
    return step_of(choose(folder, None))
