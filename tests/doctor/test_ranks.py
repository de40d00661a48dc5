"""What ranks tell each other: each fault is named, nothing hangs, one rank prints, all end alike."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import time

import pytest
import torch.distributed as dist
from ranks import run_ranks

from twinkle_megatron import doctor
from twinkle_megatron.doctor import Layout, Report, command, examine, machine, network, packages
from twinkle_megatron.doctor.join import Unreached, meet

SOON = 1.5  # seconds of a wait that is in vain


def failing(report: Report) -> dict[str, str]:
    lines = [line for line in report.lines if line.status == 'FAIL']
    assert all(line.fix for line in report.lines if line.status != 'ok')
    assert report.exit_code == (1 if lines else 0)
    return {f'{line.check}{list(line.ranks) if line.ranks else ""}': line.value for line in lines}


def checked(case, ranks: int, layout: Layout | None = None, timeout: float = 20) -> tuple[dict[str, str], Report]:
    """`case(rank)` happens on each rank before `check`; the failing lines, equal on all ranks, of which one prints."""

    def on_rank() -> Report:
        case(dist.get_rank())
        return doctor.check(layout, timeout=timeout)

    reports = run_ranks(on_rank, ranks, timeout=60)
    assert sum(report.prints for report in reports) == 1
    assert len({report.to_json() for report in reports}) == 1
    return failing(reports[0]), reports[0]


def nothing(rank: int) -> None:
    pass


def test_ranks_in_order_have_no_failing_line_and_a_time_for_each_group():
    found, report = checked(nothing, 4, Layout(tp=2, ep=2, heads=4))
    assert found == {}
    groups = {(*group['kinds'], *group['ranks']) for group in report.groups}
    assert groups == {('tp', 0, 1), ('tp', 2, 3), ('dp', 'dp_cp', 'ep', 0, 2), ('dp', 'dp_cp', 'ep', 1, 3)}
    assert all(group['ms'] > 0 and group['gb_per_s'] > 0 and not group['error'] for group in report.groups)
    assert report.layout == {'tp': 2, 'pp': 1, 'cp': 1, 'ep': 2, 'vpp': 1, 'dp': 2}
    assert [facts['rank'] for facts in report.ranks] == [0, 1, 2, 3]
    again = Report.from_json(report.to_json())
    assert str(again) == str(report)


def test_a_layout_that_does_not_fit_the_processes_fails_and_the_rest_is_looked_at():
    found, report = checked(nothing, 3, Layout(tp=2))
    assert list(found) == ['layout']
    assert report.groups == []
    assert any(line.value.startswith('not run: the layout') for line in report.lines)


def test_a_rank_with_another_version_is_named():
    def case(rank: int) -> None:
        if rank == 1:
            told = packages.versions() | {'torch': '1.0'}
            packages.versions = lambda: told

    found, _ = checked(case, 3)
    assert list(found) == ['torch[1]']
    assert found['torch[1]'].startswith('1.0 on rank 1; 2')


def test_a_rank_with_other_sizes_is_named_and_no_group_is_tried():
    def on_rank() -> Report:
        return doctor.check(Layout(tp=2 if dist.get_rank() == 1 else 1), timeout=20)

    reports = run_ranks(on_rank, 4, timeout=60)
    assert failing(reports[0])['sizes[1]'].startswith('tp 2, pp 1')
    assert reports[0].groups == []


def test_variables_of_nccl_that_differ_are_a_warning():
    def case(rank: int) -> None:
        if rank == 2:
            os.environ['NCCL_ALGO'] = 'Tree'

    found, report = checked(case, 3)
    assert found == {}
    assert [line.value for line in report.lines if line.check == 'NCCL_ALGO'] == ['Tree on rank 2; none on ranks 0-1']


def test_a_wrong_sum_names_group_and_rank():
    def case(rank: int) -> None:
        plain = network.all_reduce

        def broken(group, values, seconds):
            plain(group, values, seconds)
            values[7] += 1

        if rank == 3:
            network.all_reduce = broken

    found, report = checked(case, 4, Layout(tp=2))
    names = ['all-reduce tp[2, 3]', 'all-reduce dp = dp_cp[1, 3]']
    assert list(found) == names
    for name in names:
        assert 'wrong sum on rank 3: 25 in place of 24, 1 of 524288' in found[name]
    assert sum('ms' in group for group in report.groups) == 2


def test_a_rank_that_hangs_in_a_collective_is_named_and_the_report_comes():
    def case(rank: int) -> None:
        if rank == 1:
            network.all_reduce = lambda *_: time.sleep(100)

    begun = time.monotonic()
    found, _ = checked(case, 4, Layout(tp=2), timeout=SOON)
    assert time.monotonic() - begun < 20
    assert list(found) == ['all-reduce tp[0, 1]', 'all-reduce dp = dp_cp[0, 2]', 'all-reduce dp = dp_cp[1, 3]']
    assert found['all-reduce tp[0, 1]'].startswith('ranks 0-1: no end: ')
    assert found['all-reduce dp = dp_cp[1, 3]'] == 'ranks 1, 3: not run: a rank of it was stuck in group tp 0'


def on_ranks(case, ranks: int, *arguments: str, timeout: float = 20, expect: int | None = None, **environ: str) -> list:
    """`case(rank)`, then the command, on each rank: its exit code and what it printed, None for one that was killed."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])

    def on_rank() -> tuple[int, str, str]:
        rank = dist.get_rank()
        mine = {'RANK': str(rank), 'WORLD_SIZE': str(ranks), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            case(rank)
            code = command.main([*arguments, '--timeout', str(timeout)], mine | {'LOCAL_RANK': str(rank)} | environ)
        return code, out.getvalue(), err.getvalue()

    outcomes = run_ranks(on_rank, ranks, timeout=60, collect_errors=True)
    assert all(outcome.error in (None, 'Died') for outcome in outcomes), outcomes
    alive = [outcome.value for outcome in outcomes if outcome.error is None]
    assert len({code for code, _, _ in alive}) == 1, alive
    assert sum(bool(out) for _, out, _ in alive) == 1, alive
    assert expect is None or alive[0][0] == expect, alive
    return [outcome.value for outcome in outcomes]


def test_one_rank_prints_the_table_and_all_end_with_0():
    told = on_ranks(nothing, 2, '--tp', '2', expect=0)
    table = told[0][1]
    assert 'ok    layout' in table
    assert 'ok    all-reduce tp' in table
    assert table.splitlines()[-1].endswith(' ok') or ' warn' in table.splitlines()[-1]
    assert [err for _, _, err in told] == ['', '']


def test_one_rank_prints_one_object_for_programs():
    told = json.loads(on_ranks(nothing, 2, '--json', '--tp', '4', expect=1)[0][1])
    assert told['ok'] is False
    assert told['world'] == 2
    assert len(told['ranks']) == 2
    assert next(line for line in told['lines'] if line['status'] == 'FAIL')['check'] == 'layout'
    assert set(told) == {'ok', 'lines', 'world', 'hosts', 'layout', 'groups', 'ranks'}


def killed(which: int):
    def case(rank: int) -> None:
        if rank == which:
            network.all_reduce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    return case


def test_a_rank_that_is_killed_is_named_by_those_that_live():
    table = on_ranks(killed(2), 3, '--pp', '3', timeout=SOON, expect=1)[0][1]
    assert 'rank 2 came, and answered no more' in table
    assert 'FAIL  all-reduce pp' in table


def test_the_report_comes_where_the_rank_that_keeps_the_store_is_killed():
    told = on_ranks(killed(0), 3, timeout=SOON, expect=1)
    assert told[0] is None
    assert 'the store of the run, in rank 0 or torchrun, is gone' in told[1][1]
    assert told[2][1] == ''


def test_a_rank_that_never_came_is_named_and_loopback_is_suspected():
    def case(rank: int) -> None:
        if rank == 1:
            os._exit(1)

    table = on_ranks(case, 3, '--tp', '3', timeout=SOON, expect=1)[0][1]
    assert 'rank 1 of 3 did not come within 1.5 s' in table
    assert 'ranks 0-2: rank 1 did not enter' in table
    assert 'warn  MASTER_ADDR' in table
    assert '127.0.0.1 is a loopback address; rank 1 did not come' in table


def test_two_jobs_on_one_port_are_told_apart():
    def case(rank: int) -> None:
        plain = examine.examined

        def beside_another(layout, place, *others):
            with pytest.raises(Unreached, match='rank 1 is taken by another process'):
                meet(place, 5)
            return plain(layout, place, *others)

        if rank == 1:
            examine.examined = beside_another

    table = on_ranks(case, 2, expect=1)[0][1]
    assert 'rank 1 came more than once' in table
    assert 'take another port' in table


def on_two_hosts(rank: int) -> None:
    machine.hostname = lambda: 'ab'[rank // 2]
    os.environ['MASTER_ADDR'] = '127.0.0.1'
    if rank // 2:
        network.clock = lambda: time.time() + 100


def test_a_loopback_master_fails_where_there_are_several_hosts_and_their_clocks_are_compared():
    found, report = checked(on_two_hosts, 4, Layout(tp=2))
    assert list(found) == ['MASTER_ADDR', 'clocks[2]']
    assert found['MASTER_ADDR'] == '127.0.0.1 is a loopback address'
    assert found['clocks[2]'].startswith('b is 100 s ahead of a')
    assert report.hosts == ['a', 'b']
    assert [facts['packages'] is not None for facts in report.ranks] == [True, False, True, False]


def test_a_slow_rank_and_a_host_with_little_memory_are_named():
    def case(rank: int) -> None:
        plain = machine.facts

        def facts(*args):
            told = plain(*args)
            told['compute_ms'] = 50.0 if rank == 1 else 2.0
            told['memory'] = {'free': 2**20 if rank == 2 else 2**40, 'total': 2**40}
            return told

        machine.facts = facts

    found, report = checked(case, 3)
    assert list(found) == ['host memory[2]']
    slow = next(line for line in report.lines if line.check == 'slow ranks')
    assert (slow.status, slow.ranks) == ('warn', (1,))


def test_a_gpu_that_cannot_be_used_is_named_and_the_rest_is_looked_at():
    def case(rank: int) -> None:
        if rank == 1:
            machine.gpus = lambda _: 1 / 0

    found, report = checked(case, 2)
    assert found == {'GPU[1]': 'cannot be used: division by zero (rank 1 on ' + report.hosts[0] + ')'}
    assert report.groups[0]['ms'] > 0


def test_sigterm_brings_the_report_forward():
    """As torchrun sends it to the others where one rank has died."""

    def case(rank: int) -> None:
        command.listen()
        killed(2)(rank)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        if rank == 1:
            network.all_reduce = lambda *_: time.sleep(100)

    begun = time.monotonic()
    table = on_ranks(case, 3, '--pp', '3', timeout=60, expect=1)[0][1]
    assert time.monotonic() - begun < 15
    for said in ('rank 2 came, and answered no more', 'FAIL  all-reduce pp', 'told to stop (SIGTERM)', 'ok    torch'):
        assert said in table


def test_require_ends_every_rank_where_a_line_fails(tmp_path):
    def on_rank() -> None:
        report = doctor.require(Layout(), timeout=20)
        (tmp_path / f'{dist.get_rank()}').write_text(str(report.exit_code))
        doctor.require(Layout(tp=3), timeout=20)
        (tmp_path / 'went on').touch()

    outcomes = run_ranks(on_rank, 2, timeout=30, collect_errors=True)
    assert [outcome.message for outcome in outcomes] == ['exited with status 1 before it returned a value'] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ['0', '1']
