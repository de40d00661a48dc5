"""`make demo-embed` as a person starts it, but tiny."""

import json
from functools import partial

import pytest

from tests.launch import demos
from tests.launch.test_progress import PNG

start = partial(demos.start, 'demo_embed')


@pytest.mark.long
def test_the_demo_makes_an_encoder_of_a_language_model_and_says_what_it_finds(tmp_path):
    run = start(tmp_path, '--pretrain-steps=10', '--groups=128', '--epochs=3', '--log-every=3', '--tp=2', '--pp=1')
    assert run.returncode == 0, run.stderr
    folder = tmp_path / 'runs/demo-embed'
    lines = [json.loads(line) for line in (folder / 'encoder/metrics.jsonl').read_text().splitlines()]
    recall = [line['held_out_recall@1'] for line in lines if 'held_out_recall@1' in line]
    losses = [line['loss'] for line in lines if 'loss' in line]
    assert losses[-1] < losses[0]
    count = len((folder / 'held-out.jsonl').read_text().splitlines())
    assert f'of {count} held-out groups: mean ± 1.96 standard errors; a guess has a recall@1 of 1/{count}' in run.stdout
    assert any(
        line.startswith('recall@1 ') and line.split()[1::3][:2] == [f'{recall[0]:.3f}', f'{recall[-1]:.3f}']
        for line in run.stdout.splitlines()
    )
    assert len((folder / 'encoder/held_out.jsonl').read_text().splitlines()) == count > 30
    assert (folder / 'encoder/embedding.png').read_bytes().startswith(PNG)
    assert (folder / 'encoder.npz').exists()
    assert run.stdout.count('\nanchor    ') == 4
    again = start(tmp_path, '--groups=64', '--epochs=1', '--tp=1', '--pp=1')
    assert again.returncode == 0, again.stderr
    assert 'runs/demo-embed/base.npz is there; delete it to train it anew' in again.stdout


def test_a_step_that_fails_ends_the_demo_with_its_message_alone(tmp_path):
    run = start(tmp_path, '--tp=3')
    assert run.returncode == 1
    assert run.stderr.endswith('error: --heads 4 must be a multiple of --tp 3; try --tp 2 or 4\n')
