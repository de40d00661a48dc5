"""Time and memory of the divergence of a student and a teacher beside its plain autograd form, in one run.

    python benchmarks/divergence.py                       # 2 ranks, 512 tokens, vocabulary 152,064, bfloat16
    python benchmarks/divergence.py --rounds 1 --json out.json

Generalised Jensen-Shannon divergence, forward and backward. The plain form is what TRL and Twinkle write down, on
shards: log-softmax in float32 by differentiable sums over the ranks, log-sum-exp of the two stacked for the mixture,
`kl_div`, and autograd does the rest; no public system has another one that is right. A leaner one takes `logaddexp` and
the formula. Both are shown, and every row is beside the plain one of its beta.
Every round runs every method once, so that a busy machine slows all of them alike; medians over the rounds are shown.
Memory is the peak above what was there with the logits of both. Two gloo ranks on CPU; NCCL where there are GPUs
enough.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Result, compare, header, measure, parser, show_first_calls, start, table, verdict_on
from torch import Tensor

from twinkle_megatron.vocab_parallel import LinearHead, VocabShard, generalized_jsd
from twinkle_megatron.vocab_parallel.kernels.select import VARIABLE

TARGET = (0.08, 1.1)
"""Time beside the plain form, memory beside the gradient of the student, to stay below."""
JUDGED = 'ours, beta 0.5'
BETAS = (0.5, 0.0, 1.0)
WARM_UP = 1
MIB = 2**20
Method = Callable[[Tensor, Tensor], Tensor]
"""The divergence of each token `[tokens]` from logits of student and teacher `[tokens, vocab/tp]`."""


class _Sum(torch.autograd.Function):
    """The sum over the ranks. Where each rank goes on to its own columns, as from a normaliser, it has a part of the
    gradient only, and these are summed too; where all go on to the same value, each has the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, parts: bool) -> Tensor:
        ctx.group, ctx.parts = group, parts
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].clone()
        if ctx.parts:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


def plain(shard: VocabShard, beta: float, lean: bool = False) -> Method:
    group = shard.group
    assert group is not None

    def summed(x: Tensor, parts: bool = False) -> Tensor:
        return _Sum.apply(x.sum(-1, keepdim=True), group, parts)  # type: ignore[no-any-return]

    def log_softmax(logits: Tensor) -> Tensor:
        x = logits.float()
        top = x.detach().amax(-1, keepdim=True)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        x = x - top
        return x - summed(x.exp(), parts=True).log()

    def run(student: Tensor, teacher: Tensor) -> Tensor:
        log_s, log_t = log_softmax(student), log_softmax(teacher)

        def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
            terms = log_p.exp() * (log_p - log_q) if lean else F.kl_div(log_q, log_p, reduction='none', log_target=True)
            return summed(terms)[..., 0]

        if beta in (0, 1):
            return kl(log_t, log_s) if beta == 0 else kl(log_s, log_t)
        weighed = log_t + math.log(beta), log_s + math.log1p(-beta)
        log_m = torch.logaddexp(*weighed) if lean else torch.logsumexp(torch.stack(weighed), 0)
        return beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)

    return run


def ours(shard: VocabShard, beta: float, kernels: str = 'auto', teacher: LinearHead | None = None) -> Method:
    def run(student: Tensor, logits: Tensor) -> Tensor:
        os.environ[VARIABLE] = kernels
        return generalized_jsd(student, logits if teacher is None else teacher, shard=shard, beta=beta)

    return run


class Bench:
    """Runs methods on one rank's logits of both, in step with the other ranks."""

    def __init__(self, tokens: int, hidden: int, shard: VocabShard, dtype: torch.dtype, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self.upstream = torch.rand(tokens, generator=generator).to(device)
        self.student, self.teacher = (
            torch.empty(tokens, shard.local_size, dtype=dtype, device=device).normal_(0, 3) for _ in range(2)
        )
        weight = torch.empty(shard.local_size, hidden, dtype=dtype, device=device).normal_(0, 0.02)
        self.head = LinearHead(torch.randn(tokens, hidden, generator=generator).to(device, dtype), weight)

    @property
    def gradient_bytes(self) -> int:
        return self.student.numel() * self.student.element_size()

    def once(self, method: Method, result: Result) -> float:
        """Forward and backward of one method."""
        student = self.student.detach().requires_grad_()

        def step() -> None:
            out = method(student, self.teacher)
            out.backward(self.upstream.to(out.dtype))

        return measure(step, self.device, result)


def methods(shard: VocabShard, head: LinearHead) -> dict[str, Method]:
    return {
        **{f'plain, beta {beta:g}': plain(shard, beta) for beta in BETAS},
        'leaner, beta 0.5': plain(shard, 0.5, lean=True),
        **{f'ours, beta {beta:g}': ours(shard, beta) for beta in BETAS},
        'ours, eager, beta 0.5': ours(shard, 0.5, 'eager'),
        'ours, eager, beta 0': ours(shard, 0.0, 'eager'),
        'ours, teacher a LinearHead, beta 0.5': ours(shard, 0.5, teacher=head),
    }


def show(results: dict[str, Result], gradient_bytes: int) -> dict[str, Any]:
    show_first_calls(results)
    rows, figures = [], {}
    for name, result in results.items():
        theirs = results[f'plain, beta {name.rsplit(" ", 1)[1]}']
        time, cpu, memory = result.ms / theirs.ms, result.cpu_ms / theirs.cpu_ms, result.memory / gradient_bytes
        spread = f'{min(result.seconds) * 1e3:.0f}-{max(result.seconds) * 1e3:.0f}'
        cells = [f'{result.ms:.0f}', spread, f'{time:.3f}x', f'{result.cpu_ms:.0f}', f'{cpu:.3f}x']
        verdict = verdict_on(time, memory, TARGET) if name == JUDGED else ''
        rows.append([name, *cells, f'{result.memory / MIB:.0f}', f'{memory:.2f}x', verdict])
        figures[name] = {
            'seconds': result.seconds,
            'ms': result.ms,
            'cpu_ms': result.cpu_ms,
            'time_ratio': time,
            'cpu_time_ratio': cpu,
            'memory_ratio': memory,
        }
    heads = ['method', 'ms', 'min-max', 'beside', 'cpu ms', 'beside', 'extra MiB', 'beside gradient', 'target']
    table('Beside the plain form of the same beta', heads, rows)
    return figures


def rank_main(args: argparse.Namespace, device: torch.device, group: dist.ProcessGroup) -> dict[str, Any]:
    case = f'{args.tokens:,} tokens, vocabulary {args.vocab:,}, {args.dtype}, forward and backward'
    record: dict[str, Any] = {'about': header(args, device, case, WARM_UP)}
    shard = VocabShard.from_group(args.vocab // args.tp, group)
    bench = Bench(args.tokens, args.hidden, shard, getattr(torch, args.dtype), device)
    results = compare(bench.once, methods(shard, bench.head), args.rounds, WARM_UP)
    if dist.get_rank() == 0:
        record['comparison'] = show(results, bench.gradient_bytes)
    return record


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument('--tokens', type=int, default=512)
    options.add_argument('--hidden', type=int, default=1024, help='width of the hidden states of a linear head')
    options.add_argument('--dtype', default='bfloat16', choices=['bfloat16', 'float16', 'float32'])
    args = options.parse_args()
    if args.vocab % args.tp:
        options.error(f'--vocab must be a multiple of --tp, got {args.vocab} and {args.tp}')
    start(rank_main, args)


if __name__ == '__main__':
    main()
