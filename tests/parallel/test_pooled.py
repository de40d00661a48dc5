"""The promise for embeddings and values: padded on either side or packed, whatever the layout and the split."""

from __future__ import annotations

import pytest
import torch
from cover import IMPOSSIBLE, assert_covered, cover, on_few_ranks
from gradients import compare, padding_grad
from pooled import ALL, EVERY, GROUPS, KINDS, LENGTH, SIDES, SPLITS, reference, train
from ranks import run_ranks
from tiny_gpt import Layout, Spec

GPT = Spec(vocab_size=62, pad_vocab_to=4)
LENGTHS = [length for group in GROUPS for length in group]


def run_case(layout, cut, side, per_token=True, spec=GPT, timeout=90):
    """All kinds in one layout against the one-process reference: 1e-9 of each tensor's largest entry, in float64."""
    assert sorted(i for replica in cut.replicas for micro_batch in replica for i in micro_batch) == list(ALL)
    every = run_ranks(train, layout.world, spec, layout, cut, side, per_token, timeout=timeout)
    expected = reference(spec.on(layout))
    for kind in KINDS:
        results, want = [mine[kind] for mine in every], expected[kind]
        for result in results:
            assert result.loss == pytest.approx(want.loss, rel=1e-9), kind
            assert result.loss == results[0].loss, 'ranks must return the bitwise same loss'
            assert result.metrics == results[0].metrics, 'ranks must return the bitwise same metrics'
        assert results[0].metrics == pytest.approx(want.metrics, rel=1e-9, abs=1e-12), kind
        worst = compare([result.grads for result in results], want.grads)
        assert worst.error < 1e-9, (kind, worst)
        assert padding_grad([result.grads for result in results], spec) == 0
        check_outputs(results[-1].logps, want.logps, cut, side, per_token=KINDS[kind].head.pooling is None)


def check_outputs(found, expected, cut, side, per_token):
    """Of the last rank, which is on the last stage, in the last replica."""
    starts = [sum(len(group) for group in GROUPS[:i]) for i in range(len(GROUPS))]
    at = cut.replicas[-1]
    assert len(found) == len(at)
    for mine, groups in zip(found, at):
        which = [n for i in groups for n in range(starts[i], starts[i] + len(GROUPS[i]))]
        assert len(mine) == (1 if per_token and side == 'packed' else len(which))
        ends = torch.tensor([LENGTHS[n] for n in which]).cumsum(0).tolist()
        for row, n in enumerate(which):
            if not per_token:
                part = mine[row]
            elif side == 'packed':
                part = mine[0, ends[row] - LENGTHS[n] : ends[row]]
            else:
                part = mine[row, LENGTH - LENGTHS[n] :] if side == 'left' else mine[row, : LENGTHS[n]]
            torch.testing.assert_close(part, expected[n], rtol=1e-9, atol=1e-9)


FEW = on_few_ranks(EVERY)
COVER = cover(FEW)


@pytest.mark.parametrize('case', COVER, ids=str)
def test_losses_gradients_and_metrics_do_not_depend_on_layout_padding_or_split(case):
    run_case(case.layout, case.cut, case.side, case.per_token)


def test_the_short_list_covers_every_pair_of_settings():
    packed = {
        (('packed', False), ('side', 'packed')),
        (('packed', True), ('side', 'left')),
        (('packed', True), ('side', 'right')),
    }
    assert_covered(COVER, FEW, IMPOSSIBLE | packed)


@pytest.mark.long
@pytest.mark.parametrize('case', EVERY, ids=str)
def test_every_layout_padding_and_split(case):
    run_case(case.layout, case.cut, case.side, case.per_token)


@pytest.mark.parametrize('split', ['one', 'uneven'])
def test_four_replicas_one_of_which_may_be_empty(split):
    run_case(Layout(dp=4), SPLITS[split, 4], 'right')


def test_the_interleaved_schedule_and_tied_embeddings():
    run_case(Layout(pp=2, vpp=2, dp=2), SPLITS['uneven', 2], 'packed')
    tied = Spec(vocab_size=62, pad_vocab_to=4, tied=True)
    run_case(Layout(tp=2, pp=2), SPLITS['uneven', 1], 'left', spec=tied)


def test_the_reference_has_no_empty_and_no_saturated_parts():
    """Otherwise the suite would not see a wrong one."""
    for kind, result in reference(GPT).items():
        assert result.grads['embedding.word_embeddings.weight'].tensor.abs().max() > 1e-4, kind
        assert not result.grads['output_layer.weight'].tensor.any()
    assert len({round(result.loss, 9) for result in reference(GPT).values()}) == len(KINDS)
    assert len(SIDES) == 3
