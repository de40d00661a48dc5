"""Time and memory of losses of sequences: a packed row beside the same tokens in one sequence, GRPO beside plain CE.

    python benchmarks/sequences.py                     # 2 ranks, sequences of 16 to 8,192 tokens, bfloat16

Forward and backward of losses called by hand on one row of logits. Nothing is unpacked: the packed row must cost what
one sequence of as many tokens costs, within 10%, and log-prob, entropy, loss and backward at most 1.3 times plain cross
entropy on the same tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from common import Result, compare, header, measure, parser, show_first_calls, start, table

from twinkle_megatron.loss import CrossEntropyLoss, GRPOLoss, GSPOLoss
from twinkle_megatron.loss.base import SweepLoss
from twinkle_megatron.vocab_parallel import VocabShard

WARM_UP = 2
BESIDE_ONE_SEQUENCE, BESIDE_CROSS_ENTROPY = 1.10, 1.30


class Bench:
    """Runs losses on one rank's logits `[1, T, local]`, in step with the other ranks."""

    def __init__(self, lengths: list[int], shard: VocabShard, dtype: torch.dtype, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        self.device, self.shard = device, shard
        tokens = sum(lengths)
        self.base = torch.empty(1, tokens, shard.local_size, dtype=dtype, device=device).normal_(0, 3)
        self.labels = torch.randint(0, shard.vocab_size, (1, tokens), generator=generator).to(device)
        self.positions = {
            'packed': torch.cat([torch.arange(n) for n in lengths])[None].to(device),
            'one sequence': torch.arange(tokens)[None].to(device),
        }
        old = -10 + torch.randn(tokens, generator=generator)
        self.extra = {
            'packed': {'old_logps': [x.tolist() for x in old.split(lengths)], 'advantages': [0.5] * len(lengths)},
            'one sequence': {'old_logps': [old.tolist()], 'advantages': [0.5]},
        }

    def once(self, method: tuple[SweepLoss, str], result: Result) -> float:
        loss, rows = method
        logits = self.base.clone().requires_grad_()
        inputs: Any = {'labels': self.labels, 'position_ids': self.positions[rows]}

        def step() -> None:
            extra = self.extra[rows] if loss.extras else {}
            loss(inputs, {'logits': logits, 'vocab_shard': self.shard}, **extra)['loss'].backward()

        return measure(step, self.device, result)


def rank_main(args: argparse.Namespace, device: torch.device, group: dist.ProcessGroup) -> dict[str, Any]:
    lengths = [16 << i for i in range(args.longest.bit_length() - 4)]
    case = f'{len(lengths)} sequences, {sum(lengths):,} tokens, vocabulary {args.vocab:,}, {args.dtype}'
    record: dict[str, Any] = {'about': header(args, device, case, WARM_UP)}
    bench = Bench(lengths, VocabShard.from_group(args.vocab // args.tp, group), getattr(torch, args.dtype), device)
    grpo, gspo = GRPOLoss(entropy_coef=0.01), GSPOLoss(entropy_coef=0.01)
    methods: dict[str, tuple[SweepLoss, str]] = {
        'cross entropy': (CrossEntropyLoss(), 'packed'),
        'GRPO with entropy, one sequence': (grpo, 'one sequence'),
        'GRPO with entropy, packed': (grpo, 'packed'),
        'GSPO with entropy, one sequence': (gspo, 'one sequence'),
        'GSPO with entropy, packed': (gspo, 'packed'),
    }
    results = compare(bench.once, methods, args.rounds, WARM_UP)
    if dist.get_rank() == 0:
        record['comparison'] = show(results)
    return record


def show(results: dict[str, Result]) -> dict[str, Any]:
    show_first_calls(results)
    rows, figures = [], {}
    entropy = results['cross entropy']
    for name, result in results.items():
        one = results.get(name.replace('packed', 'one sequence'), result)
        beside, time, memory = result.ms / entropy.ms, result.ms / one.ms, result.memory / one.memory
        within = beside <= BESIDE_CROSS_ENTROPY and max(time, memory) <= BESIDE_ONE_SEQUENCE
        spread = f'{min(result.seconds) * 1e3:.0f}-{max(result.seconds) * 1e3:.0f}'
        cells = [f'{result.ms:.0f}', spread, f'{beside:.2f}x', f'{time:.2f}x', f'{result.memory / 2**20:.0f}']
        rows.append([name, *cells, f'{memory:.2f}x', 'ok' if within else 'MISSED'])
        figures[name] = {'ms': result.ms, 'beside_cross_entropy': beside, 'time': time, 'memory': memory}
    heads = ['loss', 'ms', 'min-max', 'beside CE', 'beside one', 'extra MiB', 'beside one', 'target']
    title = f'Targets: {BESIDE_CROSS_ENTROPY:.1f}x cross entropy, {BESIDE_ONE_SEQUENCE:.1f}x one sequence'
    table(title, heads, rows)
    return figures


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.set_defaults(vocab=32_064)
    options.add_argument(
        '--longest', type=int, default=8192, help='tokens of the longest sequence; others halve down to 16'
    )
    options.add_argument('--dtype', default='bfloat16', choices=['bfloat16', 'float16', 'float32'])
    args = options.parse_args()
    if args.vocab % args.tp:
        options.error(f'--vocab must be a multiple of --tp, got {args.vocab} and {args.tp}')
    start(rank_main, args)


if __name__ == '__main__':
    main()
