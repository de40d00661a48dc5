"""The promise for losses of pairs and their metric: padded or packed, whatever the layout and the split."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cover import IMPOSSIBLE, assert_covered, cover, on_few_ranks
from gradients import collect_grads, compare, padding_grad
from invariance import Split
from preference import (
    ALL,
    BETA,
    EVERY,
    KINDS,
    LENGTHS,
    SPLITS,
    in_order,
    micro_batches,
    reference,
    reference_keywords,
    samples,
    train,
)
from ranks import run_ranks
from tiny_gpt import Layout, Spec, build, initialize, wrap

from twinkle_megatron import MegatronModel
from twinkle_megatron.loss import PreferenceLossBase

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
    expected = reference(GPT.on(layout))
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


FEW = on_few_ranks(EVERY)
COVER = cover(FEW)


@pytest.mark.parametrize('case', COVER, ids=str)
def test_losses_gradients_and_metrics_do_not_depend_on_layout_packing_or_split(case):
    run_case(case)


def test_the_short_list_covers_every_pair_of_settings():
    assert_covered(COVER, FEW, IMPOSSIBLE)


@pytest.mark.long
@pytest.mark.parametrize('case', EVERY, ids=str)
def test_every_layout_packing_and_split(case):
    run_case(case)


def test_the_interleaved_schedule():
    case = next(c for c in EVERY if c.packed and (c.tp, c.pp, c.cp, c.dp, c.split) == (1, 2, 1, 2, 'threes'))
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


# ---- how samples come, and what is refused


def _samples(layout, order, size, form):
    """1-D samples of all pairs of this replica, as a dataset gives them."""
    initialize(layout)
    chunks = wrap(build(GPT, layout))
    model = MegatronModel(chunks, vocab_size=GPT.vocab_size)
    replica = dist.get_rank(model.groups.dp)
    mine = [pair for micro_batch in SPLITS['threes', layout.dp].replicas[replica] for pair in micro_batch]
    whole = samples(GPT)
    sequences = in_order([whole[i] for i in mine], order)
    inputs = [{key: one[key] for key in ('input_ids', 'labels')} for one in sequences]
    if form == 'sums':
        given = {f'ref_{side}_logps': [whole[i][j]['ref'].nansum().item() for i in mine] for j, side in
                 enumerate(('chosen', 'rejected'))}  # fmt: skip
    elif form == 'outputs':
        longest = max(len(one['ref']) for one in sequences)
        rows = torch.full((len(sequences), longest + 1), torch.nan, dtype=torch.float64)
        for row, one in zip(rows, sequences):
            row[: len(one['ref'])] = one['ref']
        given = {'ref_outputs': {'logps': rows}}
    else:
        given = {'ref_logps': [one['ref'].tolist() for one in sequences]}
    results = {}
    for kind, (loss, init) in KINDS.items():
        model.zero_grad()
        model.set_loss(loss, **init, layout=order)
        model.set_metric('DPOMetric', is_training=True, beta=BETA, layout=order)
        out = model.forward_backward(inputs, micro_batch_size=size, **given)
        results[kind] = out['loss'], collect_grads(chunks), model.metric_values()
    return results


@pytest.mark.parametrize('form', ['sums', 'outputs', 'ragged'])
@pytest.mark.parametrize(
    ('layout', 'order', 'size'),
    [(Layout(), 'separated', np.int64(4)), (Layout(dp=2), 'separated', 2), (Layout(tp=2), 'interleaved', None)],
    ids=str,
)
def test_lists_of_samples_are_cut_between_pairs(layout, order, size, form):
    """Separated samples are all chosen ones, then all rejected ones: each micro-batch takes both of a pair."""
    expected = reference(GPT)
    every = run_ranks(_samples, layout.world, layout, order, size, form)
    for kind, want in expected.items():
        for loss, _, metrics in (mine[kind] for mine in every):
            assert loss == pytest.approx(want.loss, rel=1e-9)
            assert metrics == pytest.approx({k: v for k, v in want.metrics.items() if k != 'loss'}, rel=1e-9)
        assert compare([mine[kind][1] for mine in every], want.grads).error < 1e-9


def _several_calls(layout, loss, init, finalize):
    """The pairs of the batch, a call for each micro-batch, before one step."""
    initialize(layout)
    chunks = wrap(build(GPT, layout))
    model = MegatronModel(chunks, vocab_size=GPT.vocab_size)
    model.set_loss(loss, **init)
    replica, split = dist.get_rank(model.groups.dp), SPLITS['ones', layout.dp]
    for number, pairs in enumerate(split.replicas[replica]):
        replicas = tuple(((replica_pairs[number],) if i == replica else ()) for i, replica_pairs in
                         enumerate(split.replicas))  # fmt: skip
        assert replicas[replica] == (pairs,)
        call = Split('call', replicas)
        model.forward_backward(
            micro_batches(GPT, call, replica, False, 'interleaved'),
            finalize=finalize or number == len(split.replicas[replica]) - 1,
            **(reference_keywords(GPT, call, replica, False, 'interleaved', 'ragged') if loss == 'DPOLoss' else {}),
        )
    return collect_grads(chunks)


@pytest.mark.parametrize('finalize', [True, False])
@pytest.mark.parametrize('layout', [Layout(), Layout(dp=2)], ids=str)
def test_calls_before_one_step_give_the_mean_over_all_pairs(layout, finalize):
    """A pair without a trained token weighs nothing, nor does the call that holds nothing else."""
    for kind in ('ipo', 'simpo'):
        loss, init = KINDS[kind]
        results = run_ranks(_several_calls, layout.world, layout, loss, init, finalize)
        assert compare(results, reference(GPT)[kind].grads).error < 1e-9


WRONG = {
    'odd': 'must hold whole pairs of a chosen and a rejected sequence, got 3 sequences; no micro-batch may cut a pair',
    'odd packed': 'must hold whole pairs of a chosen and a rejected sequence, got 3 packed sequences',
    'odd samples': r'must hold pairs of a chosen and a rejected sample \(interleaved\), got 5 samples',
    'odd size': 'micro_batch_size must be even, so that no pair is cut, got 3',
    'no reference': 'DPOLoss must be given a reference',
    'half a reference': 'must be given together, got ref_chosen_logps only',
    'NaN': 'ref_chosen_logps of pair 2 must be a number, got NaN',
    'NaN at a token': 'ref_logps of sample 3 must be numbers at its trained tokens, got NaN',
    'too few': 'ref_rejected_logps must be one number for each of the 3 pairs of the call, got a list of 2 entries',
}


def _wrong(layout, what):
    """The second replica is given something wrong; both must hear of it, on all stages."""
    initialize(layout)
    model = MegatronModel(wrap(build(GPT, layout)), vocab_size=GPT.vocab_size)
    model.set_loss('DPOLoss')
    wrong = dist.get_rank(model.groups.dp) == 1
    split = Split('of three', (((0, 1, 2),), ((0, 1, 2),)))
    packed = what == 'odd packed'
    batches = micro_batches(GPT, split, 0, packed, 'interleaved')
    sums = reference_keywords(GPT, split, 0, packed, 'interleaved', 'sums')
    given, size = dict(sums), None
    if wrong and what == 'odd':
        batches = [{key: value[:3] for key, value in batches[0].items()}]
    elif wrong and packed:
        length = sum(LENGTHS[0]) + LENGTHS[1][0]
        batches = [{key: value[:, :length] for key, value in batches[0].items()}]
    elif wrong and what in ('odd samples', 'odd size'):
        rows = [{key: value[i] for key, value in batches[0].items()} for i in range(6)]
        batches, size = (rows[:5], None) if what == 'odd samples' else (rows, 3)
    elif wrong and what == 'no reference':
        given = {}
    elif wrong and what == 'half a reference':
        given.pop('ref_rejected_logps')
    elif wrong and what == 'NaN':
        given['ref_chosen_logps'] = [*given['ref_chosen_logps'][:2], torch.nan]
    elif wrong and what == 'NaN at a token':
        rows = reference_keywords(GPT, split, 0, packed, 'interleaved', 'ragged')['ref_logps']
        given = {'ref_logps': [*rows[:3], torch.full_like(rows[3], torch.nan), *rows[4:]]}
    elif wrong and what == 'too few':
        given['ref_rejected_logps'] = given['ref_rejected_logps'][:2]
    model.forward_backward(batches, micro_batch_size=size, **given)


@pytest.mark.parametrize('what', WRONG)
def test_what_is_wrong_on_one_replica_is_an_error_on_every_rank(what):
    layout = Layout(pp=2, dp=2) if what in ('odd', 'no reference', 'NaN') else Layout(dp=2)
    outcomes = run_ranks(_wrong, layout.world, layout, what, collect_errors=True)
    for outcome in outcomes:
        assert outcome.error == 'ValueError', outcome
        assert re.search(WRONG[what], outcome.message), outcome.message


def _disagreeing():
    initialize()
    model = MegatronModel(wrap(build(GPT)), vocab_size=GPT.vocab_size)
    model.set_loss('SimPOLoss', layout='separated')
    model.add_metric('DPOMetric')
    model.forward_backward(micro_batches(GPT, SPLITS['ones', 1], 0, False, 'separated'))


def test_loss_and_metric_must_agree_on_the_layout():
    (outcome,) = run_ranks(_disagreeing, 1, collect_errors=True)
    assert outcome.error == 'ValueError'
    assert "{'SimPOLoss': 'separated', 'DPOMetric': 'interleaved'}" in outcome.message


def _evaluated(layout):
    """The metric beside a loss that knows no pairs; and log-probs without a reference."""
    initialize(layout)
    model = MegatronModel(wrap(build(GPT, layout)), vocab_size=GPT.vocab_size)
    replica = dist.get_rank(model.groups.dp)
    split = SPLITS['uneven', layout.dp]
    batches = micro_batches(GPT, split, replica, False, 'interleaved')
    given = reference_keywords(GPT, split, replica, False, 'interleaved', 'sums')
    model.set_loss('ChunkedCrossEntropyLoss')
    model.add_metric('DPOMetric', beta=BETA)
    model.forward_only(batches, **given)
    model.forward_backward(batches, **given)
    model.set_loss('DPOLoss')
    nothing = model.forward_only(batches)
    assert nothing['loss'] == 0
    assert bool(nothing['logps']) is bool(model.groups.is_last_stage and batches)
    return model.metric_values(is_training=False), model.metric_values()


def test_the_metric_beside_a_loss_of_tokens():
    want = {key: value for key, value in reference(GPT)['ipo'].metrics.items() if key != 'loss'}
    for layout in (Layout(), Layout(pp=2, dp=2), Layout(cp=2)):
        for evaluated, trained in run_ranks(_evaluated, layout.world, layout):
            assert trained == pytest.approx(want, rel=1e-9)
            assert evaluated.keys() == want.keys()


def _custom(layout, form, order):
    """A custom loss with keywords of its own, beside the metric with its reference, on 1-D samples."""
    initialize(layout)
    chunks = wrap(build(GPT, layout))
    model = MegatronModel(chunks, vocab_size=GPT.vocab_size)
    mine = [
        i for micro_batch in SPLITS['threes', layout.dp].replicas[dist.get_rank(model.groups.dp)] for i in micro_batch
    ]
    sequences = in_order([samples(GPT)[i] for i in mine], order)
    inputs = [{key: one[key] for key in ('input_ids', 'labels')} for one in sequences]
    weights = [1.0 + int(one['input_ids'][0]) for one in sequences]

    def loss(inputs, outputs, weight):
        own = torch.equal(torch.as_tensor(weight), 1.0 + inputs['input_ids'][:, 0])
        assert own or layout.cp > 1, 'weights of other samples'  # a slice may lack the first token
        return (outputs['logps'].sum(1) * torch.as_tensor(weight)).mean()

    def everything(inputs, outputs, **keywords):
        assert keywords.keys() == {'weight'}, 'the keywords of the metric are not its own'
        return loss(inputs, outputs, **keywords)

    model.set_loss(loss if order == 'separated' else everything)
    model.add_metric('DPOMetric', beta=BETA, layout=order)
    given = {'ref_logps': [one['ref'].tolist() for one in sequences]}
    if form == 'sums':
        given = {f'ref_{side}_logps': [samples(GPT)[i][j]['ref'].nansum().item() for i in mine] for j, side in
                 enumerate(('chosen', 'rejected'))}  # fmt: skip
    elif form == 'reference':
        given = {'ref_logps': model.reference().logps(inputs, 4)}
    model.forward_backward(inputs, 4, weight=weights, **given)
    return model.metric_values()


@pytest.mark.parametrize('order', ['interleaved', 'separated'])
@pytest.mark.parametrize('form', ['ragged', 'sums', 'reference'])
def test_the_metric_beside_a_custom_loss(form, order):
    """Each gets its own keywords, those of the metric aligned; also under a pipeline, whose micro-batches it pads."""
    want = {key: value for key, value in reference(GPT)['ipo'].metrics.items() if key != 'loss'}
    for layout in (Layout(), Layout(pp=2)) if form != 'sums' else (Layout(dp=2), Layout(cp=2)):
        for found in run_ranks(_custom, layout.world, layout, form, order):
            assert found['chosen_logps'] == pytest.approx(want['chosen_logps'], rel=1e-9)
            if form == 'reference':  # the policy itself
                assert found['margin'] == pytest.approx(0, abs=1e-12)
            else:
                assert found == pytest.approx(want, rel=1e-9)


class Failing(PreferenceLossBase):
    """On the second context parallel rank only."""

    def pair_losses(self, chosen, rejected):
        if dist.get_rank(MegatronGroups.cp()) == 1:
            raise KeyError('alone')
        return (chosen.total - rejected.total) ** 2


class MegatronGroups:
    @staticmethod
    def cp():
        from megatron.core import parallel_state

        return parallel_state.get_context_parallel_group()


def _failing(layout):
    initialize(layout)
    model = MegatronModel(wrap(build(GPT, layout)), vocab_size=GPT.vocab_size)
    model.set_loss(Failing)
    model.add_metric('DPOMetric')
    model.forward_backward(micro_batches(GPT, SPLITS['ones', 1], 0, False, 'interleaved'))


@pytest.mark.parametrize('layout', [Layout(cp=2), Layout(tp=2, cp=2)], ids=str)
def test_somebody_elses_loss_of_pairs_that_fails_on_one_rank_is_an_error_on_all(layout):
    """It sums over context parallel ranks, whose backward pass is collective."""
    outcomes = run_ranks(_failing, layout.world, layout, collect_errors=True)
    assert [outcome.error for outcome in outcomes] == ['KeyError'] * layout.world
