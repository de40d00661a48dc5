"""What a host has, and what its packages are."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest

from twinkle_megatron.doctor import machine, packages
from twinkle_megatron.doctor.report import FAIL, OK, WARN


def test_a_folder_with_room_is_fine(tmp_path, monkeypatch):
    give(monkeypatch, 100)
    assert machine.disk(str(tmp_path)) == (OK, '100 GiB free', '')


@pytest.mark.parametrize(('gib', 'status'), [(0.5, FAIL), (5, WARN), (50, OK)])
def test_little_room_is_told(tmp_path, monkeypatch, gib, status):
    give(monkeypatch, gib)
    assert machine.disk(str(tmp_path))[0] == status


def give(monkeypatch, gib: float) -> None:
    """A disk with that much room."""
    plain = os.statvfs(tempfile.gettempdir())
    told = list(plain)
    told[1], told[4] = 2**20, int(gib * 2**10)  # of blocks of 1 MiB
    monkeypatch.setattr(os, 'statvfs', lambda _: os.statvfs_result(told))


def test_a_folder_that_is_not_there_is_a_warning_that_says_where_it_would_be(tmp_path, monkeypatch):
    give(monkeypatch, 100)
    status, value, fix = machine.disk(str(tmp_path / 'a' / 'b'))
    assert (status, value) == (WARN, f'does not exist, would be made in {tmp_path}; 100 GiB free')
    assert fix.endswith(f'mkdir -p {tmp_path}/a/b')


def test_a_file_in_place_of_a_folder_fails(tmp_path):
    (tmp_path / 'file').touch()
    for path in (tmp_path / 'file', tmp_path / 'file' / 'below'):
        assert machine.disk(str(path))[:2] == (FAIL, f'{tmp_path / "file"} is a file')


def test_a_disk_that_can_only_be_read_fails(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, 'TemporaryFile', refuse)
    assert machine.disk(str(tmp_path))[:2] == (FAIL, 'cannot be written to: Read-only file system')


def test_a_small_limit_of_open_files_is_told(monkeypatch):
    for limit, world, status in ((1024, 8, WARN), (1024, 512, FAIL), (65536, 512, OK)):
        monkeypatch.setattr(machine.resource, 'getrlimit', lambda _, limit=limit: (limit, 2**20))
        found = machine.open_files(world)
        assert found[0] == status
        assert ('ulimit -n' in found[2]) == (status != OK)


def test_no_shared_memory_is_a_warning(tmp_path):
    assert machine.shared_memory(str(tmp_path / 'shm'))[:2] == (WARN, 'not there: No such file or directory')


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package that can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str = '', *inner: str):
        for folder in ('', *inner):
            (tmp_path / name / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / name / folder / '__init__.py').write_text(text if not folder else '')

    return write


def looked_at(name: str) -> dict[str, str]:
    return packages.packages(30)[name]


def test_the_apex_of_pypi_is_told_from_that_of_nvidia(package):
    package('apex')
    found = looked_at('Apex')
    assert found['status'] == FAIL
    assert 'is not the one of NVIDIA' in found['value']
    assert 'pip uninstall apex' in found['fix']
    package('apex', '', 'multi_tensor_apply', 'normalization')
    found = looked_at('Apex')  # NVIDIA's, without the extensions
    assert found['status'] == FAIL
    assert "No module named 'amp_C'" in found['value']
    package('amp_C')
    assert looked_at('Apex') == {'status': OK, 'value': 'of unknown version, not used: there is no GPU', 'fix': ''}


def test_a_package_that_cannot_be_imported_fails_and_one_that_kills_its_process_too(package):
    package('transformer_engine', 'raise ImportError("undefined symbol: _ZN3c10")', 'pytorch')
    package('flash_attn', 'import os; os.abort()')
    found = packages.packages(30)
    engine, attention = found['Transformer Engine'], found['flash-attention']
    assert engine['status'] == FAIL
    assert 'cannot be imported: ImportError: undefined symbol' in engine['value']
    assert attention['status'] == WARN
    assert 'the process ended by signal 6' in attention['value']


def test_a_compiler_is_looked_for_by_its_variable(monkeypatch):
    monkeypatch.setenv('CXX', 'no-such-compiler')
    assert looked_at('C++ compiler')['value'] == 'CXX=no-such-compiler is not found'


def test_hosts_that_differ_in_a_package_are_told_apart():
    def told(value):
        return {'Triton': {'status': OK, 'value': value, 'fix': ''}}

    ranks = {0: {'host': 'a', 'packages': told('3.4')}, 1: {'host': 'a'}, 2: {'host': 'b', 'packages': told('3.5')}}
    assert [(line.status, line.value) for line in packages.package_lines(ranks)] == [
        (WARN, '3.4 (host a, rank 0)'),
        (WARN, '3.5 (host b, rank 2)'),
    ]
