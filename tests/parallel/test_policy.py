"""The promise for losses of sequences and their metrics: padded or packed, whatever the layout and the split."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from cover import IMPOSSIBLE, assert_covered, cover, on_few_ranks
from gradients import Part, collect_grads, collect_weights, compare, padding_grad
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from invariance import UNEVEN, Split, even
from policy import EVERY, INIT, LENGTHS, extras, micro_batches, reference, train
from ranks import run_ranks
from tiny_gpt import Layout, Spec, build, initialize, wrap

from twinkle_megatron import MegatronModel

GPT = Spec(vocab_size=62, pad_vocab_to=4)


def check(layout, split, packed, runs, per_token=True, spec=GPT, timeout=90):
    """Cases of one layout against the one-process reference: 1e-9 of each tensor's largest entry, in float64."""
    which = tuple(sorted(i for replica in split.replicas for micro_batch in replica for i in micro_batch))
    every = run_ranks(train, layout.world, spec, layout, split, packed, runs, per_token, timeout=timeout)
    for (loss, *_), results in zip(runs, zip(*every)):
        expected = reference(GPT.on(layout), loss, which)
        for result in results:
            assert result.loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-12)
            assert result.loss == results[0].loss, 'ranks must return the bitwise same loss'
            assert result.metrics == results[0].metrics, 'ranks must return the bitwise same metrics'
        check_metrics(results[0].metrics, expected.metrics, split)
        worst = compare([result.grads for result in results], expected.grads)
        assert worst.error < 1e-9, (loss, worst)
        assert padding_grad([result.grads for result in results], GPT) == 0
        check_logps(results[-1].logps, expected.logps[0], split.replicas[-1], packed)


def check_metrics(found, expected, split):
    assert found.keys() == expected.keys()
    order = [i for replica in split.replicas for micro_batch in replica for i in micro_batch]
    for name, values in expected.items():
        if name == 'records':
            which = sorted(order)
            want = [{**record, 'gsi': order.index(which[record['gsi']])} for record in values]
            assert [r.keys() for r in found[name]] == [r.keys() for r in want]
            for mine, theirs in zip(found[name], want):
                assert mine == pytest.approx(theirs, rel=1e-9)
        elif name == 'Accuracy':
            assert found[name] == values
        else:
            assert {key: found[name][key] for key in values} == pytest.approx(values, rel=1e-9, abs=1e-12), name


def check_logps(found, expected, at, packed):
    """The last rank is on the last stage, in the last replica."""
    assert len(found) == len(at)
    for mine, rows in zip(found, at):
        want = expected[list(rows)]
        if packed:
            want = torch.cat([want[i, : LENGTHS[row]] for i, row in enumerate(rows)])[None]
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-9)


def run_case(case):
    check(case.layout, case.cut, case.packed, [(case.loss, case.head, case.form)], case.per_token)


FEW = on_few_ranks(EVERY)
COVER = cover(FEW)


@pytest.mark.parametrize('case', COVER, ids=str)
def test_loss_gradients_and_metrics_do_not_depend_on_layout_packing_or_split(case):
    run_case(case)


def test_the_short_list_covers_every_pair_of_settings():
    assert_covered(COVER, FEW, IMPOSSIBLE)


def grouped():
    """EVERY by what one start of ranks can share."""
    groups = defaultdict(list)
    for case in EVERY:
        groups[case.packed, str(case.layout), case.split].append(case)
    return list(groups.values())


@pytest.mark.long
@pytest.mark.parametrize('cases', grouped(), ids=lambda cases: f'{cases[0]}'.split('-', 1)[1])
def test_every_loss_and_head_under_every_layout_packing_and_split(cases):
    first = cases[0]
    runs = [(case.loss, case.head, case.form) for case in cases]
    for per_token in (True, False):
        mine = [run for run, case in zip(runs, cases) if case.per_token is per_token]
        if mine:
            check(first.layout, first.cut, first.packed, mine, per_token)


@pytest.mark.parametrize('packed', [False, True], ids=['padded', 'packed'])
def test_one_process_gives_the_formulas(packed):
    runs = [(loss, head, form) for loss, (head, form) in zip(INIT, itertools.cycle([('logits', 'ragged'),
            ('linear', 'rows'), ('logits', 'aligned')]))]  # fmt: skip
    check(Layout(), UNEVEN[1], packed, runs)


def test_the_reference_clips_on_both_sides_and_by_the_sign():
    """Otherwise the suite would not see a wrong clip."""
    for loss in INIT:
        metrics = reference(GPT, loss).metrics
        for name in ('GRPOMetric', 'GSPOMetric', 'CISPOMetric'):
            low, high = (metrics[name][f'train/clip_ratio_{side}'] for side in ('low', 'high'))
            assert 0 < low < 1, (loss, name)
            assert 0 < high < 1, (loss, name)


VARIABLE = {'variable_seq_lengths': True, 'moe_token_dispatcher_type': 'alltoall'}


@pytest.mark.parametrize('packed', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize(
    ('layout', 'split', 'config'),
    [(Layout(pp=2, vpp=2, dp=2), even(2, 2), {}), (Layout(pp=2), UNEVEN[1], VARIABLE)],
    ids=['interleaved', 'variable lengths'],
)
def test_other_schedules(layout, split, config, packed):
    """The interleaved pipeline, and one whose micro-batches differ in shape."""
    spec = Spec(vocab_size=62, pad_vocab_to=4, config=config)
    check(layout, split, packed, [('GSPOLoss', 'logits', 'ragged'), ('GRPOLoss', 'linear', 'rows')], spec=spec)


def test_case_52_five_packed_documents_are_not_crossed():
    documents = Split('five', (((0, 3, 4, 5, 7),),))
    runs = [('GSPOLoss', 'logits', 'ragged'), ('CISPOLoss', 'linear', 'ragged')]
    for layout in (Layout(), Layout(cp=2)):
        check(layout, documents, True, runs)


@st.composite
def partitions(draw):
    """A layout, and the eight samples in any order cut into its replicas, and these into micro-batches."""
    layout = draw(st.sampled_from([Layout(dp=2), Layout(cp=2, dp=2), Layout(tp=2, dp=2), Layout(pp=2), Layout(cp=2)]))
    order, replicas = draw(st.permutations(range(8))), []
    middle = draw(st.integers(0, 8)) if layout.dp == 2 else 8
    for mine in (order[:middle], order[middle:])[: layout.dp]:
        cuts = sorted(draw(st.sets(st.integers(1, 7), max_size=3)))
        parts = [mine[first:last] for first, last in itertools.pairwise([0, *cuts, 8])]
        replicas.append(tuple(tuple(part) for part in parts if part))
    return layout, Split('drawn', tuple(replicas)), draw(st.booleans())


def check_drawn(drawn, loss, head):
    layout, split, packed = drawn
    check(layout, split, packed, [(loss, head, 'ragged')])


@settings(max_examples=6, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(partitions(), st.sampled_from(sorted(INIT)), st.sampled_from(['logits', 'linear']))
def test_any_partition_over_real_ranks_gives_the_same(drawn, loss, head):
    check_drawn(drawn, loss, head)


@pytest.mark.long
@settings(max_examples=60, deadline=None, database=None)
@given(partitions(), st.sampled_from(sorted(INIT)), st.sampled_from(['logits', 'linear']))
def test_many_partitions_over_real_ranks_give_the_same(drawn, loss, head):
    check_drawn(drawn, loss, head)


# ---- several calls before one step

CALLS = {
    1: [(((0, 1), (6,)),), (((3,),),), (((2,),),), (((4, 5, 7),),)],
    2: [(((0, 1), (2,)), ((3,),)), (((6,),), ((4,),)), (((2,),), ((6,),)), (((5,),), ((7,),))],
}
"""Of one and of two replicas; all calls together have each sample once, and samples 2 and 6, which train nothing, where
they fill a call of their own."""


def accumulate(layout, packed, per_token, finalize, losses):
    """Gradients of several calls, by loss."""
    initialize(layout)
    spec = Spec(vocab_size=62, pad_vocab_to=4, config={'calculate_per_token_loss': per_token})
    chunks = wrap(build(spec, layout))
    model = MegatronModel(chunks, vocab_size=62, head='logits')
    found = []
    for loss in losses:
        model.zero_grad()
        model.set_loss(loss, **INIT[loss])
        replica = dist.get_rank(model.groups.dp)
        for replicas, last in zip(CALLS[layout.dp], finalize, strict=True):
            split = Split('call', replicas)
            model.forward_backward(
                micro_batches(spec, split, replica, packed), finalize=last, **extras(spec, split, replica, packed)
            )
        found.append(collect_grads(chunks))
    return found


PATTERNS = {'at the end': (False, False, False, True), 'each': (True,) * 4, 'some': (False, True, False, True)}


@pytest.mark.parametrize(
    ('layout', 'packed', 'per_token', 'pattern'),
    [
        (Layout(), False, True, 'at the end'),
        (Layout(), True, False, 'each'),
        (Layout(dp=2), True, True, 'some'),
        (Layout(cp=2, dp=2), False, False, 'at the end'),
        (Layout(tp=2, pp=2), True, True, 'at the end'),
        (Layout(pp=2, dp=2), False, False, 'some'),
    ],
    ids=str,
)
def test_case_40_calls_before_one_step_give_the_mean_over_all_of_them(layout, packed, per_token, pattern):
    """Over all tokens for token means, over all sequences for sequence means, whatever each call has of them; a call
    that trains nothing has no part in it."""
    every = run_ranks(accumulate, layout.world, layout, packed, per_token, PATTERNS[pattern], list(INIT), timeout=90)
    for loss, grads in zip(INIT, zip(*every)):
        worst = compare(list(grads), reference(GPT, loss).grads)
        assert worst.error < 1e-9, (loss, worst)


def stepped(loss):
    """By how much a step of size 1 moves each weight of a bare chunk, after calls of which none is finalised."""
    initialize(Layout())
    (chunk,) = build(GPT)
    before = collect_weights([chunk])
    model = MegatronModel(chunk, torch.optim.SGD(chunk.parameters(), lr=1.0), vocab_size=62, head='logits')
    model.set_loss(loss, **INIT[loss])
    for replicas in CALLS[1]:
        split = Split('call', replicas)
        model.forward_backward(micro_batches(GPT, split, 0, False), finalize=False, **extras(GPT, split, 0))
    assert model.clip_grad_and_step(None) is not None
    after = collect_weights([chunk])
    return {name: Part(before[name].tensor - after[name].tensor) for name in before}


@pytest.mark.parametrize('loss', ['GSPOLoss', 'BNPOLoss'])
def test_the_step_finalises(loss):
    worst = compare(run_ranks(stepped, 1, loss), reference(GPT, loss).grads)
    assert worst.error < 1e-9, worst


def divided(layout, items):
    initialize(layout)
    model = MegatronModel(wrap(build(GPT, layout)), vocab_size=62, head='linear')
    model.set_loss('CISPOLoss', **INIT['CISPOLoss'])
    split = UNEVEN[layout.dp]
    replica = dist.get_rank(model.groups.dp)
    given = extras(GPT, split, replica)
    out = model.forward_backward(micro_batches(GPT, split, replica, False), **given, num_items_in_batch=items)
    return out['loss'], collect_grads(model.chunks)


@pytest.mark.parametrize('layout', [Layout(), Layout(cp=2, dp=2)], ids=str)
def test_cispo_divides_the_global_sum_by_num_items_in_batch(layout):
    """By the token count it is the token mean, on every layout and over micro-batches."""
    expected = reference(GPT, 'CISPOLoss')
    tokens = expected.metrics['Accuracy']['total_tokens']
    results = run_ranks(divided, layout.world, layout, tokens)
    assert all(loss == pytest.approx(expected.loss, rel=1e-9) for loss, _ in results)
    assert compare([grads for _, grads in results], expected.grads).error < 1e-9
    (loss, _), *_ = run_ranks(divided, layout.world, layout, 10)
    assert loss == pytest.approx(expected.loss * tokens / 10, rel=1e-9)
