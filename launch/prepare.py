"""First step of `launch/local.sh`: checks the options and the data, makes the samples, says what to start.

Prints one line for the script, `processes device folder`, where device is `cuda` or `cpu` and folder holds the samples.
All that is meant for people goes to stderr. Exit code 2 for a wrong option, 1 for data that cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from launch import options, weights
from launch.datasets import anchors, best_tokens, data, pairs, rollouts
from launch.datasets.lines import DataError
from launch.datasets.texts import Texts
from launch.earlier import start_of
from launch.kinds import DISTILLATION, EMBEDDINGS, LOSSES, PAIRS, ROLLOUTS


def main() -> None:
    args = options.parse()
    try:
        start_of(args)
        _check_place(args.save_weights)
    except (ValueError, OSError) as e:
        print(f'error: {e}', file=sys.stderr)
        sys.exit(2)
    try:
        folder, summary = prepare(args)
        args.run.mkdir(parents=True, exist_ok=True)
    except DataError as e:
        sys.exit(f'{e}')
    except OSError as e:
        sys.exit(f'cannot write to {args.runs}: {e}')
    processes = args.tp * args.pp * args.dp
    device = device_for(processes)
    where = 'on GPUs with NCCL' if device == 'cuda' else 'on the CPU with gloo'
    lines = [
        summary,
        f'layout    tp {args.tp} x pp {args.pp} x dp {args.dp}: {processes} processes {where}',
        'start     of the processes: some seconds',
    ]
    print('\n'.join(lines), file=sys.stderr)
    print(processes, device, folder)


def prepare(args: argparse.Namespace) -> tuple[Path, str]:
    """The folder with the samples, and what is in it, in words."""
    cache, length = args.runs / 'data', args.seq_length
    brings = args.init_weights or args.teacher_weights  # of the same tokenizer
    about = None if brings is None else weights.read_about(brings)
    kind, least = LOSSES[args.loss], args.micro_batches * args.micro_batch_size
    if kind is ROLLOUTS:
        assert about is not None
        folder = rollouts.prepare(args.data, about, seq_length=length, least=least, cache=cache)
        return folder, rollouts.load(folder).summary
    if kind is PAIRS:
        assert about is not None
        folder = pairs.prepare(args.data, about, held_out=args.held_out, seq_length=length, least=least, cache=cache)
        return folder, pairs.load(folder).summary
    if kind is EMBEDDINGS:
        assert about is not None
        more = {'held_out': args.held_out, 'negatives': args.hard_negatives is not None}
        folder = anchors.prepare(args.data, about, seq_length=length, least=least, cache=cache, **more)
        return folder, anchors.load(folder).summary
    if kind is DISTILLATION and args.teacher_weights is None:
        tokenizer = best_tokens.read_tokenizer(args.tokenizer) if about is None else about.tokenizer
        size = None if about is None else about.vocab_size
        folder = best_tokens.prepare(args.data, tokenizer, seq_length=length, least=least, cache=cache, vocab_size=size)
        return folder, best_tokens.load(folder).summary
    texts = None if about is None else Texts(about)
    folder = data.prepare(args.data, vocab_size=args.vocab_size, seq_length=length, cache=cache, texts=texts)
    return folder, data.load(folder).summary


def _check_place(path: Path | None) -> None:
    """ValueError where the weights could not be written at the end."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f'--save-weights must be a file, and {path} is a folder')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as e:
        raise ValueError(f'--save-weights {path} cannot be written: {e}; give another path') from None


def device_for(processes: int) -> str:
    """`cuda` where there is a GPU for each process of a host, as many of the job of SLURM as it has, else `cpu`."""
    import torch  # slow to import, and a wrong option should be told at once

    processes = -(-processes // int(os.environ.get('SLURM_JOB_NUM_NODES', '1')))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < processes:
        told = f'{gpus} GPU(s) for {processes} processes of a host: they run on the CPU instead'
        print(f'note      {told}', file=sys.stderr)
    return 'cuda' if gpus >= processes else 'cpu'


if __name__ == '__main__':
    main()
