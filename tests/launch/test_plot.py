"""`python -m launch.plot`: a wrong call is one line, not a traceback."""

from __future__ import annotations

import pytest

from launch import plot

LINES = '{"step": 1, "loss": 2.0, "odd": 1}\n{"step": 2, "loss": 1.5, "odd": 2}\n'


@pytest.fixture
def run(tmp_path):
    def made(text: str = LINES) -> str:
        (tmp_path / 'run').mkdir(exist_ok=True)
        (tmp_path / 'run/metrics.jsonl').write_text(text)
        return str(tmp_path / 'run')

    return made


@pytest.mark.parametrize(
    ('out', 'says'),
    [
        ('file/curves.png', 'file'),
        ('curves.xyz', "'xyz' is not supported"),
        ('folder', 'folder is a folder; --out must be a file, such as '),
    ],
)
def test_a_picture_that_cannot_be_written_is_told_in_one_line(run, tmp_path, capsys, out, says):
    (tmp_path / 'file').touch()
    (tmp_path / 'folder').mkdir()
    assert plot.main([run(), '--out', str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count('\n') == 1


@pytest.mark.parametrize(
    ('text', 'says'),
    [
        (LINES + '{"step": 3, "lo\n{"step": 4, "loss": 1.0}\n', 'metrics.jsonl, line 3 is not JSON'),
        (LINES + '3}\n', 'metrics.jsonl, line 3 is not JSON'),
        (LINES + '{"loss": 1.0}\n', 'metrics.jsonl, line 3 must be an object of figures with a "step"'),
        ('{"step": 1, "odd": 1, "name": "a"}\n', 'none of the usual figures is there; name one by --key: odd\n'),
        ('', 'has no figures yet'),
    ],
)
def test_figures_that_cannot_be_drawn_are_told_in_one_line(run, tmp_path, capsys, text, says):
    assert plot.main([run(text), '--out', str(tmp_path / 'curves.png')]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count('\n') == 1


def test_a_picture_without_a_suffix_is_a_png(run, tmp_path, capsys):
    assert plot.main([run(), '--key', 'odd', '--out', str(tmp_path / 'curves')]) == 0
    assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
    assert 'curves.png' in capsys.readouterr().out
