"""Time and memory of the vocabulary-parallel statistics beside Megatron-Core's two cross entropies, in one run.

    python benchmarks/token_stats.py                          # 2 ranks, 1,024 tokens, vocabulary 152,064, bfloat16
    python benchmarks/token_stats.py --rounds 15 --json out.json

Every round runs every method once, so that a busy machine slows all of them alike; medians over the rounds are shown.
On a busy machine the CPU time (`cpu ms`) says more than the time passed.
Memory is the peak above what was there with the logits. Two gloo ranks on CPU; NCCL where there are GPUs enough.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Result,
    compare,
    header,
    measure,
    megatron_cross_entropies,
    parser,
    show_comparison,
    show_first_calls,
    start,
    table,
    verdict_on,
)
from torch import Tensor

from twinkle_megatron.vocab_parallel import VocabShard, log_probs_and_entropy, token_stats
from twinkle_megatron.vocab_parallel.kernels.memory import empty
from twinkle_megatron.vocab_parallel.kernels.select import VARIABLE

TARGETS = {'compiled': (0.50, 1.1), 'compiled, reuse_storage': (0.30, 0.1)}
"""Method -> (time beside the faster of Megatron's two, memory beside the gradient) to stay below."""
MAX_ENTROPY = 1.2
WARM_UP = 2
Method = Callable[[Tensor, Tensor], Tensor]


def ours(shard: VocabShard, kernels: str = 'compiled', **options: Any) -> Method:
    def run(logits: Tensor, target: Tensor) -> Tensor:
        os.environ[VARIABLE] = kernels
        if options.get('entropy'):
            rest = {key: value for key, value in options.items() if key != 'entropy'}
            log_prob, entropy = log_probs_and_entropy(logits, target, shard=shard, **rest)
            return log_prob + 0.01 * entropy
        log_prob = token_stats(logits, target, shard=shard, **options).log_prob
        assert log_prob is not None
        return log_prob

    return run


def our_methods(shard: VocabShard) -> dict[str, Method]:
    return {
        'compiled': ours(shard),
        'compiled, reuse_storage': ours(shard, reuse_storage=True),
        'compiled, entropy': ours(shard, entropy=True),
        'compiled, argmax': ours(shard, argmax=True),
        'compiled, chunk_size 1024': ours(shard, chunk_size=1024),
        'eager': ours(shard, 'eager'),
        'eager, reuse_storage': ours(shard, 'eager', reuse_storage=True),
        'eager, entropy': ours(shard, 'eager', entropy=True),
    }


class Bench:
    """Runs methods on one rank's logits `[tokens, local]`, in step with the other ranks.

    Two dims are what suits Megatron's fused cross entropy best: on `[tokens, 1, local]` it takes half as long again.
    """

    def __init__(self, tokens: int, shard: VocabShard, dtype: torch.dtype, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self.target = torch.randint(0, shard.vocab_size, (tokens,), generator=generator).to(device)
        self.upstream = torch.rand(tokens, generator=generator).to(device)
        self.base = torch.empty(tokens, shard.local_size, dtype=dtype, device=device).normal_(0, 3)

    @property
    def gradient_bytes(self) -> int:
        return self.base.numel() * self.base.element_size()

    def once(self, method: Method, result: Result) -> float:
        """Forward and backward of one method."""
        logits = self.base.clone().requires_grad_()

        def step() -> None:
            out = method(logits, self.target)
            out.backward(self.upstream.to(out.dtype))

        return measure(step, self.device, result)

    def compare(self, methods: dict[str, Method], rounds: int) -> dict[str, Result]:
        return compare(self.once, methods, rounds, WARM_UP)


def show(results: dict[str, Result], gradient_bytes: int) -> dict[str, Any]:
    entropy = results['compiled, entropy'].ms / results['compiled'].ms
    has_megatron = any(name.startswith('Megatron') for name in results)

    def verdict(name: str, time_ratio: float, memory_ratio: float) -> str:
        if name in TARGETS and has_megatron:
            return verdict_on(time_ratio, memory_ratio, TARGETS[name])
        if name == 'compiled, entropy':
            return f'{"ok" if entropy <= MAX_ENTROPY else "MISSED"} ({entropy:.2f}x without, <= {MAX_ENTROPY}x)'
        return ''

    show_first_calls(results)
    return show_comparison("Beside the faster of Megatron's two", results, ('gradient', gradient_bytes), verdict)


def scaling(args: argparse.Namespace, device: torch.device, group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Cost over tokens and over vocabulary. Per element it is flat where cost is linear."""
    cases = [(tokens, args.vocab) for tokens in (256, 512, 1024, 2048, 4096)]
    cases += [(args.tokens, args.vocab // part) for part in (8, 4, 2, 1)]
    rows, figures = [], []
    for tokens, vocab in cases:
        shard = VocabShard.from_group(vocab // args.tp, group)
        bench = Bench(tokens, shard, getattr(torch, args.dtype), device)
        methods = {'compiled': ours(shard), 'reuse': ours(shard, reuse_storage=True)}
        results = bench.compare(methods, args.rounds)
        elements = tokens * shard.local_size
        each = {name: result.cpu_ms * 1e6 / elements for name, result in results.items()}
        memory = results['compiled'].memory / bench.gradient_bytes
        fresh = fresh_memory(bench.base, args.rounds) * 1e9 / elements
        rows.append(
            [
                f'{tokens:,}',
                f'{vocab:,}',
                *(f'{results[name].ms:.1f}' for name in methods),
                *(f'{each[name]:.2f}' for name in methods),
                f'{fresh:.2f}',
                f'{memory:.2f}x',
            ]
        )
        figures.append({'tokens': tokens, 'vocab': vocab, 'cpu_ns_per_element': each, 'memory_ratio': memory})
    if dist.get_rank() == 0:
        heads = ['tokens', 'vocabulary', 'ms', 'ms reuse', 'cpu ns/element', 'reuse', 'fresh memory', 'memory/gradient']
        table('Growth (one element: one token and one column of a rank)', heads, rows)
        print('fresh memory: ns/element to touch a new tensor of the size of the gradient, which reuse does without')
    return figures


def fresh_memory(like: Tensor, rounds: int) -> float:
    """CPU seconds to ask for a gradient of these logits and write it once: the system's part of the cost."""
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        started = time.process_time()
        empty(like.shape, like.dtype, like.device).zero_()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def rank_main(args: argparse.Namespace, device: torch.device, group: dist.ProcessGroup) -> dict[str, Any]:
    case = f'{args.tokens:,} tokens, vocabulary {args.vocab:,}, {args.dtype}, forward and backward'
    record: dict[str, Any] = {'about': header(args, device, case, WARM_UP)}
    shard = VocabShard.from_group(args.vocab // args.tp, group)
    methods = {} if args.no_megatron else megatron_cross_entropies(group)
    bench = Bench(args.tokens, shard, getattr(torch, args.dtype), device)
    results = bench.compare({**methods, **our_methods(shard)}, args.rounds)
    if dist.get_rank() == 0:
        record['comparison'] = show(results, bench.gradient_bytes)
    del bench
    if not args.no_scaling:
        record['scaling'] = scaling(args, device, group)
    return record


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument('--tokens', type=int, default=1024)
    options.add_argument('--dtype', default='bfloat16', choices=['bfloat16', 'float16', 'float32'])
    args = options.parse_args()
    if args.vocab % args.tp:
        options.error(f'--vocab must be a multiple of --tp, got {args.vocab} and {args.tp}')
    start(rank_main, args)


if __name__ == '__main__':
    main()
