"""Variables of the environment, and which process this is."""

from __future__ import annotations

import re

import pytest

from twinkle_megatron.doctor import environment
from twinkle_megatron.doctor.join import Place, place_of

THERE = ['lo', 'eth0', 'ib0']


def bad(environ: dict[str, str], gpus: int = 0, overlaps: bool = False, local_world: int = 1) -> dict[str, str]:
    lines = environment.lines_of(environ, THERE, gpus, overlaps, local_world)
    assert all(line['fix'] for line in lines if line['status'] != 'ok')
    return {line['check']: f'{line["status"]} {line["value"]}' for line in lines if line['status'] != 'ok'}


@pytest.mark.parametrize(
    ('name', 'value', 'fits'),
    [
        ('NCCL_SOCKET_IFNAME', 'eth', True),
        ('NCCL_SOCKET_IFNAME', '=eth', False),
        ('NCCL_SOCKET_IFNAME', '=eth0,eth1', True),
        ('NCCL_SOCKET_IFNAME', 'bond', False),
        ('NCCL_SOCKET_IFNAME', '^lo,docker', True),
        ('NCCL_SOCKET_IFNAME', '^lo,eth,ib', False),
        ('GLOO_SOCKET_IFNAME', 'eth0', True),
        ('GLOO_SOCKET_IFNAME', 'eth', False),
        ('GLOO_SOCKET_IFNAME', 'eth0,eth1', False),
    ],
)
def test_an_interface_that_is_not_there_fails(name, value, fits):
    assert bad({name: value}) == ({} if fits else {name: f'FAIL {value}: no such interface here'})


def test_cuda_connections_matter_where_there_are_gpus_and_overlap():
    assert bad({}, gpus=1, overlaps=True) == {'CUDA_DEVICE_MAX_CONNECTIONS': 'warn not set'}
    assert bad({'CUDA_DEVICE_MAX_CONNECTIONS': '8'}, 1, True) == {'CUDA_DEVICE_MAX_CONNECTIONS': 'warn 8'}
    assert not bad({'CUDA_DEVICE_MAX_CONNECTIONS': '1'}, 1, True)
    assert not bad({}, gpus=1)
    assert not bad({}, overlaps=True)


def test_threads_matter_where_several_processes_share_a_host():
    assert bad({}, local_world=8) == {'OMP_NUM_THREADS': 'warn not set'}
    assert not bad({})
    assert not bad({'OMP_NUM_THREADS': '2'}, local_world=8)


def test_what_switches_something_off_is_a_warning():
    assert bad({'NCCL_P2P_DISABLE': '1', 'NCCL_IB_DISABLE': '0'}) == {
        'NCCL_P2P_DISABLE': 'warn 1: GPUs of a host talk through host memory'
    }


def test_a_loopback_address_is_known_by_number_and_by_name():
    assert environment.loopback('127.0.1.1') == '127.0.1.1'
    assert environment.loopback('::1') == '::1'
    assert environment.loopback('localhost') == '127.0.0.1'
    assert environment.loopback('10.0.0.1') is None
    assert environment.loopback('no-such-host.invalid') is None


TORCHRUN = {'RANK': '3', 'WORLD_SIZE': '8', 'LOCAL_RANK': '1', 'LOCAL_WORLD_SIZE': '2'}
SLURM = {'SLURM_PROCID': '5', 'SLURM_STEP_NUM_TASKS': '6', 'SLURM_NTASKS': '99', 'SLURM_LOCALID': '2'}
MASTER = {'MASTER_ADDR': 'n1', 'MASTER_PORT': '29500'}


def test_ranks_come_from_torchrun_before_slurm_and_from_the_step_not_the_job():
    assert place_of(TORCHRUN | SLURM | MASTER) == Place(3, 8, 1, 2, 'n1', 29500, 'torchrun')
    assert place_of(SLURM | MASTER) == Place(5, 6, 2, None, 'n1', 29500, 'SLURM')
    assert place_of({'SLURM_PROCID': '0', 'SLURM_NTASKS': '4'} | MASTER).alone  # the script of a batch job


@pytest.mark.parametrize(
    ('environ', 'says'),
    [
        ({'RANK': '0'}, 'WORLD_SIZE is not'),
        ({'RANK': '0', 'WORLD_SIZE': '2'}, 'need MASTER_ADDR and MASTER_PORT'),
        ({'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': 'a'}, 'need MASTER_PORT'),
        ({'RANK': '2', 'WORLD_SIZE': '2', **MASTER}, 'RANK must be from 0 to WORLD_SIZE - 1 = 1, got 2'),
        ({'RANK': 'x', 'WORLD_SIZE': '2', **MASTER}, "RANK must be a whole number, got 'x'"),
        (SLURM, 'scontrol show hostnames'),
        (SLURM | MASTER | {'MASTER_PORT': '70000'}, 'MASTER_PORT must be from 1 to 65535, got 70000'),
    ],
)
def test_an_incomplete_environment_is_an_error_that_names_what_lacks(environ, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        place_of(environ)
