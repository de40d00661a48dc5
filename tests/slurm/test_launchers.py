"""Both batch scripts on a real SLURM: who is which rank, where they meet, signals, exit codes, coming back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import NODES, Cluster

HELLO = str(Path(__file__).parent / 'hello.py')
TWO_BY_TWO = ('--nodes=2', '--ntasks-per-node=2')
both = pytest.mark.parametrize('launcher', ['torchrun', 'srun'])


def lines_of(cluster: Cluster, job: str, key: str = 'master') -> list[dict[str, Any]]:
    """The lines of JSON with that key, in the order of the ranks."""
    lines = [json.loads(line) for line in cluster.output_of(job).splitlines() if line.startswith('{')]
    return sorted((line for line in lines if key in line), key=lambda line: line.get('rank', 0))


def finished(cluster: Cluster, job: str, state: str = 'COMPLETED') -> dict[str, str]:
    about = cluster.wait_for(job)
    assert about['JobState'] == state, cluster.output_of(job)
    return about


@both
def test_ranks_follow_the_nodes_and_meet_on_the_first_one(cluster: Cluster, launcher: str) -> None:
    words = ['a b', '$HOME', "it's", '*']  # nothing is expanded on the way
    job = cluster.submit(
        launcher, '--script', HELLO, '--', *words, sbatch=TWO_BY_TWO, MASTER_ADDR='login', MASTER_PORT='1'
    )
    finished(cluster, job)
    ranks = lines_of(cluster, job)
    assert [r['rank'] for r in ranks] == [0, 1, 2, 3]  # case 66: all of them were started, each with its own number
    assert [r['node'] for r in ranks] == [NODES[0]] * 2 + [NODES[1]] * 2
    assert [r['local'] for r in ranks] == [0, 1, 0, 1]
    assert {(r['world'], r['local_world'], r['total']) for r in ranks} == {(4, 2, 6)}
    assert {(r['master'], r['port']) for r in ranks} == {(NODES[0], ranks[0]['port'])}  # case 63: where rank 0 is
    assert 10240 <= ranks[0]['port'] < 32768
    assert all(r['others'] == words for r in ranks)


@both
def test_nodes_may_have_different_numbers_of_ranks(cluster: Cluster, launcher: str) -> None:
    job = cluster.submit(launcher, '--script', HELLO, sbatch=('--nodes=2', '--ntasks=3'))
    finished(cluster, job)
    ranks = lines_of(cluster, job)
    assert [(r['node'], r['local'], r['local_world']) for r in ranks] == [
        (NODES[0], 0, 2), (NODES[0], 1, 2), (NODES[1], 0, 1)
    ]  # fmt: skip
    assert {(r['world'], r['total']) for r in ranks} == {(3, 3)}


def test_jobs_side_by_side_and_the_parts_of_an_array_have_ports_of_their_own(cluster: Cluster) -> None:
    jobs = [cluster.submit('srun', '--script', HELLO, sbatch=('--nodes=2',)) for _ in range(2)]  # case 69
    array = cluster.submit('srun', '--script', HELLO, sbatch=('--nodes=2', '--array=0-1'))
    for job in jobs:
        finished(cluster, job)
    cluster.wait_for_output(array, '"master"', 2)
    last = str(int(array) + 1)
    cluster.wait_for_output(last, '"master"', 2)
    ports = [{line['port'] for line in lines_of(cluster, job)} for job in (*jobs, array, last)]
    assert [len(p) for p in ports] == [1, 1, 1, 1]
    assert len(set().union(*ports)) == 4


def test_everything_is_of_the_step_and_not_of_the_job(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / 'steps.sh'
    task = Path(__file__).parents[2] / 'launch/slurm/task.sh'
    of_one_job = f'--exact --distribution=block {task} rank {HELLO} --no-torch'
    script.write_text(f"""#!/bin/bash
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 {of_one_job} two &
srun --nodes=1 --ntasks=2 --nodelist={NODES[1]} {of_one_job} second_node &
wait
""")  # case 67
    job = cluster.submit(script, sbatch=('--nodes=2', '--ntasks-per-node=4'))
    finished(cluster, job)
    ranks = lines_of(cluster, job)
    two = [r for r in ranks if r['others'] == ['two']]
    second = [r for r in ranks if r['others'] == ['second_node']]
    assert [(r['rank'], r['world'], r['node'], r['local_world'], r['master']) for r in two] == [
        (0, 2, NODES[0], 1, NODES[0]), (1, 2, NODES[1], 1, NODES[0])
    ]  # fmt: skip
    assert [(r['rank'], r['world'], r['local'], r['master']) for r in second] == [
        (0, 2, 0, NODES[1]), (1, 2, 1, NODES[1])
    ]  # fmt: skip
    assert two[0]['port'] == two[1]['port'] != second[0]['port'] == second[1]['port']


def test_a_step_whose_ranks_do_not_follow_the_nodes_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / 'cyclic.sh'
    task = Path(__file__).parents[2] / 'launch/slurm/task.sh'
    script.write_text(f'#!/bin/bash\nsrun --distribution=cyclic {task} rank {HELLO} --no-torch\n')
    job = cluster.submit(script, sbatch=TWO_BY_TWO)
    finished(cluster, job, 'FAILED')
    assert 'give srun --distribution=block' in cluster.output_of(job)


def test_srun_from_elsewhere_meets_on_a_node_of_the_step(cluster: Cluster) -> None:
    task = Path(__file__).parents[2] / 'launch/slurm/task.sh'
    out = cluster.run('srun', '--nodes=2', '--ntasks=2', str(task), 'rank', HELLO, '--no-torch')  # case 64
    assert {json.loads(line)['master'] for line in out.splitlines()} == {NODES[0]}


@both
def test_ranks_told_to_end_save_and_the_job_comes_back_once(cluster: Cluster, launcher: str) -> None:
    job = cluster.submit(launcher, '--script', HELLO, '--', '--no-torch', '--wait', '--code-once=85', sbatch=TWO_BY_TWO)
    cluster.wait_for_output(job, '"waits"', 4)
    cluster.signal(job, 'USR1')
    about = finished(cluster, job)
    assert about['Restarts'] == '1'
    told = lines_of(cluster, job, 'signal')
    assert sorted(line['of'] for line in told) == [0, 1, 2, 3]
    assert {line['signal'] for line in told} == {'SIGUSR1'}
    assert [r['restarts'] for r in lines_of(cluster, job)].count(1) == 4  # case 71: behind the output of the first time


def test_the_signal_before_the_time_limit_reaches_every_rank(cluster: Cluster) -> None:
    options = ('--time=1', '--signal=B:USR1@50', *TWO_BY_TWO)
    job = cluster.submit('srun', '--script', HELLO, '--', '--no-torch', '--wait', '--code=0', sbatch=options)
    finished(cluster, job)
    assert sorted(line['of'] for line in lines_of(cluster, job, 'signal')) == [0, 1, 2, 3]


def test_a_cancelled_job_does_not_come_back(cluster: Cluster) -> None:
    job = cluster.submit('srun', '--script', HELLO, '--', '--no-torch', '--wait', '--code=85', sbatch=TWO_BY_TWO)
    cluster.wait_for_output(job, '"waits"', 4)
    cluster.run('scancel', job)
    about = finished(cluster, job, 'CANCELLED')
    assert about['Restarts'] == '0'


def test_the_code_of_the_rank_that_failed_first_is_that_of_the_job(cluster: Cluster) -> None:
    hello = ('--script', HELLO, '--', '--no-torch', '--code=3', '--only-rank=2')
    job = cluster.submit('srun', '--grace=1', *hello, sbatch=TWO_BY_TWO)
    about = finished(cluster, job, 'FAILED')
    assert (about['ExitCode'], about['Restarts']) == ('3:0', '0')


def test_under_torchrun_a_failing_rank_ends_the_job(cluster: Cluster) -> None:
    job = cluster.submit('torchrun', '--grace=1', '--script', HELLO, '--', '--code=3', sbatch=TWO_BY_TWO)
    about = finished(cluster, job, 'FAILED')
    assert about['Restarts'] == '0'
    assert 'with exit code 3' in cluster.output_of(job)


@both
def test_training_runs_over_two_nodes(cluster: Cluster, launcher: str, tmp_path: Path) -> None:
    sizes = ('--layers=2', '--hidden-size=32', '--heads=2', '--vocab-size=400', '--seq-length=32')
    options = ('--tp=2', '--pp=2', '--steps=2', f'--runs={tmp_path}', '--name=run', *sizes)
    job = cluster.submit(launcher, '--', *options, sbatch=TWO_BY_TWO)
    finished(cluster, job)
    assert (tmp_path / 'run/ends.log').read_text().count('finished') == 1
    assert 'all-reduce' in cluster.output_of(job), 'the doctor was here'


def test_ranks_that_do_not_fill_the_layout_are_refused_before_they_start(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit('srun', '--', '--tp=2', f'--runs={tmp_path}', sbatch=TWO_BY_TWO)
    finished(cluster, job, 'FAILED')
    assert 'need 2 ranks, and the job has 4' in cluster.output_of(job)
