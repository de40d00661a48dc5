"""Samples completions of prompts from files of weights, for rollouts; started by `launch.processes` on tp * pp ranks.

usage: python -m launch.processes [torchrun's options] -m launch.sample [--tp N] [--pp N] JOBS

JOBS is a JSON file with a list of jobs, done one after the other. Each has `weights`, `prompts` (JSON lines with
`{"prompt": [token ids]}`), `num_generations`, `temperature`, `max_tokens` (of a completion, at most), `stop` (token ids
that end one), `seed` and `out`, a file of rollouts as docs/rollouts.md tells, which lack their rewards only.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launch import gpt, options, weights
from launch.parallel import start_processes, stop_processes
from launch.sampling import Completion, sample_completions
from launch.whole_file import whole_file
from twinkle_megatron import MegatronModel

MICRO_BATCH = 128


def main() -> None:
    parser = argparse.ArgumentParser(prog='launch.sample', allow_abbrev=False)
    parser.add_argument('--tp', type=int, default=1)
    parser.add_argument('--pp', type=int, default=1)
    parser.add_argument('jobs', type=Path)
    given = parser.parse_args()
    jobs = json.loads(given.jobs.read_text())
    about = weights.read_about(Path(jobs[0]['weights']))
    args = options.parse([f'--init-weights={jobs[0]["weights"]}', f'--tp={given.tp}', f'--pp={given.pp}', '--steps=1'])
    start_processes(args)
    chunk = gpt.build(args, about.vocab_size)[0]
    model = MegatronModel(chunk, vocab_size=about.vocab_size, head='logits')
    for job in jobs:
        gpt.load_weights(chunk.module, weights.read(Path(job['weights'])))
        run(job, model)
    stop_processes()


def run(job: dict[str, Any], model: MegatronModel) -> None:
    """One job; the first rank writes and says what came out."""
    prompts = [json.loads(line)['prompt'] for line in Path(job['prompts']).read_text().splitlines()]
    n, since = job['num_generations'], time.perf_counter()
    completions = sample_completions(
        model,
        [prompt for prompt in prompts for _ in range(n)],
        temperature=job['temperature'],
        seed=job['seed'],
        stop=frozenset(job['stop']),
        max_tokens=job['max_tokens'],
        micro_batch_size=MICRO_BATCH,
        said=_every(5.0),
    )
    if dist.get_rank() == 0:
        write(Path(job['out']), prompts, completions, job['temperature'], n)
        tokens = sum(len(completion.tokens) for completion in completions)
        took = time.perf_counter() - since
        print(
            f'sampled   {len(completions):,} completions, {tokens:,} tokens, in {took:.1f} s: {job["out"]}', flush=True
        )


def write(path: Path, prompts: list[list[int]], completions: list[Completion], temperature: float, n: int) -> None:
    """The rollouts of these prompts, `n` each, without rewards. All of the file or nothing."""
    with whole_file(path) as file:
        file.write(json.dumps({'temperature': temperature, 'num_generations': n}) + '\n')
        for i, completion in enumerate(completions):
            found = {'prompt': prompts[i // n], 'completion': completion.tokens, 'old_logps': completion.log_probs}
            file.write(json.dumps(found | {'group': i // n}) + '\n')


def _every(seconds: float) -> Callable[[str], None]:
    """Prints what it is told on the first rank, but no more often than that."""
    last = time.perf_counter()

    def say(text: str) -> None:
        nonlocal last
        if dist.get_rank() == 0 and time.perf_counter() - last >= seconds:
            last = time.perf_counter()
            print(f'sampling  {text}', flush=True)

    return say


if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends every process without a traceback
    main()
