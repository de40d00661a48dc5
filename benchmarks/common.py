"""What the benchmarks share: starting ranks, measuring a step, Megatron-Core's cross entropies, tables.

Every round runs every method once, so that a busy machine slows all of them alike; medians over the rounds are shown.
Two gloo ranks on CPU; NCCL where there are GPUs enough.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
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

CrossEntropy = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[], object]


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


def measure(step: Step, device: torch.device, result: Result) -> float:
    """Runs `step` in step with the other ranks; appends time and memory, each the maximum over the ranks."""
    with _peak(device) as peak:
        dist.barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        step()
        if device.type == 'cuda':
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    measured = torch.tensor([seconds, cpu_seconds, peak.bytes], dtype=torch.float64, device=device)
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    slowest, busiest, largest = measured.tolist()
    result.seconds.append(slowest)
    result.cpu_seconds.append(busiest)
    if peak.known:
        result.extra_bytes.append(int(largest))
    return slowest


def compare(
    once: Callable[[Any, Result], float], methods: dict[str, Any], rounds: int, warm_up: int
) -> dict[str, Result]:
    """The `Result` of each method from `rounds` rounds, after some to warm up, the first of which compiles.

    `once(method, result)` measures one step.
    """
    results: dict[str, Result] = {}
    for name, method in methods.items():
        calls = [once(method, Result()) for _ in range(warm_up)]
        results[name] = Result(first_call_s=calls[0])
    for _ in range(rounds):
        for name, method in methods.items():
            once(method, results[name])
    return results


@dataclass
class _Peak:
    bytes: float = 0
    known: bool = True


@contextlib.contextmanager
def _peak(device: torch.device) -> Iterator[_Peak]:
    """Peak memory inside the block above that at its start; resident memory on Linux, allocated memory on CUDA."""
    peak = _Peak()
    gc.collect()
    if device.type == 'cuda':
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated() - before
        return
    _give_free_memory_back()
    try:
        Path('/proc/self/clear_refs').write_text('5')  # the peak starts anew
    except OSError:
        peak.known = False
        yield peak
        return
    before = _status('VmRSS')
    yield peak
    peak.bytes = max(0, _status('VmHWM') - before)


def _give_free_memory_back() -> None:
    """Else what a method takes from memory that an earlier one has left in the heap would not show in its peak."""
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)  # of glibc
    if trim is not None:
        trim(0)


def _status(key: str) -> int:
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def megatron_cross_entropies(group: dist.ProcessGroup) -> dict[str, CrossEntropy]:
    """Both of Megatron's, of shards of logits and ids; the fused one as its `jit_fuser` compiles it."""
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


def header(args: argparse.Namespace, device: torch.device, case: str, warm_up: int) -> dict[str, str]:
    """What a reader needs to judge and repeat the figures; printed, too."""
    names = [line.split(':')[1].strip() for line in _lines('/proc/cpuinfo') if line.startswith('model name')]
    machine = torch.cuda.get_device_name(device) if device.type == 'cuda' else (names or [platform.processor()])[0]
    try:
        megatron = importlib.metadata.version('megatron-core')
    except importlib.metadata.PackageNotFoundError:
        megatron = 'not installed'
    about = {
        'machine': f'{machine}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {platform.platform(terse=True)}',
        'versions': f'Python {platform.python_version()}, torch {torch.__version__}, megatron-core {megatron}',
        'layout': f'TP {args.tp} ({"NCCL" if device.type == "cuda" else "gloo"}), {args.threads} thread(s) a rank',
        'case': case,
        'rounds': f'{args.rounds} after {warm_up} to warm up, every method once in each',
        'command': ' '.join(['python', *sys.argv]),
    }
    if dist.get_rank() == 0:
        print('\n'.join(f'{key + ":":10}{value}' for key, value in about.items()), flush=True)
    return about


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def table(title: str, heads: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    print(f'\n{title}')
    for row in (heads, ['-' * width for width in widths], *rows):
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        print('  '.join(cells))
    sys.stdout.flush()


def show_first_calls(results: dict[str, Result]) -> None:
    calls = ', '.join(f'{name} {result.first_call_s:.1f} s' for name, result in results.items())
    print(f'first call (compiles, or finds it in the cache): {calls}')


def of_megatron(results: dict[str, Result]) -> list[Result]:
    return [result for name, result in results.items() if name.startswith('Megatron')]


def show_comparison(
    title: str, results: dict[str, Result], memory: tuple[str, float], verdict: Callable[[str, float, float], str]
) -> dict[str, Any]:
    """Prints a row for each method, and returns its figures.

    Args:
        memory: what memory is compared with, and its bytes.
        verdict: the last cell of a row, from name, time beside the faster of Megatron's, and memory beside that.
    """
    theirs = of_megatron(results)
    reference = min((result.ms for result in theirs), default=float('nan'))
    reference_cpu = min((result.cpu_ms for result in theirs), default=float('nan'))
    rows, figures = [], {}
    for name, result in results.items():
        ratio, beside_cpu, beside = result.ms / reference, result.cpu_ms / reference_cpu, result.memory / memory[1]
        row = [name, f'{result.ms:.0f}', f'{min(result.seconds) * 1e3:.0f}-{max(result.seconds) * 1e3:.0f}']
        row += [_times(ratio), f'{result.cpu_ms:.0f}', _times(beside_cpu)]
        rows.append([*row, f'{result.memory / 2**20:.0f}', _times(beside), verdict(name, ratio, beside)])
        figures[name] = {
            **asdict(result),
            'ms': result.ms,
            'time_ratio': ratio,
            'cpu_time_ratio': beside_cpu,
            'memory_ratio': beside,
        }
    heads = ['method', 'ms', 'min-max', 'beside', 'cpu ms', 'beside', 'extra MiB', f'beside {memory[0]}', 'target']
    table(title, heads, rows)
    return figures


def _times(ratio: float) -> str:
    return '-' if math.isnan(ratio) else f'{ratio:.2f}x'


def verdict_on(time_ratio: float, memory_ratio: float, limits: tuple[float, float]) -> str:
    """Whether both are within their limits."""
    good = time_ratio <= limits[0] and memory_ratio <= limits[1]
    return f'{"ok" if good else "MISSED"} (<= {limits[0]:.2f}x, {limits[1]:.1f}x)'


def parser(about: str | None, rounds: int) -> argparse.ArgumentParser:
    """What every benchmark can be told."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tp', type=int, default=2, help='tensor parallel ranks')
    parser.add_argument('--vocab', type=int, default=152_064)
    parser.add_argument('--rounds', type=int, default=rounds)
    parser.add_argument('--threads', type=int, default=1, help='threads of each rank on CPU')
    parser.add_argument('--no-megatron', action='store_true')
    parser.add_argument('--no-scaling', action='store_true')
    parser.add_argument('--json', metavar='FILE', help='write all figures there')
    return parser


def start(rank_main: Callable[[argparse.Namespace, torch.device, dist.ProcessGroup], Any], args: Any) -> None:
    """Runs `rank_main` on every rank, and writes what it returns on rank 0 to the file of `--json`."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    mp.start_processes(_rank, (rank_main, args, port), nprocs=args.tp, start_method='spawn')


def _rank(rank: int, rank_main: Callable[..., Any], args: argparse.Namespace, port: int) -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= args.tp
    device = torch.device('cuda', rank) if cuda else torch.device('cpu')
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(rank)
    warnings.filterwarnings('ignore', category=UserWarning, module='megatron')  # what else could be installed
    warnings.filterwarnings('ignore', category=FutureWarning, module='torch')  # names of collectives in torch 2.13
    logging.getLogger('twinkle_megatron').setLevel(logging.ERROR)  # compiles are in the line of first calls
    backend, address = 'nccl' if cuda else 'gloo', f'tcp://127.0.0.1:{port}'
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=args.tp)
    group = dist.group.WORLD
    assert group is not None
    record = rank_main(args, device, group)
    if rank == 0 and args.json:
        Path(args.json).write_text(json.dumps(record, indent=1))
    dist.destroy_process_group()
    from twinkle_megatron.survive import leave  # found by the path above

    leave()
