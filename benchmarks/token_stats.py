"""Time and memory of the vocabulary-parallel statistics beside Megatron-Core's two cross entropies, in one run.

    python benchmarks/token_stats.py                          # 2 ranks, 1,024 tokens, vocabulary 152,064, bfloat16
    python benchmarks/token_stats.py --rounds 15 --json out.json

Every round runs every method once, so that a busy machine slows all of them alike; medians over the rounds are shown.
On a busy machine the CPU time (`cpu ms`) says more than the time passed.
Memory is the peak above what was there with the logits. Two gloo ranks on CPU; NCCL where there are GPUs enough.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from twinkle_megatron.vocab_parallel import VocabShard, log_probs_and_entropy, token_stats
from twinkle_megatron.vocab_parallel.kernels.memory import empty_gradient
from twinkle_megatron.vocab_parallel.kernels.select import VARIABLE

TARGETS = {'compiled': (0.50, 1.1), 'compiled, reuse_storage': (0.30, 0.1)}
"""Method -> (time beside the faster of Megatron's two, memory beside the gradient) to stay below."""
MAX_ENTROPY = 1.2
Method = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Result:
    """Figures of one method, the slowest and largest rank's."""

    first_call_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    extra_bytes: list[int] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return statistics.median(self.seconds) * 1e3

    @property
    def cpu_ms(self) -> float:
        return statistics.median(self.cpu_seconds) * 1e3

    @property
    def memory(self) -> float:
        return float('nan') if not self.extra_bytes else statistics.median(self.extra_bytes)


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


def megatron_methods(group: dist.ProcessGroup) -> dict[str, Method]:
    """Both of Megatron's; the fused one as its `jit_fuser` compiles it."""
    from megatron.core import parallel_state
    from megatron.core.fusions import fused_cross_entropy as fused
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    if not hasattr(fused.calculate_gradients, '_torchdynamo_orig_callable'):
        raise RuntimeError("Megatron's jit_fuser does not compile here: is cpu.install() in force, or torch too old?")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    return {
        'Megatron': vocab_parallel_cross_entropy,
        'Megatron, fused': lambda logits, target: fused.fused_vocab_parallel_cross_entropy(logits, target, group),
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
        """Forward and backward; appends time and memory, each the maximum over the ranks."""
        logits = self.base.clone().requires_grad_()
        with _peak(self.device) as peak:
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            out = method(logits, self.target)
            out.backward(self.upstream.to(out.dtype))
            if self.device.type == 'cuda':
                torch.cuda.synchronize()
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        measured = torch.tensor([seconds, cpu_seconds, peak.bytes], dtype=torch.float64, device=self.device)
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
        slowest, busiest, largest = measured.tolist()
        result.seconds.append(slowest)
        result.cpu_seconds.append(busiest)
        if peak.known:
            result.extra_bytes.append(int(largest))
        return slowest

    def compare(self, methods: dict[str, Method], rounds: int) -> dict[str, Result]:
        """Two rounds to warm up, the first of which compiles, then `rounds` that count."""
        results: dict[str, Result] = {}
        for name, method in methods.items():
            first = self.once(method, Result())
            self.once(method, Result())
            results[name] = Result(first_call_s=first)
        for _ in range(rounds):
            for name, method in methods.items():
                self.once(method, results[name])
        return results


@dataclass
class _Peak:
    bytes: float = 0
    known: bool = True


@contextlib.contextmanager
def _peak(device: torch.device) -> Iterator[_Peak]:
    """Peak memory inside the block above that at its start; resident memory on Linux, allocated memory on CUDA."""
    peak = _Peak()
    if device.type == 'cuda':
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated() - before
        return
    try:
        Path('/proc/self/clear_refs').write_text('5')  # the peak starts anew
    except OSError:
        peak.known = False
        yield peak
        return
    before = _status('VmRSS')
    yield peak
    peak.bytes = max(0, _status('VmHWM') - before)


def _status(key: str) -> int:
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def table(title: str, heads: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    print(f'\n{title}')
    for row in (heads, ['-' * width for width in widths], *rows):
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        print('  '.join(cells))
    sys.stdout.flush()


def header(args: argparse.Namespace, device: torch.device) -> dict[str, str]:
    """What a reader needs to judge and repeat the figures."""
    names = [line.split(':')[1].strip() for line in _lines('/proc/cpuinfo') if line.startswith('model name')]
    machine = torch.cuda.get_device_name(device) if device.type == 'cuda' else (names or [platform.processor()])[0]
    try:
        megatron = importlib.metadata.version('megatron-core')
    except importlib.metadata.PackageNotFoundError:
        megatron = 'not installed'
    return {
        'machine': f'{machine}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {platform.platform(terse=True)}',
        'versions': f'Python {platform.python_version()}, torch {torch.__version__}, megatron-core {megatron}',
        'layout': f'TP {args.tp} ({"NCCL" if device.type == "cuda" else "gloo"}), {args.threads} thread(s) a rank',
        'case': f'{args.tokens:,} tokens, vocabulary {args.vocab:,}, {args.dtype}, forward and backward',
        'rounds': f'{args.rounds} after 2 to warm up, every method once in each',
        'command': ' '.join(['python', *sys.argv]),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def show_comparison(results: dict[str, Result], gradient_bytes: int) -> dict[str, Any]:
    theirs = [result for name, result in results.items() if name.startswith('Megatron')]
    reference = min((result.ms for result in theirs), default=float('nan'))
    reference_cpu = min((result.cpu_ms for result in theirs), default=float('nan'))
    entropy = results['compiled, entropy'].ms / results['compiled'].ms
    rows, figures = [], {}
    for name, result in results.items():
        ratio, memory = result.ms / reference, result.memory / gradient_bytes
        verdict = ''
        if name in TARGETS and theirs:
            time_limit, memory_limit = TARGETS[name]
            good = ratio <= time_limit and memory <= memory_limit
            verdict = f'{"ok" if good else "MISSED"} (<= {time_limit:.2f}x, {memory_limit:.1f}x)'
        elif name == 'compiled, entropy':
            verdict = f'{"ok" if entropy <= MAX_ENTROPY else "MISSED"} ({entropy:.2f}x without, <= {MAX_ENTROPY}x)'
        beside_cpu = result.cpu_ms / reference_cpu
        spread = f'{min(result.seconds) * 1e3:.0f}-{max(result.seconds) * 1e3:.0f}'
        rows.append(
            [
                name,
                f'{result.ms:.0f}',
                spread,
                _times(ratio),
                f'{result.cpu_ms:.0f}',
                _times(beside_cpu),
                f'{result.memory / 2**20:.0f}',
                f'{memory:.2f}x',
                verdict,
            ]
        )
        figures[name] = {
            **asdict(result),
            'ms': result.ms,
            'time_ratio': ratio,
            'cpu_time_ratio': beside_cpu,
            'memory_ratio': memory,
        }
    heads = ['method', 'ms', 'min-max', 'beside', 'cpu ms', 'beside', 'extra MiB', 'beside gradient', 'target']
    table("Beside the faster of Megatron's two", heads, rows)
    return figures


def _times(ratio: float) -> str:
    return '-' if math.isnan(ratio) else f'{ratio:.2f}x'


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
        empty_gradient(like.shape, like.dtype, like.device).zero_()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def rank_main(rank: int, args: argparse.Namespace, port: int) -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= args.tp
    device = torch.device('cuda', rank) if cuda else torch.device('cpu')
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(rank)
    warnings.filterwarnings('ignore', category=UserWarning, module='megatron')  # what else could be installed
    logging.getLogger('twinkle_megatron').setLevel(logging.ERROR)  # compiles are in the line of first calls
    dist.init_process_group(
        'nccl' if cuda else 'gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=args.tp
    )
    group = dist.group.WORLD
    assert group is not None
    about = header(args, device)
    if rank == 0:
        print('\n'.join(f'{key + ":":10}{value}' for key, value in about.items()), flush=True)
    shard = VocabShard.from_group(args.vocab // args.tp, group)
    methods = {} if args.no_megatron else megatron_methods(group)
    bench = Bench(args.tokens, shard, getattr(torch, args.dtype), device)
    results = bench.compare({**methods, **our_methods(shard)}, args.rounds)
    record: dict[str, Any] = {'about': about}
    if rank == 0:
        print(
            'first call (compiles, or finds it in the cache): '
            + ', '.join(f'{name} {result.first_call_s:.1f} s' for name, result in results.items())
        )
        record['comparison'] = show_comparison(results, bench.gradient_bytes)
    del bench
    if not args.no_scaling:
        record['scaling'] = scaling(args, device, group)
    if rank == 0 and args.json:
        Path(args.json).write_text(json.dumps(record, indent=1))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tp', type=int, default=2, help='tensor parallel ranks')
    parser.add_argument('--tokens', type=int, default=1024)
    parser.add_argument('--vocab', type=int, default=152_064)
    parser.add_argument('--dtype', default='bfloat16', choices=['bfloat16', 'float16', 'float32'])
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--threads', type=int, default=1, help='threads of each rank on CPU')
    parser.add_argument('--no-megatron', action='store_true')
    parser.add_argument('--no-scaling', action='store_true')
    parser.add_argument('--json', metavar='FILE', help='write all figures there')
    args = parser.parse_args()
    if args.vocab % args.tp:
        parser.error(f'--vocab must be a multiple of --tp, got {args.vocab} and {args.tp}')
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    mp.start_processes(rank_main, (args, port), nprocs=args.tp, start_method='spawn')


if __name__ == '__main__':
    main()
