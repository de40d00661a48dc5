"""One SLURM for all tests of this folder; without sbatch they are skipped, and say why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, why_not


@pytest.fixture(scope='session')
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f'no SLURM: {reason}')
    with Cluster(tmp_path_factory.mktemp('slurm')) as started:
        started.environment['PYTHON'] = sys.executable
        yield started
