"""`make demo-gkd` as a person starts it, but tiny."""

import json
from functools import partial

import pytest

from tests.launch import demos
from tests.launch.test_progress import PNG

start = partial(demos.start, 'demo_gkd')


@pytest.mark.long
def test_the_demo_distils_a_teacher_into_a_student_which_comes_nearer_than_one_that_learns_from_text(tmp_path):
    run = start(tmp_path, '--teacher-steps=16', '--steps=12', '--tp=2', '--pp=1')
    assert run.returncode == 0, run.stderr
    folder = tmp_path / 'runs/demo-gkd'
    result = json.loads((folder / 'result.json').read_text())
    names = ['teacher', 'student before', 'student distilled', 'student from text']
    assert list(result) == names
    loss, divergence = (
        {name: result[name][f'held_out_{key}_nats'] for name in names} for key in ('loss', 'divergence')
    )
    assert loss['teacher'] < loss['student distilled'] < loss['student before']
    assert 0 < divergence['student distilled'] < divergence['student from text'] < divergence['student before']
    for name in names:
        assert f'{name:22}{loss[name]:9.3f}{divergence[name]:30.4f}' in run.stdout
    assert (folder / 'demo.png').read_bytes().startswith(PNG)
    starts = [
        json.loads((folder / name / 'metrics.jsonl').read_text().splitlines()[0]) for name in ('distilled', 'from-text')
    ]
    assert starts[0] == starts[1]  # the same student, measured in the same way
    again = start(tmp_path, '--steps=1', '--tp=1', '--pp=1')
    assert again.returncode == 0, again.stderr
    assert 'runs/demo-gkd/base.npz is there; delete it to train it anew' in again.stdout


def test_a_step_that_fails_ends_the_demo_with_its_message_alone(tmp_path):
    run = start(tmp_path, '--tp=3')
    assert run.returncode == 1
    assert run.stderr.endswith('error: --heads 4 must be a multiple of --tp 3; try --tp 2 or 4\n')
