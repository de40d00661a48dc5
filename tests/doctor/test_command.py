"""The command in one process: table, object, exit codes, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twinkle_megatron import doctor
from twinkle_megatron.doctor import command

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, '-m', 'twinkle_megatron.doctor']
OF_RUNS = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'SLURM_PROCID', 'SLURM_STEP_NUM_TASKS')


def start(*arguments: str, **environ: str) -> subprocess.Popen:
    plain = {name: value for name, value in os.environ.items() if name not in OF_RUNS}
    plain['PYTHONPATH'] = str(ROOT)
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    return subprocess.Popen([*COMMAND, *arguments], env=plain | environ, **pipes)


def test_two_alone_at_once_do_not_disturb_each_other(tmp_path):
    both = [start('--tp', '2', '--heads', '6', '--path', str(tmp_path), '--json') for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, '')
        assert json.loads(out)['ok'] is True
        assert out.count('\n') == 1
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_aligned_and_ends_with_a_count(capsys):
    assert command.main(['--tp', '4', '--heads', '6'], {}) == 1
    rows = capsys.readouterr().out.splitlines()
    names = [row[:6] for row in rows[:-1]]
    assert set(names) <= {'ok    ', 'warn  ', 'FAIL  ', '      '}
    assert 'FAIL  attention heads' in '\n'.join(rows)
    assert rows[[row[:4] for row in rows].index('FAIL') + 1].strip() == 'fix: take --tp of 1, 2, 3, 6'
    assert rows[-1].endswith('1 FAIL')


def test_a_script_in_one_process_gets_the_same():
    report = doctor.check(doctor.Layout(tp=2, heads=3))
    assert report.prints
    assert [line.check for line in report.lines if line.status == 'FAIL'] == ['attention heads']


def test_help_and_a_wrong_call_import_no_torch():
    script = (
        'import sys; from twinkle_megatron.doctor.command import main\n'
        "print(main(['--tp', '0'], {}), 'torch' in sys.modules)\n"
        "main(['--help'], {})"
    )
    run = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert run.stdout.startswith('2 False\nusage: ')
    assert '--tp must be a whole number of at least 1, got 0' in run.stderr


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [
        (['--tp', '-1'], '--tp must be a whole number of at least 1, got -1'),
        (['--kv-heads', '0'], '--kv-heads must be a whole number of at least 1'),
        (['--timeout', 'nan'], '--timeout must be a finite number > 0'),
        (['--timeout', '1e9'], '--timeout must be at most 86400 s, got 1e+09'),
        (['--tensor', '2'], 'unrecognized arguments: --tensor 2'),
        (['--path', ''], "--path must be a folder, got ''"),
    ],
)
@pytest.mark.parametrize('rank', ['0', '1'])
def test_a_wrong_call_is_told_by_one_rank(capsys, rank, arguments, says):
    environ = {'RANK': rank, 'WORLD_SIZE': '2', 'MASTER_ADDR': 'localhost', 'MASTER_PORT': '1'}
    assert command.main(arguments, environ) == 2
    printed = capsys.readouterr()
    assert printed.out == ''
    assert (says in printed.err) == (rank == '0') == bool(printed.err)


def test_a_rank_that_is_no_number_is_told(capsys):
    assert command.main([], {'RANK': 'x', 'WORLD_SIZE': '2'}) == 2
    assert "RANK must be a whole number, got 'x'" in capsys.readouterr().err


def test_a_signal_ends_a_wait_for_a_master_without_a_traceback():
    with socket.socket() as silent:  # answers nothing
        silent.bind(('127.0.0.1', 0))
        port = str(silent.getsockname()[1])
        environ = {'RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}
        started = {sent: start(**environ) for sent in (signal.SIGINT, signal.SIGTERM)}
        time.sleep(1.5)
        for sent, process in started.items():
            process.send_signal(sent)
        begun = time.monotonic()
        for sent, process in started.items():
            out, err = process.communicate(timeout=30)
            assert process.returncode == (-signal.SIGINT if sent == signal.SIGINT else 1)
            assert out == ''
            assert 'Traceback' not in err
    assert time.monotonic() - begun < 8


def test_who_reads_may_leave_before_the_end():
    process = start()
    process.stdout.close()
    assert process.stderr.read() == ''
    assert process.wait(30) == 0


def test_a_master_that_cannot_be_reached_is_said_on_the_rank_that_cannot(capfd):
    environ = {'RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '1'}
    assert command.main(['--timeout', '1'], environ) == 1
    printed = capfd.readouterr()
    assert printed.out == ''
    assert 'rank 1: cannot reach MASTER_ADDR:MASTER_PORT 127.0.0.1:1 within 1 s' in printed.err


def test_a_port_that_is_taken_is_said_by_rank_0(capfd):
    with socket.socket() as taken:
        taken.bind(('', 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environ = {'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}
        assert command.main(['--timeout', '2'], environ) == 1
    out = capfd.readouterr().out
    assert 'FAIL  processes  cannot listen on' in out
    assert 'is the port taken' in out
