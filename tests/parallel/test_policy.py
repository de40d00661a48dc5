"""The promise for losses of sequences: padded or packed, whatever the layout and the split."""

from __future__ import annotations

import functools

import pytest
import torch
from gradients import compare
from invariance import UNEVEN, even
from policy import INIT, LENGTHS, reference, train_once
from ranks import run_ranks
from tiny_gpt import Layout, Spec

GPT = Spec(vocab_size=62, pad_vocab_to=4)


def check(layout, split, loss, packed, spec=GPT, **arguments):
    """One case against the one-process reference: 1e-9 of each tensor's largest entry, in float64."""
    expected = reference(spec, loss)
    results = run_ranks(
        functools.partial(train_once, **arguments), layout.world, spec, layout, split, loss, packed, timeout=90
    )
    for result in results:
        assert result.loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-12)
        assert result.loss == results[0].loss
    worst = compare([result.grads for result in results], expected.grads)
    assert worst.error < 1e-9, worst
    last, at = results[-1], split.replicas[-1]
    for found, rows in zip(last.logps, at, strict=True):
        want = expected.logps[0][list(rows)]
        if packed:
            want = torch.cat([want[i, : LENGTHS[row]] for i, row in enumerate(rows)])[None]
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('loss', INIT)
@pytest.mark.parametrize('packed', [False, True], ids=['padded', 'packed'])
def test_one_process_gives_the_formula(loss, packed):
    check(Layout(), UNEVEN[1], loss, packed)


@pytest.mark.parametrize('packed', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize(
    ('loss', 'layout', 'split'),
    [
        ('GRPOLoss', Layout(tp=2, pp=2), even(1, 2)),
        ('GSPOLoss', Layout(cp=2, dp=2), UNEVEN[2]),
        ('GSPOLoss', Layout(tp=2, cp=2, sp=True), UNEVEN[1]),
    ],
    ids=str,
)
def test_layouts(loss, layout, split, packed):
    check(layout, split, loss, packed)
