"""launch/env.sh without SLURM: host lists, ports, ranks; and what the batch scripts would run."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BATCH_SCRIPTS = ['train.sbatch', 'train_srun.sbatch']


def bash(command: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`command` behind launch/env.sh, where there is no scontrol."""
    own = {k: v for k, v in os.environ.items() if not k.startswith('SLURM_')}
    script = f'set -euo pipefail; scontrol() {{ return 1; }}; . {REPOSITORY}/launch/env.sh; {command}'
    return subprocess.run(
        ['bash', '-c', script, 'bash', *args], env={**own, **variables}, capture_output=True, text=True, timeout=30
    )


def dry_run(script: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith('SLURM_')}
    command = ['bash', str(REPOSITORY / 'launch/slurm' / script), '--dry-run', *args]
    return subprocess.run(command, env={**own, **variables}, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ('hosts', 'wanted'),
    [
        ('n7', 'n7'),
        ('n[1-4]', 'n1 n2 n3 n4'),
        ('a,b[001,003],c', 'a b001 b003 c'),
        ('n[098-101]', 'n098 n099 n100 n101'),
        ('n[08-10],m[1-2,5]', 'n08 n09 n10 m1 m2 m5'),
        ('r[1-2]n[08-09]-ib,x', 'r1n08-ib r1n09-ib r2n08-ib r2n09-ib x'),
        ('a[1,[3-4],b]', 'a1 a3 a4 ab'),
        ('127.0.0.[11-12]', '127.0.0.11 127.0.0.12'),
        ('gpu-a.cluster.org,gpu-b.cluster.org', 'gpu-a.cluster.org gpu-b.cluster.org'),
    ],
)
def test_a_node_list_is_expanded_in_its_order(hosts: str, wanted: str) -> None:
    assert bash('hosts_of "$1"', hosts).stdout.split() == wanted.split()
    assert bash('master_of "$1"', hosts).stdout.strip() == wanted.split()[0]


def test_a_node_list_with_an_open_bracket_is_refused() -> None:
    done = bash('expand_hosts "$1"', 'n[1-2')
    assert done.returncode == 1
    assert 'must close every bracket' in done.stderr


def test_several_nodes_do_not_meet_on_a_loopback_name() -> None:
    assert bash('master_of localhost').stdout.strip() == 'localhost'
    for name in ('localhost', '127.0.0.1', '::1', 'localhost.localdomain'):
        done = bash('master_of "$1"', f'{name},n1')
        assert done.returncode == 1
        assert 'a name that the others can reach' in done.stderr


def test_counts_of_nodes_are_expanded() -> None:
    assert bash('expand_counts "2(x3),1,4(x2)"').stdout.split() == ['2', '2', '2', '1', '4', '4']


def test_jobs_behind_one_another_have_blocks_of_ports_that_do_not_meet() -> None:
    blocks = [int(b) for b in bash('for ((j = 1000; j < 1200; j++)); do port_block $j; done').stdout.split()]
    assert len(set(blocks)) == 200
    assert all(b % 16 == 0 and 10240 <= b <= 32768 - 16 for b in blocks)
    assert bash('port_block 4294967000').returncode == 0


def test_a_block_with_a_port_in_use_is_left_out() -> None:
    first = int(bash('free_port_block 77').stdout)
    with socket.socket() as used:
        used.bind(('127.0.0.1', first + 5))
        used.listen()
        other = int(bash('free_port_block 77').stdout)
    assert other != first
    assert other % 16 == 0


STEP = {
    'SLURM_JOB_ID': '5',
    'SLURM_STEP_ID': '2',
    'SLURM_STEP_NODELIST': 'n[3-5]',
    'SLURM_STEP_NUM_TASKS': '4',
    'SLURM_STEP_TASKS_PER_NODE': '1,2,1',
    'SLURM_NODEID': '1',
    'SLURM_PROCID': '2',
    'SLURM_LOCALID': '1',
    'SLURM_NTASKS': '8',  # of the job
    'SLURM_TASKS_PER_NODE': '4(x2)',
    'SLURM_JOB_NODELIST': 'n[1-5]',
    'SLURM_LAUNCH_NODE_IPADDR': '10.0.0.1',  # the login node
    'MASTER_ADDR': 'login',
}
TELL = 'echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT'


def test_a_rank_reads_its_numbers_from_the_step() -> None:  # cases 64 and 67
    assert bash(f'set_master; set_ranks; {TELL}', **STEP).stdout.split() == ['2', '1', '4', '2', 'n3', '10322']
    with_block = bash(f'set_master; set_ranks; {TELL}', PORT_BLOCK='20000', **STEP)
    assert with_block.stdout.split()[-1] == '20002'


def test_a_rank_out_of_the_order_of_the_nodes_is_refused() -> None:
    done = bash('set_master; set_ranks', **{**STEP, 'SLURM_PROCID': '3'})
    assert done.returncode == 1
    assert 'srun --distribution=block' in done.stderr


def test_outside_slurm_a_task_says_how_to_start_it() -> None:
    done = subprocess.run(
        ['bash', str(REPOSITORY / 'launch/slurm/task.sh'), 'rank', 'x.py'],
        env={'PATH': os.environ['PATH'], 'PYTHON': 'true'}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode != 0
    assert 'start this with srun' in done.stderr


@pytest.mark.parametrize(
    ('script', 'says'),
    [
        ('launch/slurm/task.sh', 'usage: task.sh agent COUNTS PROGRAM...'),
        ('launch/local.sh', 'PYTHON=/no/python does not run'),
    ],
)
def test_a_script_that_cannot_begin_says_why(script: str, says: str) -> None:
    done = subprocess.run(
        ['bash', str(REPOSITORY / script)],
        env={'PATH': os.environ['PATH'], 'PYTHON': '/no/python'}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count('\n') == 1


@pytest.mark.parametrize('script', BATCH_SCRIPTS)
def test_a_dry_run_shows_the_layout_and_quotes_options(script: str) -> None:
    layout = {'SLURM_JOB_NODELIST': 'n[1-2]', 'SLURM_TASKS_PER_NODE': '2,1', 'SLURM_JOB_ID': '3'}
    done = dry_run(script, '--grace=5', '--', '--data', "it's $HOME.jsonl", **layout)
    assert done.returncode == 0, done.stderr
    nodes, ranks, master, prepare, run = done.stdout.splitlines()
    assert nodes.split() == ['nodes', 'n1', 'n2']
    assert ranks.split() == ['ranks', '3:', '2', '1']
    assert master.split()[1] == 'n1,'
    assert 'launch.prepare' in prepare
    for part in ('--wait=5', 'PORT_BLOCK=10288', r"'it'\''s $HOME.jsonl'", 'launch.train'):
        assert part in run
    assert ('--ntasks=2' if script == 'train.sbatch' else '--ntasks=3') in run.split()


def test_torchrun_starts_a_rank_for_each_gpu_where_one_task_a_node_was_asked_for() -> None:
    layout = {'SLURM_JOB_NODELIST': 'n[1-2]', 'SLURM_TASKS_PER_NODE': '1(x2)', 'SLURM_GPUS_ON_NODE': '8'}
    assert 'ranks     16: 8 8' in dry_run('train.sbatch', **layout).stdout


@pytest.mark.parametrize('script', BATCH_SCRIPTS)
def test_a_container_gets_the_repository_and_the_folder_of_the_job(script: str) -> None:
    done = dry_run(script, '--container-image', 'image+tag', '--container-mounts=/data:/data')
    assert '--container-image=image+tag' in done.stdout
    assert f'--container-mounts={REPOSITORY}:{REPOSITORY},{Path.cwd()}:{Path.cwd()},/data:/data' in done.stdout


@pytest.mark.parametrize('script', BATCH_SCRIPTS)
def test_a_job_that_came_back_resumes(script: str) -> None:
    assert '--resume auto' not in dry_run(script).stdout
    assert '--resume auto' in dry_run(script, SLURM_RESTART_COUNT='1').stdout


def test_wrong_options_are_told() -> None:
    for args, message in (
        (['--tp', '2'], 'stand behind --'),
        (['--grace=soon'], 'must be a whole number'),
        (['--script'], 'needs a value'),
    ):
        done = dry_run('train.sbatch', *args)
        assert done.returncode == 1
        assert message in done.stderr
    assert (
        'usage: sbatch'
        in subprocess.run(
            ['bash', str(REPOSITORY / 'launch/slurm/train.sbatch'), '--help'],
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout
    )
