"""The promise for losses of pairs and their metric: padded or packed, whatever the layout and the split."""

from __future__ import annotations

import itertools

import pytest
import torch
from gradients import compare, padding_grad
from preference import ALL, EVERY, KINDS, LENGTHS, SPLITS, Case, in_order, pairwise, reference, train
from ranks import run_ranks
from tiny_gpt import Layout, Spec

GPT = Spec(vocab_size=62, pad_vocab_to=4)


def run_case(case, spec=GPT, layout=None, timeout=90):
    """All kinds in one layout against the one-process reference: 1e-9 of each tensor's largest entry, in float64."""
    layout = layout or case.layout
    which = tuple(sorted(i for replica in case.cut.replicas for micro_batch in replica for i in micro_batch))
    assert which == ALL
    every = run_ranks(
        train, layout.world, spec, layout, case.cut, case.packed, case.head, case.order, case.form, case.per_token,
        timeout=timeout,
    )  # fmt: skip
    expected = reference(GPT)
    for kind in KINDS:
        results, want = [mine[kind] for mine in every], expected[kind]
        for result in results:
            assert result.loss == pytest.approx(want.loss, rel=1e-9, abs=1e-12), kind
            assert result.loss == results[0].loss, 'ranks must return the bitwise same loss'
            assert result.metrics == results[0].metrics, 'ranks must return the bitwise same metrics'
        assert results[0].metrics == pytest.approx(want.metrics, rel=1e-9, abs=1e-12), kind
        worst = compare([result.grads for result in results], want.grads)
        assert worst.error < 1e-9, (kind, worst)
        assert padding_grad([result.grads for result in results], GPT) == 0
        check_logps(results[-1].logps, want.logps[0], case)


def check_logps(found, expected, case):
    """The last rank is on the last stage, in the last replica."""
    at = case.cut.replicas[-1]
    assert len(found) == len(at)
    for mine, pairs in zip(found, at):
        rows = in_order([(2 * i, 2 * i + 1) for i in pairs], case.order)
        want = expected[rows]
        if case.packed:
            want = torch.cat([want[n, : LENGTHS[row // 2][row % 2]] for n, row in enumerate(rows)])[None]
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-9)


COVER = pairwise()


@pytest.mark.parametrize('case', COVER, ids=str)
def test_losses_gradients_and_metrics_do_not_depend_on_layout_packing_or_split(case):
    run_case(case)


def test_the_short_list_covers_every_pair_of_settings():
    pairs = set().union(*(case.pairs() for case in EVERY))
    assert set().union(*(case.pairs() for case in COVER)) == pairs
    settings = {factor: {setting for f, setting in itertools.chain(*pairs) if f == factor} for factor, _ in
                itertools.chain(*pairs)}  # fmt: skip
    impossible = {(('tp', 1), ('sp', True)), (('dp', 1), ('split', 'empty'))}
    for first, second in itertools.combinations(settings, 2):
        for pair in itertools.product(settings[first], settings[second]):
            named = ((first, pair[0]), (second, pair[1]))
            assert named in pairs or named[::-1] in pairs or {named, named[::-1]} & impossible, named


@pytest.mark.long
@pytest.mark.parametrize('case', EVERY, ids=str)
def test_every_layout_packing_and_split(case):
    run_case(case)


def test_the_interleaved_schedule():
    case = Case(True, 1, 2, 1, 2, False, 'logits', 'threes', 'separated', 'outputs', False)
    run_case(case, layout=Layout(pp=2, vpp=2, dp=2))


def test_the_reference_has_no_empty_and_no_saturated_parts():
    """Otherwise the suite would not see a wrong one."""
    found = reference(GPT)
    for kind, result in found.items():
        largest = max(part.tensor.abs().max().item() for part in result.grads.values())
        assert largest > 1e-4, kind
    assert len({round(result.loss, 9) for result in found.values()}) == len(KINDS)
    assert 0 < found['kto'].metrics['accuracy'] < 1
    assert max(found['kto'].metrics['rewards/chosen'], found['kto'].metrics['rewards/rejected']) > 0, 'z > 0'
    assert ('ones', 1) in SPLITS
