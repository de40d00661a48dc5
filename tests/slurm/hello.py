"""A tiny distributed program: every rank prints a line of JSON about itself. With options it then waits for a signal or
ends with a code.

usage: hello.py [--no-torch] [--wait] [--code CODE [--only-rank RANK]] [--code-once CODE] [anything else]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time

parser = argparse.ArgumentParser()
parser.add_argument('--no-torch', action='store_true')
parser.add_argument('--wait', action='store_true')
parser.add_argument('--code', type=int, default=0)
parser.add_argument('--only-rank', type=int)
parser.add_argument('--code-once', type=int)
args, others = parser.parse_known_args()


def say(**values: object) -> None:
    os.write(1, (json.dumps(values) + '\n').encode())  # one write, so that lines of ranks stay whole


got: list[str] = []
for name in ('SIGUSR1', 'SIGTERM'):
    signal.signal(getattr(signal, name), lambda number, frame: got.append(signal.Signals(number).name))

rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
total = None
if not args.no_torch:
    import torch
    import torch.distributed as dist

    dist.init_process_group('gloo')
    number = torch.tensor([rank])
    dist.all_reduce(number)
    total = int(number)
say(
    rank=rank,
    local=int(os.environ['LOCAL_RANK']),
    world=world,
    local_world=int(os.environ['LOCAL_WORLD_SIZE']),
    master=os.environ['MASTER_ADDR'],
    port=int(os.environ['MASTER_PORT']),
    node=os.environ['SLURMD_NODENAME'],
    restarts=int(os.environ.get('SLURM_RESTART_COUNT', '0')),
    total=total,
    others=others,
)
if args.code_once is not None:
    args.code = args.code_once if os.environ.get('SLURM_RESTART_COUNT', '0') == '0' else 0
if args.wait and (args.code_once is None or args.code):
    say(waits=rank)
    while not got:
        time.sleep(0.05)
    say(signal=got[0], of=rank)
if args.only_rank not in (None, rank):
    time.sleep(600)  # as in a collective that never ends
for name in ('SIGUSR1', 'SIGTERM'):
    signal.signal(
        getattr(signal, name), signal.SIG_IGN
    )  # one more while Python closes down would end it by that signal
os._exit(args.code)  # threads of gloo that are still there while Python closes down may abort it
