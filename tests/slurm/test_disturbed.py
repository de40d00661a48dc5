"""A training over two nodes that is disturbed ends with the weights and the figures of one that is not."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from cluster import NODES, Cluster
from test_launchers import HELLO, TWO_BY_TWO, finished

STEPS = 120
SIZES = ('--layers=2', '--hidden-size=32', '--heads=2', '--vocab-size=400', '--seq-length=32')
TRAINING = ('--tp=2', '--pp=2', f'--steps={STEPS}', '--log-every=5', '--eval-every=60', '--save-every=20', *SIZES)


def train(cluster: Cluster, folder: Path, name: str, *more: str, launcher: str = 'srun') -> str:
    options = (*TRAINING, f'--runs={folder}', f'--name={name}', f'--save-weights={folder}/{name}.npz', *more)
    return cluster.submit(launcher, '--', *options, sbatch=TWO_BY_TWO)


def in_the_middle(cluster: Cluster, job: str) -> None:
    """Waits until the training is under way, behind its first checkpoint."""
    cluster.wait_for_output(job, 'step  25 ', seconds=90)


def figures(folder: Path, name: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / name / 'metrics.jsonl').read_text().splitlines()]
    return [{key: x for key, x in line.items() if key not in ('tokens_per_second', 'seconds')} for line in lines]


@pytest.fixture(scope='session')
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('undisturbed')
    job = train(cluster, folder, 'run')
    about = cluster.wait_for(job, seconds=120)
    assert about['JobState'] == 'COMPLETED', cluster.output_of(job)
    return folder


def assert_same(cluster: Cluster, job: str, folder: Path, undisturbed: Path, *, restarts: int = 1) -> None:
    about = cluster.wait_for(job, seconds=180)
    printed = cluster.output_of(job)
    assert about['JobState'] == 'COMPLETED', printed
    assert int(about['Restarts']) == restarts, printed
    assert 'goes on after step' in printed
    with np.load(folder / 'run.npz') as mine, np.load(undisturbed / 'run.npz') as theirs:
        assert mine.files == theirs.files
        for name in mine.files:
            np.testing.assert_array_equal(mine[name], theirs[name])
    assert figures(folder, 'run') == figures(undisturbed, 'run')


@pytest.mark.parametrize('launcher', ['srun', 'torchrun'])
def test_the_signal_before_the_time_limit_ends_it_after_a_step_and_it_comes_back(
    cluster: Cluster, undisturbed: Path, tmp_path: Path, launcher: str
) -> None:
    job = train(cluster, tmp_path, 'run', launcher=launcher)
    in_the_middle(cluster, job)
    cluster.signal(job, 'USR1')
    assert_same(cluster, job, tmp_path, undisturbed)
    assert 'stopped after step' in cluster.output_of(job)


def test_scontrol_requeue(cluster: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    job = train(cluster, tmp_path, 'run')
    in_the_middle(cluster, job)
    cluster.scontrol('requeue', job)
    assert_same(cluster, job, tmp_path, undisturbed)


def test_preemption_by_a_higher_partition(cluster: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    job = train(cluster, tmp_path, 'run')
    in_the_middle(cluster, job)
    other = cluster.submit('srun', '--script', HELLO, sbatch=('--partition=high', '--exclusive', *TWO_BY_TWO))
    assert_same(cluster, job, tmp_path, undisturbed)
    finished(cluster, other)


def test_a_node_that_fails(cluster: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    job = train(cluster, tmp_path, 'run')
    in_the_middle(cluster, job)
    cluster.scontrol('update', f'nodename={NODES[1]}', 'state=down', 'reason=test')
    try:
        cluster.wait_for(job, 'PENDING', 'CONFIGURING', seconds=60)
    finally:
        # an error where it has come back by itself
        cluster.run('scontrol', 'update', f'nodename={NODES[1]}', 'state=resume', check=False)
    assert_same(cluster, job, tmp_path, undisturbed)


def ranks_of(folder: Path) -> list[int]:
    """Processes of the ranks of the training whose runs lie there."""
    found = []
    for entry in Path('/proc').glob('[0-9]*'):
        try:
            words = (entry / 'cmdline').read_bytes().decode(errors='replace').split('\0')
            is_rank = b'RANK=' in (entry / 'environ').read_bytes()
        except OSError:
            continue
        if is_rank and 'launch.train' in words and f'--runs={folder}' in words and 'launch.processes' not in words:
            found.append(int(entry.name))
    return found


def test_a_rank_that_is_killed_ends_the_job_and_the_next_one_goes_on(
    cluster: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    job = train(cluster, tmp_path, 'run', '--seed=1234')
    in_the_middle(cluster, job)
    os.kill(ranks_of(tmp_path)[-1], signal.SIGKILL)
    about = cluster.wait_for(job, seconds=90)
    assert about['JobState'] == 'FAILED', cluster.output_of(job)
    job = train(cluster, tmp_path, 'run', '--resume=auto')
    assert_same(cluster, job, tmp_path, undisturbed, restarts=0)
