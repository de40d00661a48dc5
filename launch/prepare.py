"""First step of `launch/local.sh`: checks the options and the data, makes the samples, says what to start.

Prints one line for the script, `processes device folder`, where device is `cuda` or `cpu` and folder holds the samples.
All that is meant for people goes to stderr. Exit code 2 for a wrong option, 1 for data that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys

from launch import data, options
from launch.documents import DataError


def main() -> None:
    args = options.parse()
    try:
        folder = data.prepare(
            args.data, vocab_size=args.vocab_size, seq_length=args.seq_length, cache=args.runs / 'data'
        )
        _save_options(args)
    except DataError as e:
        sys.exit(f'{e}')
    except OSError as e:
        sys.exit(f'cannot write to {args.runs}: {e}')
    processes = args.tp * args.pp * args.dp
    device = _device(processes)
    where = 'on GPUs with NCCL' if device == 'cuda' else 'on the CPU with gloo'
    lines = [
        data.load(folder).summary,
        f'layout    tp {args.tp} x pp {args.pp} x dp {args.dp}: {processes} processes {where}',
        'start     of the processes: some seconds',
    ]
    print('\n'.join(lines), file=sys.stderr)
    print(processes, device, folder)


def _save_options(args: argparse.Namespace) -> None:
    args.run.mkdir(parents=True, exist_ok=True)
    (args.run / 'options.json').write_text(json.dumps(vars(args), default=str, indent=1) + '\n')


def _device(processes: int) -> str:
    import torch  # slow to import, and a wrong option should be told at once

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < processes:
        print(f'note      {gpus} GPU(s) for {processes} processes: they run on the CPU instead', file=sys.stderr)
    return 'cuda' if gpus >= processes else 'cpu'


if __name__ == '__main__':
    main()
