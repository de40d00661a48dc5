"""What patched Megatron-LM scripts call: their arguments, and `pretrain` with the loss that these ask for."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import stand_in_pretrain
import torch
from ranks import run_ranks
from stand_in_pretrain import Settings
from test_attach import PER_TOKEN, check_same
from tiny_gpt import Layout

from twinkle_megatron import megatron_lm

OURS = ['--twinkle-loss', 'cross_entropy', '--twinkle-metrics', 'accuracy,loss', '--twinkle-vocab-size', '62']


def parse(argv: list[str], provider: Any = None, known: bool = False) -> argparse.Namespace:
    parser = megatron_lm.with_arguments(provider)(argparse.ArgumentParser(prog='pretrain_gpt.py', allow_abbrev=False))
    return parser.parse_known_args(argv)[0] if known else parser.parse_args(argv)


class Writer:
    """TensorBoard's."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert isinstance(value, float)
        self.scalars.append((name, step))


def megatron_training(args: argparse.Namespace, writer: Writer, run_schedule: Any) -> ModuleType:
    """Stands for `megatron.training` of a checkout: its arguments, its writer, its evaluation."""
    package, variables, training = map(ModuleType, ('training', 'global_vars', 'training'))
    package.get_args = variables.get_args = lambda: args
    variables.get_tensorboard_writer = lambda: writer

    def evaluate(chunks: list[Any], seed: int) -> list[float]:
        with torch.no_grad():
            return [loss for _ in range(2) for loss in run_schedule(chunks, seed, forward_only=True)]

    training.evaluate = evaluate
    for name, module in (('', package), ('.global_vars', variables), ('.training', training)):
        sys.modules['megatron.training' + name] = module
    return training


def run(layout: Layout, argv: list[str]) -> SimpleNamespace:
    args, writer = parse(argv), Writer()
    args.curr_iteration = 6
    training = megatron_training(args, writer, stand_in_pretrain.run_schedule)
    plain = training.evaluate

    def evaluate_all(chunks: list[Any], seed: int, forward_only: bool = False) -> list[float]:
        losses = schedule(chunks, seed, forward_only)
        if not forward_only:
            for chunk in chunks:
                chunk.eval()
            training.evaluate(chunks, 50)
            training.evaluate(chunks, 51)
            for chunk in chunks:
                chunk.train()
            args.curr_iteration += 1
        return losses

    schedule = stand_in_pretrain.run_schedule
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_in_pretrain, 'run_schedule', evaluate_all)
        result = megatron_lm.with_losses(stand_in_pretrain.pretrain)(Settings(PER_TOKEN, layout, stock_loss=True))
    assert training.evaluate is plain, 'put back'
    return SimpleNamespace(result=result, lines=out.getvalue().splitlines(), scalars=writer.scalars)


@pytest.mark.parametrize('layout', [Layout(dp=2), Layout(pp=2)], ids=str)
def test_a_patched_script_trains_the_same_and_tells_each_evaluation_apart(layout):
    ours = run_ranks(run, 2, layout, [*OURS, '--twinkle-every', '2'])
    without = run_ranks(stand_in_pretrain.pretrain, 2, Settings(PER_TOKEN, layout))
    check_same([rank.result for rank in ours], without)
    (printed,) = [rank.lines for rank in ours if rank.lines]
    what = [line.split(' accuracy ')[0].removeprefix('twinkle: ') for line in printed]
    evaluation = ['evaluation at iteration {}'] * 2
    assert what == [*(text.format(7) for text in evaluation), 'iteration 8', *(text.format(8) for text in evaluation)]
    writers = [rank.scalars for rank in ours]
    assert ('twinkle/accuracy', 8) in writers[0]
    assert writers[0].count(('twinkle/loss validation', 8)) == 2


def test_a_patched_script_without_a_loss_named_is_as_it_was():
    ours = run_ranks(run, 2, Layout(dp=2), [])
    check_same(
        [rank.result for rank in ours],
        run_ranks(stand_in_pretrain.pretrain, 2, Settings(PER_TOKEN, Layout(dp=2), stock_loss=True)),
    )
    assert not any(rank.lines or rank.scalars for rank in ours)


def test_arguments_stand_beside_those_that_the_script_adds():
    def theirs(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument('--export', action='store_true')
        return parser

    for known in (False, True):
        found = parse(['--export', *OURS, '--twinkle-loss-arg', 'label_smoothing=0.1'], theirs, known)
        assert (found.export, found.twinkle_loss, found.twinkle_every) == (True, 'cross_entropy', 100)
    assert parse([]).twinkle_loss is None


@pytest.mark.parametrize(
    ('argv', 'says'),
    [
        (['--twinkle-metrics', 'accuracy'], '--twinkle-metrics needs --twinkle-loss'),
        (['--twinkle-loss-arg', 'a=1'], '--twinkle-loss-arg needs --twinkle-loss'),
        (['--twinkle-loss', 'dpo'], 'MegatronModel.forward_backward'),
        (['--twinkle-loss', 'cross_entropyy'], "--twinkle-loss: there is no loss 'cross_entropyy'; did you mean"),
        (['--twinkle-loss', 'cross_entropy', '--twinkle-loss-arg', 'label_smoothng=1'], "'label_smoothing'"),
        (['--twinkle-loss', 'cross_entropy', '--twinkle-loss-arg', 'label_smoothing'], '--twinkle-loss-arg must be'),
        (['--twinkle-loss', 'cross_entropy', '--twinkle-every', '0'], 'every must be'),
    ],
)
def test_a_wrong_argument_ends_the_script_while_it_parses(argv, says, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
