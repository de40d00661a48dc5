"""`make demo-grpo`: a small model samples, a rule scores, and GRPO trains on what was sampled, for three seeds.

1. A GPT is trained on lines of Python's standard library, unless its weights are there from an earlier run.
2. It samples completions of beginnings of other lines. The reward of one is 1 if both together parse as Python.
3. `launch/local.sh --loss grpo` trains on the file of these rollouts, several times over: after the first steps the
   policy is no longer the one that sampled, which `old_logps` make right. One file and several epochs, because a round
   of sampling costs more starts of processes than it gains here.
4. Before and after, completions of beginnings that gave no rollouts are sampled and scored.

Each seed samples its own rollouts and trains on them in its own order.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from launch import demo_report, task, weights
from launch.data import read_tokenizer
from launch.lines import DataError
from launch.options import POLICY_LOSSES
from launch.prepare import device_for

ROOT = Path(__file__).parents[1]
TEMPERATURE = 1.0


class Failed(Exception):
    """A program that the demo started failed, and has said why."""


def main() -> None:
    args = _parser().parse_args()
    since = time.perf_counter()
    try:
        demo = Demo(args)
        demo.pretrain()
        demo.sample_before()
        demo.train()
        demo.sample_after()
    except (DataError, OSError) as e:
        sys.exit(f'{e}')
    except Failed:
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    demo_report.report(demo.folder, args.seeds, demo.examples())
    print(f'time           {time.perf_counter() - since:.0f} s')


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='launch.demo_grpo', description='Trains a small model by GRPO and shows what it has learnt.'
    )
    for name, default, what in (
        ('tp', 2, 'tensor parallel size of the trainings'),
        ('pp', 2, 'pipeline parallel size of the trainings'),
        ('lines', 6000, 'lines of code that the model is trained on first'),
        ('pretrain-steps', 120, 'optimizer steps of that training'),
        ('prompts', 384, 'prompts of rollouts'),
        ('held-out', 256, 'prompts of the completions that are scored before and after'),
        ('generations', 8, 'rollouts of a prompt'),
        ('epochs', 2, 'times to go over the rollouts'),
        ('log-every', 8, 'steps between two lines of figures'),
    ):
        parser.add_argument(f'--{name}', type=int, default=default, metavar='N', help=f'{what} ({default})')
    parser.add_argument('--loss', choices=POLICY_LOSSES, default='grpo', help='loss of the rollouts (grpo)')
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3], metavar='N', help='(1 2 3)')
    parser.add_argument('--folder', type=Path, default=Path('runs/demo-grpo'), help='for all files (runs/demo-grpo)')
    return parser


class Demo:
    """The steps of the demo, and the files that they hand on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, args.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.base = self.folder / 'base.npz'
        self._layout = [f'--tp={args.tp}', f'--pp={args.pp}']
        lines = task.code_lines(args.lines + 3 * (args.prompts + args.held_out) // 2)  # not every line gives a prompt
        self._text, self._beginnings = lines[: args.lines], lines[args.lines :]

    def pretrain(self) -> None:
        """Trains the model that everything starts from."""
        if self.base.exists():
            return _say(f'model     {self.base} is there; delete it to train it anew')
        _say(f'model     is trained on {len(self._text):,} lines of the standard library')
        path = self.folder / 'lines.jsonl'
        path.write_text(''.join(json.dumps({'text': line}) + '\n' for line in self._text))
        sizes = ['--vocab-size=1000', '--seq-length=32', '--micro-batch-size=32']
        steps = [f'--steps={self.args.pretrain_steps}', '--log-every=20', f'--eval-every={self.args.pretrain_steps}']
        return self._local('pretraining', f'--data={path}', *sizes, *steps, f'--save-weights={self.base}')

    def sample_before(self) -> None:
        """Completions of the model as it is: held-out ones, and those to train on, which are scored too."""
        n, held_out = self.args.prompts, self.args.held_out
        prompts = task.prompts_of(self._beginnings, self._tokenizer(), n + held_out)
        _say(f'rollouts  are sampled for {n} prompts, completions for {held_out} held-out ones, with each seed')
        self._write_prompts('prompts.jsonl', prompts[:n])
        self._write_prompts('held-out.jsonl', prompts[n : n + held_out])
        self._sample(
            [self._job(self.base, 'prompts', s, self.args.generations, f'rollouts-{s}') for s in self.args.seeds]
            + [self._job(self.base, 'held-out', s, 4, f'before-{s}') for s in self.args.seeds]
        )

    def train(self) -> None:
        """Trains on the rollouts of each seed."""
        for seed in self.args.seeds:
            _say(f'{self.args.loss:9} trains on the rollouts of seed {seed}')
            batch = ['--seq-length=48', '--micro-batch-size=32', '--micro-batches=4', '--packed']
            pace = [f'--epochs={self.args.epochs}', '--lr=1e-3', '--clip-range=0.4']  # one file has to lead far
            self._local(
                f'seed-{seed}',
                f'--loss={self.args.loss}',
                f'--data={self.folder / f"rollouts-{seed}.jsonl"}',
                f'--init-weights={self.base}',
                f'--save-weights={self.folder / f"seed-{seed}.npz"}',
                f'--seed={seed}',
                f'--log-every={self.args.log_every}',
                *batch,
                *pace,
            )

    def sample_after(self) -> None:
        """Completions of the trained models."""
        _say('held out  completions are sampled again')
        seeds = self.args.seeds
        self._sample([self._job(self.folder / f'seed-{s}.npz', 'held-out', s, 4, f'after-{s}') for s in seeds])

    def examples(self) -> list[tuple[str, str, str]]:
        """Some held-out prompts with what the first seed made of them before and after, as text."""
        tokenizer, found = self._tokenizer(), []
        before, after = (_rollouts(self.folder / f'{when}-{self.args.seeds[0]}.jsonl') for when in ('before', 'after'))
        for one, other in list(zip(before, after))[: 4 * 6 : 4]:
            ids = one['prompt'][1:], one['completion'], other['completion']
            found.append(tuple(tokenizer.decode(part) for part in ids))
        return found

    def _tokenizer(self) -> Tokenizer:
        return read_tokenizer(weights.read_about(self.base).tokenizer)

    def _write_prompts(self, name: str, prompts: Sequence[list[int]]) -> None:
        (self.folder / name).write_text(''.join(json.dumps({'prompt': prompt}) + '\n' for prompt in prompts))

    def _job(self, model: Path, prompts: str, seed: int, n: int, out: str) -> dict[str, Any]:
        return {
            'weights': str(model),
            'prompts': str(self.folder / f'{prompts}.jsonl'),
            'num_generations': n,
            'temperature': TEMPERATURE,
            'max_tokens': task.MAX_TOKENS,
            'stop': task.STOP,
            'seed': seed,
            'out': str(self.folder / f'{out}.jsonl'),
        }

    def _sample(self, jobs: list[dict[str, Any]]) -> None:
        """Does the jobs in two processes, each with half of the prompts, and adds the rewards to what they wrote."""
        path = self.folder / 'sampling.json'
        path.write_text(json.dumps(jobs, indent=1))
        torchrun = [sys.executable, '-m', 'launch.processes', '--standalone', '--nproc-per-node', '2']
        cpu = {} if device_for(self.args.tp * self.args.pp) == 'cuda' else {'CUDA_VISIBLE_DEVICES': ''}
        self._run([*torchrun, '-m', 'launch.sample', str(path)], OMP_NUM_THREADS='1', **cpu)
        tokenizer = self._tokenizer()
        for job in jobs:
            out = Path(job['out'])
            header, *lines = out.read_text().splitlines()
            for i, line in enumerate(lines):
                rollout = json.loads(line)
                rollout['reward'] = task.score(rollout['prompt'], rollout['completion'], tokenizer)
                lines[i] = json.dumps(rollout)
            out.write_text('\n'.join([header, *lines]) + '\n')

    def _local(self, name: str, *options: str) -> None:
        """`launch/local.sh`, with its run in the folder of the demo."""
        where = [f'--runs={self.folder}', f'--name={name}']
        self._run([str(ROOT / 'launch/local.sh'), *self._layout, *where, *options], PYTHON=sys.executable)

    def _run(self, command: list[str], **env: str) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
        done = subprocess.run(command, env={**os.environ, 'PYTHONPATH': path, **env}, check=False)
        if done.returncode:
            raise Failed


def _rollouts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def _say(line: str) -> None:
    print(f'\n== {line}', flush=True)


if __name__ == '__main__':
    main()
