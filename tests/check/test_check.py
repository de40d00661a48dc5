"""`python -m twinkle_megatron.check`: no difference where there is none, and the first one where there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from twinkle_megatron.check.command import main
from twinkle_megatron.check.replicas import checksum

SETUP = str(Path(__file__).with_name('setup_model.py'))


@pytest.fixture
def check(monkeypatch, capsys):
    def run(*arguments: str, fault: str = '') -> tuple[int, str]:
        monkeypatch.setenv('FAULT', fault)
        code = main([SETUP, '--device', 'cpu', '--timeout', '60', *arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_a_right_model_gives_the_same_numbers(check):
    code, printed = check('--tp', '2', '--pp', '2')
    assert code == 0, printed
    assert 'hidden states  24 of 24 agree' in printed
    assert 'logps          4 of 4 agree' in printed
    assert 'metrics        3 of 3 agree' in printed
    assert printed.rstrip().endswith('the same numbers, tolerance 0.0001')


def test_the_example_of_the_page_gives_the_same_numbers(tmp_path, capsys):
    text = (Path(__file__).parents[2] / 'docs' / 'check.md').read_text()
    (tmp_path / 'my_setup.py').write_text(re.findall(r'```python\n(.*?)```', text, re.DOTALL)[0])
    code = main([str(tmp_path / 'my_setup.py'), '--device', 'cpu', '--cp', '2', '--dp', '2'])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert 'hidden states  12 of 12 agree' in printed


@pytest.mark.parametrize(
    ('fault', 'layout', 'first'),
    [
        ('layer', ['--pp', '2'], 'the first that differs: layer 3 (pipeline stage 1, replica 0, micro-batch 0): '),
        ('loss', ['--cp', '2'], 'the first that differs: loss: '),
        ('gradient', ['--tp', '2'], 'the first that differs: gradient of decoder.layers.1.mlp.linear_fc1.weight: '),
        ('weight', ['--dp', '2'], 'decoder.layers.0.input_layernorm.weight over data and context parallel ranks'),
    ],
)
def test_the_first_tensor_that_differs_is_named(check, fault, layout, first):
    code, printed = check(*layout, fault=fault)
    assert code == 1, printed
    assert first in printed
    assert 'DIFFERENT, tolerance' in printed


def test_a_loss_that_is_not_finite_in_both_is_told(check):
    code, printed = check('--tp', '2', fault='nan')
    assert code == 0, printed
    assert 'the loss is not finite, neither here nor in one process; --locate says' in printed


def test_what_is_not_finite_is_located(check):
    code, printed = check('--tp', '2', '--locate', '--top', '2', fault='nan')
    assert code == 1
    assert 'decoder.layers.1.mlp.linear_fc2' in printed
    assert printed.count('sample 0') == 4
    assert check('--tp', '2', '--locate', fault='plain')[0] == 0


@pytest.mark.parametrize(
    ('fault', 'arguments', 'says'),
    [
        ('dropout', [], 'hidden_dropout 0'),
        ('chunks', [], 'must return a MegatronModel, got list'),
        ('budget', [], 'each layout packs by a budget differently'),
        ('raises', ['--tp', '2'], "KeyError: 'no such weights'"),
        ('value', [], 'setup_model.py", line'),
        ('slow', ['--timeout', '1'], 'took longer than 1 s'),
        ('', ['--tp', '0'], '--tp must be a whole number of at least 1, got 0'),
        ('', ['--dp', '2', '--vpp', '2'], '--vpp 2 needs a pipeline: add --pp 2'),
        ('', ['--ep', '4', '--cp', '2'], '--ep 4 must divide cp x dp = 2: take --dp 2 or a multiple'),
        ('', ['--tensor', '2'], 'unrecognized'),
    ],
)
def test_a_run_that_cannot_be_says_why(check, fault, arguments, says):
    code, printed = check(*arguments, fault=fault)
    assert code == 2
    assert says in printed


def test_a_file_that_is_no_setup_says_what_it_lacks(tmp_path, capsys):
    assert main([str(tmp_path / 'nothing.py')]) == 2
    assert 'there is no file' in capsys.readouterr().err
    for text, says in (('', 'the function build'), ('def build(): ...\ndef batch(a, b): ...', 'build takes tp, pp')):
        (tmp_path / 'setup.py').write_text(text)
        assert main([str(tmp_path / 'setup.py'), '--device', 'cpu']) == 2
        assert says in capsys.readouterr().err


def test_checksums_see_every_bit_and_their_order():
    weight = torch.randn(3, 5).bfloat16()
    other = weight.clone().view(torch.int16)
    other[1, 2] ^= 1
    for changed in (other.view(torch.bfloat16), weight.flip(0), -weight):
        assert checksum(changed) != checksum(weight)
    assert checksum(weight.clone()) == checksum(weight)


def test_help_tells_what_the_file_defines(capsys):
    with pytest.raises(SystemExit):
        main(['--help'])
    assert 'build(tp, pp, cp, vpp, ep)' in ' '.join(capsys.readouterr().out.split())
