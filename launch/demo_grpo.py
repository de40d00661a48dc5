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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import demo, demo_report, task
from launch.kinds import ROLLOUTS
from launch.prepare import device_for

TEMPERATURE = 1.0


def main() -> None:
    args = _parser().parse_args()
    demo.carry_out(lambda: steps(args))


def steps(args: argparse.Namespace) -> None:
    """The whole demo."""
    this = GRPODemo(args)
    this.learn_language()
    this.sample_before()
    this.train()
    this.sample_after()
    demo_report.report(this.folder, args.seeds, this.examples())


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
    parser.add_argument('--loss', choices=ROLLOUTS.losses, default='grpo', help='loss of the rollouts (grpo)')
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3], metavar='N', help='(1 2 3)')
    parser.add_argument('--folder', type=Path, default=Path('runs/demo-grpo'), help='for all files (runs/demo-grpo)')
    return parser


class GRPODemo(demo.Demo):
    """The steps of this demo."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.folder, args.tp, args.pp)
        self.args = args
        lines = task.code_lines(args.lines + 3 * (args.prompts + args.held_out) // 2)  # not every line gives a prompt
        self._text, self._beginnings = lines[: args.lines], lines[args.lines :]

    def learn_language(self) -> None:
        """Trains the model that everything starts from."""
        sizes = ['--vocab-size=1000', '--seq-length=32', '--micro-batch-size=32']
        self.pretrain(self._text, 'lines of the standard library', self.args.pretrain_steps, *sizes)

    def sample_before(self) -> None:
        """Completions of the model as it is: held-out ones, and those to train on, which are scored too."""
        n, held_out = self.args.prompts, self.args.held_out
        prompts = task.prompts_of(self._beginnings, self.tokenizer(), n + held_out)
        demo.say(f'rollouts  are sampled for {n} prompts, completions for {held_out} held-out ones, with each seed')
        self._write_prompts('prompts.jsonl', prompts[:n])
        self._write_prompts('held-out.jsonl', prompts[n : n + held_out])
        self._sample(
            [self._job(self.base, 'prompts', s, self.args.generations, f'rollouts-{s}') for s in self.args.seeds]
            + [self._job(self.base, 'held-out', s, 4, f'before-{s}') for s in self.args.seeds]
        )

    def train(self) -> None:
        """Trains on the rollouts of each seed."""
        for seed in self.args.seeds:
            demo.say(f'{self.args.loss:9} trains on the rollouts of seed {seed}')
            batch = ['--seq-length=48', '--micro-batch-size=32', '--micro-batches=4', '--packed']
            pace = [f'--epochs={self.args.epochs}', '--lr=1e-3', '--clip-range=0.4']  # one file has to lead far
            self.local(
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
        demo.say('held out  completions are sampled again')
        seeds = self.args.seeds
        self._sample([self._job(self.folder / f'seed-{s}.npz', 'held-out', s, 4, f'after-{s}') for s in seeds])

    def examples(self) -> list[tuple[str, str, str]]:
        """Some held-out prompts with what the first seed made of them before and after, as text."""
        tokenizer, found = self.tokenizer(), []
        before, after = (_rollouts(self.folder / f'{when}-{self.args.seeds[0]}.jsonl') for when in ('before', 'after'))
        for one, other in list(zip(before, after))[: 4 * 6 : 4]:
            ids = one['prompt'][1:], one['completion'], other['completion']
            found.append(tuple(tokenizer.decode(part) for part in ids))
        return found

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
        self.run([*torchrun, '-m', 'launch.sample', str(path)], OMP_NUM_THREADS='1', **cpu)
        tokenizer = self.tokenizer()
        for job in jobs:
            out = Path(job['out'])
            header, *lines = out.read_text().splitlines()
            for i, line in enumerate(lines):
                rollout = json.loads(line)
                rollout['reward'] = task.score(rollout['prompt'], rollout['completion'], tokenizer)
                lines[i] = json.dumps(rollout)
            out.write_text('\n'.join([header, *lines]) + '\n')


def _rollouts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


if __name__ == '__main__':
    main()
