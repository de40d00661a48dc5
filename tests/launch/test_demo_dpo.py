"""`make demo-dpo` as a person starts it, but tiny."""

import json
from functools import partial

import pytest

from launch.kinds import PAIRS
from tests.launch import demos
from tests.launch.test_progress import PNG

start = partial(demos.start, 'demo_dpo')


@pytest.mark.long
def test_the_demo_trains_on_pairs_with_every_loss_and_the_margin_rises(tmp_path):
    tiny = ['--pretrain-steps=10', '--pairs=96', '--epochs=3', '--log-every=3', '--tp=2', '--pp=1']
    folder = tmp_path / 'runs/demo-dpo'
    for loss in PAIRS.losses:
        run = start(tmp_path, *tiny, f'--loss={loss}')
        assert run.returncode == 0, run.stderr
        assert (f'{folder.relative_to(tmp_path)}/base.npz is there' in run.stdout) is (loss != 'dpo')
        lines = [json.loads(line) for line in (folder / loss / 'metrics.jsonl').read_text().splitlines()]
        margins = [line['held_out_margin'] for line in lines if 'held_out_margin' in line]
        assert margins[0] == 0 < margins[-1]
        assert (folder / loss / 'preference.png').read_bytes().startswith(PNG)
        assert f'margin over the policy of before    0.000 ± 0.000    {margins[-1]:.3f} ± ' in run.stdout
        count = len((folder / 'held-out.jsonl').read_text().splitlines())
        assert f'of {count} held-out pairs: mean ± 1.96 standard errors' in run.stdout
        assert len((folder / loss / 'held_out.jsonl').read_text().splitlines()) == count > 100
        assert (folder / f'{loss}.npz').exists()


def test_a_step_that_fails_ends_the_demo_with_its_message_alone(tmp_path):
    run = start(tmp_path, '--tp=3')
    assert run.returncode == 1
    assert run.stderr.endswith('error: --heads 4 must be a multiple of --tp 3; try --tp 2 or 4\n')


def test_another_loss_is_refused(tmp_path):
    run = start(tmp_path, '--loss=grpo')
    assert run.returncode == 2
    assert "invalid choice: 'grpo'" in run.stderr
