"""patches/apply.sh: a file that it knows is patched and restored to the byte; another one is left alone."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

PATCHES = Path(__file__).parents[1] / 'patches'
PLAIN = ''.join(f'line {number}\n' for number in range(20))
PATCHED = PLAIN.replace('line 7\n', 'line 7\nours\n')
PATCH = """--- a/pretrain_gpt.py
+++ b/pretrain_gpt.py
@@ -6,5 +6,6 @@
 line 5
 line 6
 line 7
+ours
 line 8
 line 9
"""


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """apply.sh with one release that it knows, and a checkout of it."""
    (tmp_path / 'patches' / 'megatron-lm').mkdir(parents=True)
    shutil.copy(PATCHES / 'apply.sh', tmp_path / 'patches')
    (tmp_path / 'patches/megatron-lm/core_r9.1.patch').write_text(PATCH)
    known = f'# comment\n\ncore_r9.0.patch {"0" * 64} {"1" * 64}\ncore_r9.1.patch {sha256(PLAIN)} {sha256(PATCHED)}\n'
    (tmp_path / 'patches/megatron-lm/known.txt').write_text(known)
    (tmp_path / 'check out').mkdir()
    (tmp_path / 'check out/pretrain_gpt.py').write_text(PLAIN)
    (tmp_path / 'check out/pretrain_gpt.py').chmod(0o750)
    return tmp_path


def apply(folder: Path, *arguments: str) -> tuple[int, str]:
    command = ['bash', str(folder / 'patches/apply.sh'), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_a_known_file_is_patched_once_and_restored_to_the_byte(folder):
    script = folder / 'check out/pretrain_gpt.py'
    for arguments, says, expected in (
        ([], 'core_r9.1 patched', PATCHED),
        ([], 'nothing to do', PATCHED),
        (['--revert'], 'core_r9.1 unpatched', PLAIN),
        (['--revert'], 'nothing to do', PLAIN),
    ):
        code, printed = apply(folder, *arguments, 'check out')
        assert (code, script.read_text()) == (0, expected)
        assert says in printed
        assert script.stat().st_mode & 0o777 == 0o750
    assert [path.name for path in script.parent.iterdir()] == ['pretrain_gpt.py'], 'nothing left behind'


def test_an_unknown_file_is_refused_and_left_alone(folder):
    script = folder / 'check out/pretrain_gpt.py'
    script.write_text(PLAIN + '# ours, too\n')
    for arguments in ([], ['--revert']):
        code, printed = apply(folder, *arguments, 'check out')
        assert (code, script.read_text()) == (1, PLAIN + '# ours, too\n')
        assert sha256(script.read_text()) in printed
        assert 'core_r9.0 core_r9.1' in printed
        assert 'twinkle_megatron.run' in printed


def test_a_patch_that_gives_another_file_changes_nothing(folder):
    (folder / 'patches/megatron-lm/core_r9.1.patch').write_text(PATCH.replace('ours', 'theirs'))
    code, printed = apply(folder, 'check out')
    assert code == 1
    assert 'another file than expected' in printed
    assert (folder / 'check out/pretrain_gpt.py').read_text() == PLAIN
    assert len(list((folder / 'check out').iterdir())) == 1


@pytest.mark.parametrize(
    ('arguments', 'code', 'says'),
    [([], 2, 'usage:'), (['nowhere'], 1, 'checkout'), (['--reverse', 'check out'], 2, 'usage:'), (['-x'], 2, '--help')],
)
def test_a_wrong_call_says_what_is_right(folder, arguments, code, says):
    found, printed = apply(folder, *arguments)
    assert found == code
    assert says in printed


def test_the_patches_are_those_of_the_table_and_apply_to_their_own_context():
    lines = [line.split() for line in (PATCHES / 'megatron-lm/known.txt').read_text().splitlines() if line[:1] != '#']
    assert sorted(name for name, _, _ in lines) == sorted(path.name for path in PATCHES.glob('megatron-lm/*.patch'))
    assert len({hashed for line in lines for hashed in line[1:]}) == 2 * len(lines)
    for name, _, _ in lines:
        added = [line[1:] for line in (PATCHES / 'megatron-lm' / name).read_text().splitlines() if line[:1] == '+']
        assert sum('twinkle' in line for line in added) == 3
