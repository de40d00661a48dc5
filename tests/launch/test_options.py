"""Options are checked before anything is started, and a wrong one is told in one line."""

from pathlib import Path

import pytest

from launch import options


def test_the_run_is_named_after_the_data_and_the_layout():
    assert options.parse(['--tp', '2', '--pp', '2']).run == Path('runs/python-reference-tp2-pp2')
    assert options.parse(['--data', 'a/my.jsonl', '--dp', '2', '--runs', 'out']).run == Path('out/my-tp1-pp1-dp2')
    assert options.parse(['--head', 'linear']).run == Path('runs/python-reference-tp1-pp1-linear')
    assert options.parse(['--name', 'first']).run == Path('runs/first')


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        ('--steps abc', "argument --steps: must be a whole number of at least 1, got 'abc'"),
        ('--steps 0', "argument --steps: must be a whole number of at least 1, got '0'"),
        ('--steps 1.5', "argument --steps: must be a whole number of at least 1, got '1.5'"),
        ('--lr nan', "argument --lr: must be a number above 0, got 'nan'"),
        ('--lr inf', "argument --lr: must be a number above 0, got 'inf'"),
        ('--lr 0', "argument --lr: must be a number above 0, got '0'"),
        ('--tp 3', '--heads 4 must be a multiple of --tp 3; try --tp 2 or 4'),
        ('--pp 8', '--layers 4 must be a multiple of --pp 8; try --pp 2 or 4'),
        ('--dp 3', '--micro-batches 2 must be a multiple of --dp 3; try --dp 1 or 2'),
        ('--heads 3', '--hidden-size 128 must be a multiple of --heads 3; try --heads 2 or 4'),
        ('--hidden-size 12', '--hidden-size 12 / --heads 4 must be even, for rotary embeddings'),
        ('--head lm', "argument --head: must be auto, logits or linear, got 'lm'"),
        ('--warmup 1', '--warmup must be a share of the steps below 1, got 1'),
        ('--name a/b', "--name must be the name of one folder, got 'a/b'"),
        ('--step 5', 'unrecognized arguments: --step 5'),
    ],
)
def test_a_wrong_option_is_told_and_ends_with_2(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        options.parse(argv.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f'error: {message}\n')
