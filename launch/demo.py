"""What demos of several steps do alike: they train a model first, start programs, and say how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from launch import weights
from launch.datasets.lines import DataError
from launch.datasets.tokens import read_tokenizer

ROOT = Path(__file__).parents[1]


class Failed(Exception):
    """A program that the demo started failed, and has said why."""


def carry_out(steps: Callable[[], None]) -> None:
    """Does the steps of a demo. What goes wrong ends the program with a message and an exit code, not a traceback."""
    since = time.perf_counter()
    try:
        steps()
    except (DataError, OSError) as e:
        sys.exit(f'{e}')
    except Failed:
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    print(f'time           {time.perf_counter() - since:.0f} s')


def say(line: str) -> None:
    """Announces a step."""
    print(f'\n== {line}', flush=True)


class Demo:
    """The steps of a demo, and the files that they hand on, all in one folder."""

    def __init__(self, folder: Path, tp: int, pp: int) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.base = self.folder / 'base.npz'
        self._layout = [f'--tp={tp}', f'--pp={pp}']

    def pretrain(self, texts: Sequence[str] | None, what: str, steps: int, *options: str) -> None:
        """Trains the model that everything starts from, unless it is there from an earlier run. Without texts it is
        trained on the language reference of Python."""
        if self.base.exists():
            return say(f'model     {self.base} is there; delete it to train it anew')
        say(f'model     is trained on {what if texts is None else f"{len(texts):,} {what}"}')
        data = []
        if texts is not None:
            path = self.folder / 'text.jsonl'
            path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
            data = [f'--data={path}']
        pace = [f'--steps={steps}', '--log-every=20', f'--eval-every={steps}']
        return self.local('pretraining', *data, *pace, f'--save-weights={self.base}', *options)

    def tokenizer(self) -> Tokenizer:
        """That of the model."""
        return read_tokenizer(weights.read_about(self.base).tokenizer)

    def local(self, name: str, *options: str) -> None:
        """`launch/local.sh`, with its run in the folder of the demo."""
        where = [f'--runs={self.folder}', f'--name={name}']
        self.run([str(ROOT / 'launch/local.sh'), *self._layout, *where, *options], PYTHON=sys.executable)

    def run(self, command: list[str], **env: str) -> None:
        """A program that finds this package."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
        done = subprocess.run(command, env={**os.environ, 'PYTHONPATH': path, **env}, check=False)
        if done.returncode:
            raise Failed
