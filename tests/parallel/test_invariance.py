"""The promise: one global batch gives the same loss, gradients and metrics under every layout and split."""

from __future__ import annotations

import functools

import pytest
import torch
from cover import EVERY, Case, cover
from gradients import compare, padding_grad
from invariance import UNEVEN, Split, reference, train_once
from ranks import run_ranks
from tiny_gpt import Layout, Spec

GPT = Spec(vocab_size=62, pad_vocab_to=4)
MIXTURE = Spec(vocab_size=62, pad_vocab_to=4, experts=4)


def check(spec: Spec, layout: Layout, split: Split, init: dict | None = None, **kwargs) -> None:
    """One case against the one-process reference: 1e-9 of each tensor's largest entry, in float64."""
    init = init or {}
    expected = reference(spec.on(layout), init)
    run = functools.partial(train_once, init=init, **kwargs)
    results = run_ranks(run, layout.world, spec, layout, split, timeout=90)
    for rank, result in enumerate(results):
        assert result.loss == pytest.approx(expected.loss, rel=1e-9), f'rank {rank}'
        assert result.loss == results[0].loss, 'ranks must return the bitwise same loss'
        assert result.metrics == results[0].metrics, 'ranks must return the same metrics'
        assert {key: result.metrics[key] for key in ('loss', 'correct_tokens', 'total_tokens')} == expected.metrics
        assert result.metrics['values']['loss'] == pytest.approx(expected.loss, rel=1e-9)
    worst = compare([result.grads for result in results], expected.grads)
    assert worst.error < 1e-9, worst
    assert padding_grad([result.grads for result in results], spec) == 0
    last = results[-1]  # the last rank is on the last stage, in the last replica
    at = split.replicas[-1]
    assert len(last.logps) == len(at)
    for found, rows in zip(last.logps, at):
        torch.testing.assert_close(found, expected.logps[0][list(rows)], rtol=1e-9, atol=1e-9)


def run_case(case: Case, head: str) -> None:
    check(MIXTURE if case.ep > 1 else GPT, case.layout, case.cut, head=head)


COVER = cover(EVERY)


@pytest.mark.parametrize('head', ['logits', 'linear'])
@pytest.mark.parametrize('case', COVER, ids=str)
def test_loss_gradients_and_metrics_do_not_depend_on_layout_or_split(case, head):
    run_case(case, head)


@pytest.mark.long
@pytest.mark.parametrize('head', ['logits', 'linear'])
@pytest.mark.parametrize('case', [case for case in EVERY if case not in COVER], ids=str)
def test_every_layout_and_split(case, head):
    run_case(case, head)


def test_the_short_list_covers_every_pair_of_settings():
    assert set().union(*(case.pairs() for case in COVER)) == set().union(*(case.pairs() for case in EVERY))


def test_four_replicas_of_which_one_has_no_trained_token():
    check(GPT, Layout(dp=4), UNEVEN[4])
