"""Starts demos as a person does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(name, folder, *options):
    """`python -m launch.NAME` in this folder, in an environment of its own."""
    env = {'PATH': os.environ['PATH'], 'HOME': str(folder), 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    env |= {name: value for name, value in os.environ.items() if name.startswith('MPL') or name == 'LD_LIBRARY_PATH'}
    command = [sys.executable, '-m', f'launch.{name}', *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
