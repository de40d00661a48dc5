"""Time and memory of the linear head beside Megatron-Core's output layer and cross entropies, in one run.

    python benchmarks/linear_head.py                      # 2 ranks, 2,048 tokens, hidden 1,024, vocabulary 152,064
    python benchmarks/linear_head.py --dtype bfloat16 --no-scaling --json out.json

Cross entropy from hidden states under sequence parallelism, forward and backward, the gradient of the weight included.
Every round runs every method once, so that a busy machine slows all of them alike; medians over the rounds are shown.
Memory is the peak above what was there with hidden states, weight and, where one is used, `main_grad`; free memory goes
back to the system before each step. It includes the gradients. Two gloo ranks on CPU; NCCL where there are GPUs enough.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import (
    CrossEntropy,
    Result,
    compare,
    header,
    measure,
    megatron_cross_entropies,
    of_megatron,
    parser,
    show_comparison,
    show_first_calls,
    start,
    table,
    verdict_on,
)
from torch import Tensor

from twinkle_megatron.megatron import cpu
from twinkle_megatron.vocab_parallel import LinearHead, VocabShard, cross_entropy
from twinkle_megatron.vocab_parallel.kernels.select import VARIABLE

TARGETS = {torch.bfloat16: (1.05, 0.2), torch.float32: (1.25, 0.4)}
"""Dtype -> (time, peak) of `ours` beside the faster of Megatron's two, to stay below."""
WARM_UP = 1
MIB = 2**20
Method = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The loss of each token `[tokens]` from hidden `[tokens/tp, H]`, weight `[vocab/tp, H]` and ids `[tokens]`."""


def ours(shard: VocabShard, kernels: str = 'auto', frozen: bool = False, **options: Any) -> Method:
    def run(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        os.environ[VARIABLE] = kernels
        weight = weight.detach() if frozen else weight
        head = LinearHead(hidden, weight, sequence_parallel=shard.size > 1, **options)
        return cross_entropy(head, target, shard=shard)

    return run


def our_methods(shard: VocabShard, main_grad: Tensor) -> dict[str, Method]:
    return {
        'ours': ours(shard),
        'ours, workspace 64 MiB': ours(shard, max_workspace_mb=64),
        'ours, into main_grad': ours(shard, main_grad=main_grad),
        'ours, frozen weight': ours(shard, frozen=True),
        'ours, eager': ours(shard, 'eager'),
    }


def megatron_methods(group: dist.ProcessGroup) -> dict[str, Method]:
    """`output_layer` as `ColumnParallelLinear` computes it, and then either of Megatron's cross entropies.

    Logits have two dims, which is what suits the fused one best.
    """
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.tensor_parallel import cross_entropy as plain_cross_entropy
    from megatron.core.tensor_parallel import layers

    entropies = megatron_cross_entropies(group)
    if not torch.cuda.is_available():  # the layer asks for CUDA; cross entropies do without, and shall stay compiled
        untouched = {module: dict(vars(module)) for module in (fused_cross_entropy, plain_cross_entropy)}
        cpu.install()
        for module, names in untouched.items():
            vars(module).update(names)
    linear, parallel = layers.linear_with_grad_accumulation_and_async_allreduce, dist.get_world_size() > 1

    def with_layer(entropy: CrossEntropy) -> Method:
        def run(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return entropy(linear(hidden, weight, None, False, False, parallel, tp_group=group), target)

        return run

    return {name: with_layer(entropy) for name, entropy in entropies.items()}


class Bench:
    """Runs methods on one rank's hidden states and weight, in step with the other ranks."""

    def __init__(self, tokens: int, hidden: int, shard: VocabShard, dtype: torch.dtype, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self.target = torch.randint(0, shard.vocab_size, (tokens,), generator=generator).to(device)
        self.upstream = torch.rand(tokens, generator=generator).to(device)
        self.hidden = torch.empty(tokens // shard.size, hidden, device=device).normal_().to(dtype)
        self.weight = torch.empty(shard.local_size, hidden, dtype=dtype, device=device).normal_(0, 0.02)
        self.logits_bytes = tokens * shard.local_size * dtype.itemsize
        self.hidden_bytes = tokens * hidden * dtype.itemsize
        self.weight_bytes = self.weight.numel() * dtype.itemsize

    def once(self, method: Method, result: Result) -> float:
        """Forward and backward of one method."""
        hidden, weight = (t.detach().requires_grad_() for t in (self.hidden, self.weight))

        def step() -> None:
            out = method(hidden, weight, self.target)
            out.backward(self.upstream.to(out.dtype))

        return measure(step, self.device, result)


def comparison(
    args: argparse.Namespace, dtype: torch.dtype, shard: VocabShard, device: torch.device, theirs: dict[str, Method]
) -> dict[str, Any]:
    bench = Bench(args.tokens, args.hidden, shard, dtype, device)
    main_grad = torch.zeros(bench.weight.shape, dtype=torch.float32, device=device)
    mine = {name: method for name, method in our_methods(shard, main_grad).items() if not args.quick or name == 'ours'}
    results = compare(bench.once, {**theirs, **mine}, args.rounds, WARM_UP)
    if dist.get_rank() != 0:
        return {}
    faster = min(of_megatron(results), key=lambda result: result.ms, default=None)

    def verdict(name: str, time_ratio: float, memory_ratio: float) -> str:
        if name == 'ours' and faster is not None and dtype in TARGETS:
            return verdict_on(time_ratio, memory_ratio, TARGETS[dtype])
        return ''

    title = f"{str(dtype).removeprefix('torch.')}, beside the faster of Megatron's two"
    print(f'\nlogits {bench.logits_bytes / MIB:.0f} MiB, gradient of the weight {bench.weight_bytes / MIB:.0f} MiB')
    show_first_calls(results)
    peak = float('nan') if faster is None else faster.memory
    return show_comparison(title, results, ('its peak', peak), verdict)


def scaling(args: argparse.Namespace, device: torch.device, group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Peak over tokens, over vocabulary, and over both: it has no part that grows with their product."""
    dtype, hidden = getattr(torch, args.dtype[0]), 256
    cases = [(tokens << 10, 32 << 10) for tokens in (1, 1, 2, 4, 8, 16, 32)]  # the first one to warm up
    cases += [(1 << 10, vocab << 10) for vocab in (64, 128, 256)] + [(8 << 10, 128 << 10)]
    rows, figures = [], []
    for tokens, vocab in cases:
        shard = VocabShard.from_group(vocab // args.tp, group)
        bench, result = Bench(tokens, hidden, shard, dtype, device), Result()
        bench.once(ours(shard), result)
        extra = result.memory - bench.weight_bytes - 3 * bench.hidden_bytes
        sizes = (bench.logits_bytes, result.memory, bench.weight_bytes, 3 * bench.hidden_bytes, extra)
        rows.append([f'{tokens:,}', f'{vocab:,}', f'{result.ms:.0f}', *(f'{size / MIB:.1f}' for size in sizes)])
        names = ('logits_bytes', 'peak_bytes', 'weight_gradient_bytes', 'hidden_bytes_times_3', 'extra_bytes')
        figures.append({'tokens': tokens, 'vocab': vocab, 'ms': result.ms, **dict(zip(names, sizes))})
    if dist.get_rank() == 0:
        heads = ['tokens', 'vocabulary', 'ms', 'logits MiB', 'peak MiB', 'gradient of weight', '3 x hidden', 'extra']
        table(f'Peak of a rank over tokens and vocabulary (hidden {hidden}, {args.dtype[0]})', heads, rows[1:])
        print('extra: what the peak holds beside the gradient of the weight and 3 times the hidden states, all in MiB')
    return figures[1:]


def rank_main(args: argparse.Namespace, device: torch.device, group: dist.ProcessGroup) -> dict[str, Any]:
    case = f'{args.tokens:,} tokens, hidden {args.hidden:,}, vocabulary {args.vocab:,}, sequence parallel'
    record: dict[str, Any] = {'about': header(args, device, f'{case}, forward and backward', WARM_UP)}
    shard = VocabShard.from_group(args.vocab // args.tp, group)
    theirs = {} if args.no_megatron else megatron_methods(group)
    record['comparison'] = {name: comparison(args, getattr(torch, name), shard, device, theirs) for name in args.dtype}
    if not args.no_scaling:
        record['scaling'] = scaling(args, device, group)
    return record


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument('--tokens', type=int, default=2048)
    options.add_argument('--hidden', type=int, default=1024, help='width of the hidden states')
    dtypes = ['bfloat16', 'float16', 'float32']
    options.add_argument('--dtype', nargs='+', default=['bfloat16', 'float32'], choices=dtypes)
    options.add_argument('--quick', action='store_true', help='of ours only the one that has a target')
    args = options.parse_args()
    for name in ('vocab', 'tokens'):
        if getattr(args, name) % args.tp:
            options.error(f'--{name} must be a multiple of --tp, got {getattr(args, name)} and {args.tp}')
    start(rank_main, args)


if __name__ == '__main__':
    main()
