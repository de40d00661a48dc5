"""Keywords of a call: every form that they may have becomes the same tensor, aligned with the labels; and what is wrong
with any other."""

from __future__ import annotations

import functools
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from tiny_gpt import Layout, Spec, build, initialize, wrap

from twinkle_megatron import MegatronModel
from twinkle_megatron.batch import CONSTANT, PER_TOKEN, WholeRows, align_extras, as_micro_batches
from twinkle_megatron.loss import GRPOLoss
from twinkle_megatron.metric import GRPOMetric

F64 = torch.float64
KINDS = {'old': PER_TOKEN, 'advantages': PER_TOKEN, 'power': CONSTANT}
NAN = float('nan')

# Four sequences of 5, 3, 4 and 2 tokens, of which 3, 1, 4 and 0 are trained.
TRAINED = [[0, 0, 1, 1, 1], [0, 1, 0], [1, 1, 1, 1], [0, 0]]
GIVEN = [[-1.0, -2.0, -3.0], [-4.0], [-5.0, -6.0, -7.0, -8.0], []]
SCALARS = [0.5, -1.5, 2.5, 9.0]


def at_tokens(values, trained, fill=0.0):
    """A whole row from its trained tokens' values."""
    left = iter(values)
    return [next(left) if t else fill for t in trained]


def joined(rows):
    return [*itertools.chain(*rows)]


def rows_of(trained, width):
    labels = [[7 if t else -100 for t in row] + [-100] * (width - len(row)) for row in trained]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in trained]
    return {'labels': torch.tensor(labels), 'attention_mask': torch.tensor(mask)}


def packed(trained, **told):
    labels = [7 if t else -100 for row in trained for t in row]
    return {'labels': torch.tensor([labels]), **told}


def bounds(trained):
    return torch.tensor([0, *map(len, trained)]).cumsum(0)


LAYOUTS = {
    'one padded micro-batch': [rows_of(TRAINED, 6)],
    'two padded micro-batches': [rows_of(TRAINED[:1], 5), rows_of(TRAINED[1:], 4)],
    'one packed row': [packed(TRAINED, cu_seqlens=bounds(TRAINED))],
    'two packed rows': [
        packed(TRAINED[:2], position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])),
        packed(TRAINED[2:], packed_seq_params=SimpleNamespace(cu_seqlens_q=bounds(TRAINED[2:]))),
    ],
    'rows and a packed row': [rows_of(TRAINED[:2], 7), packed(TRAINED[2:], cu_seqlens=bounds(TRAINED[2:]))],
}
"""The same four sequences."""


def expected(name, values):
    """The aligned tensors, each sequence's values at its trained tokens, by filling in one after the other."""
    left, out = iter([x for row in values for x in row]), []
    for batch in LAYOUTS[name]:
        flat = [next(left) if label != -100 else 0.0 for label in batch['labels'].flatten().tolist()]
        out.append(torch.tensor(flat, dtype=F64).view(batch['labels'].shape))
    return out


def aligned(name, value, key='old', **options):
    rows = [WholeRows.of(batch, -100) for batch in LAYOUTS[name]]
    return [part[key] for part in align_extras({key: value}, KINDS, rows, **options)]


def check(name, value, want, **options):
    found = aligned(name, value, **options)
    assert len(found) == len(want)
    for mine, right in zip(found, want):
        assert mine.dtype.is_floating_point
        assert mine.shape == right.shape
        assert torch.equal(mine.to(F64), right)


def as_objects(items):
    out = np.empty(len(items), dtype=object)
    out[:] = items
    return out


FULL = [at_tokens(values, trained, fill=NAN) for values, trained in zip(GIVEN, TRAINED)]
"""All tokens of each sequence; what stands at ignored ones is not looked at."""

ROW_FORMS = {
    'trained tokens, lists': GIVEN,
    'trained tokens, tuples': tuple(map(tuple, GIVEN)),
    'trained tokens, tensors': [torch.tensor(x) for x in GIVEN],
    'trained tokens, float64 tensors': [torch.tensor(x, dtype=F64) for x in GIVEN],
    'trained tokens, arrays': [np.array(x, dtype=np.float32) for x in GIVEN],
    'trained tokens, lists of 0-d tensors': [[torch.tensor(v) for v in x] for x in GIVEN],
    'trained tokens, lists of numpy scalars': [[np.float32(v) for v in x] for x in GIVEN],
    'trained tokens, an array of objects': as_objects([np.array(x) for x in GIVEN]),
    'all tokens, lists': FULL,
    'all tokens, tensors': [torch.tensor(x) for x in FULL],
    'all tokens, rows [1, n]': [torch.tensor(x)[None] for x in FULL],
    'all tokens and padding, lists': [x + [NAN] * (8 - len(x)) for x in FULL],
    'all tokens and padding, a tensor [S, L]': torch.tensor([x + [NAN] * (8 - len(x)) for x in FULL]),
    'all tokens and padding, an array [S, L]': np.array([x + [3.0] * (8 - len(x)) for x in FULL]),
    'some rows of all tokens, some of the trained ones': [FULL[0], GIVEN[1], np.array(FULL[2]), torch.tensor([])],
    'a tensor that wants a gradient': [torch.tensor(x, requires_grad=True) for x in GIVEN],
}


@pytest.mark.parametrize('form', ROW_FORMS)
@pytest.mark.parametrize('name', LAYOUTS)
def test_every_form_of_rows_gives_the_same(name, form):
    check(name, ROW_FORMS[form], expected(name, GIVEN))


SCALAR_FORMS = {
    'list': SCALARS,
    'tuple': tuple(SCALARS),
    'tensor': torch.tensor(SCALARS),
    'float64 tensor': torch.tensor(SCALARS, dtype=F64),
    'column': torch.tensor(SCALARS)[:, None],
    'array': np.array(SCALARS),
    'array [S, 1]': np.array(SCALARS, dtype=np.float32)[:, None],
    '0-d tensors': [torch.tensor(x) for x in SCALARS],
    '0-d arrays': [np.array(x) for x in SCALARS],
    'numpy scalars': [np.float64(x) for x in SCALARS],
    'lists of one': [[x] for x in SCALARS],
    'tensors of one': [torch.tensor([x]) for x in SCALARS],
    'mixed': [0.5, torch.tensor(-1.5), np.float32(2.5), torch.tensor([9.0])],
    'some as rows': [0.5, [-1.5], [2.5] * 4, []],
}


@pytest.mark.parametrize('form', SCALAR_FORMS)
@pytest.mark.parametrize('name', LAYOUTS)
def test_every_form_of_one_number_a_sequence_gives_the_same(name, form):
    """A sequence without trained tokens has one too."""
    check(name, SCALAR_FORMS[form], expected(name, [[x] * sum(t) for x, t in zip(SCALARS, TRAINED)]))


def test_integers_and_one_number_for_all():
    for value in ([1, 2, 3, 4], torch.tensor([1, 2, 3, 4]), np.arange(1, 5)):
        check('one packed row', value, expected('one packed row', [[1.0] * 3, [2.0], [3.0] * 4, []]))
    for value in (2.0, torch.tensor(2.0), np.float64(2.0), 2):
        check('two packed rows', value, expected('two packed rows', [[2.0] * 3, [2.0], [2.0] * 4, []]))


@pytest.mark.parametrize('name', LAYOUTS)
def test_aligned_tensors_are_taken_as_they_are(name):
    """One for each micro-batch, as `forward_only` returns them; NaN where nothing is trained becomes 0."""
    want = expected(name, GIVEN)
    given = [w.masked_fill(batch['labels'] == -100, NAN) for w, batch in zip(want, LAYOUTS[name])]
    check(name, given, want)
    check(name, tuple(x.float() for x in given), want)
    check(name, [x.numpy() for x in given], want)
    if len(given) == 1:
        check(name, given[0], want)
        check(name, given[0].numpy(), want)


def test_one_tensor_over_micro_batches_of_equal_width():
    """`[B, s]` with the rows of all, padded or packed."""
    rows = [{'labels': torch.tensor([[1, -100, 2]])}, {'labels': torch.tensor([[3, 4, -100], [-100, -100, 5]])}]
    whole = torch.arange(9.0).view(3, 3)
    (first, second) = align_extras({'old': whole}, KINDS, [WholeRows.of(r, -100) for r in rows])
    assert first['old'].tolist() == [[0, 0, 2]]
    assert second['old'].tolist() == [[3, 4, 0], [0, 0, 8]]
    rows = [packed([[1, 1], [0, 1]], cu_seqlens=[0, 2, 4]), packed([[1], [1, 1, 1]], cu_seqlens=[0, 1, 4])]
    whole = torch.arange(8.0).view(2, 4)
    (first, second) = align_extras({'old': whole}, KINDS, [WholeRows.of(r, -100) for r in rows])
    assert first['old'].tolist() == [[0, 1, 0, 3]]
    assert second['old'].tolist() == [[4, 5, 6, 7]]


def test_rows_of_one_sequence_each_may_have_two_dimensions():
    """As many micro-batches as sequences: aligned `[1, s]`, or trained tokens `[1, n]`."""
    rows = [WholeRows.of({'labels': torch.tensor([row])}, -100) for row in ([1, -100, 2], [-100, 3, -100, 4])]
    want = [[[1, 0, 2]], [[0, 3, 0, 4]]]
    for value in (
        [torch.tensor([[1.0, NAN, 2.0]]), torch.tensor([[NAN, 3.0, NAN, 4.0]])],
        [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])],
    ):
        assert [part['old'].tolist() for part in align_extras({'old': value}, KINDS, rows)] == want
    (found,) = align_extras({'old': [torch.tensor([[1.0, 2.0]])]}, KINDS, rows[:1])
    assert found['old'].tolist() == want[0]


def test_padding_inside_a_packed_row_is_left_out():
    """Sequences of 3 and 1 tokens with room for 4 each: rows have 3 and 1 entries, or as many as are trained."""
    batch = {'labels': torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), 'cu_seqlens': torch.tensor([0, 3, 4]),
             'cu_seqlens_padded': torch.tensor([0, 4, 8])}  # fmt: skip
    whole = [WholeRows.of(batch, -100)]
    (found,) = align_extras({'old': [[1.0, 2.0, 3.0], [4.0]]}, KINDS, whole)
    assert found['old'].tolist() == [[1, 2, 3, 0, 4, 0, 0, 0]]
    (found,) = align_extras({'old': [1.0, 2.0]}, KINDS, whole)
    assert found['old'].tolist() == [[1, 1, 1, 0, 2, 0, 0, 0]]
    (found,) = align_extras({'old': torch.arange(8.0)[None]}, KINDS, whole)
    assert found['old'].tolist() == [[0, 1, 2, 0, 4, 0, 0, 0]]


@pytest.mark.parametrize('shape', [(4,), (1, 4)], ids=['labels [s]', 'labels [1, s]'])
def test_one_dimensional_tensors_aligned_with_one_row(shape):
    labels = torch.tensor([1, -100, 2, 3]).view(shape)
    for told in ({}, {'position_ids': torch.tensor([0, 1, 0, 1]).view(shape)}):
        rows = [WholeRows.of({'labels': labels, **told}, -100)]
        for value in (torch.tensor([1.0, NAN, 3.0, 4.0]), np.array([1.0, NAN, 3.0, 4.0]), [1.0, NAN, 3.0, 4.0]):
            (found,) = align_extras({'old': value}, KINDS, rows)
            assert found['old'].tolist() == [[1, 0, 3, 4]]


def test_unshifted_rows_stand_where_their_tokens_are_predicted():
    """Entry i is of token i: at place i − 1 of the labels. The entry of the first token, which nothing predicts, goes;
    at the end of a row nothing is trained."""
    trained = [[0, 1, 1, 0], [1, 0], [1, 1, 0]]
    want = [[0.0, -1.0, -2.0, 0.0], [-3.0, 0.0], [-4.0, -5.0, 0.0]]
    unshifted = [[NAN, NAN, -1.0, -2.0], [NAN, -3.0], [NAN, -4.0, -5.0]]
    flat = joined(want)
    rows = [packed(trained, cu_seqlens=bounds(trained))]

    def packed_row(value, **options):
        (found,) = align_extras({'old': value}, KINDS, [WholeRows.of(r, -100) for r in rows], **options)
        return found['old'].tolist()

    assert packed_row(want) == [flat]
    assert packed_row(unshifted, shifted=False) == [flat]
    assert packed_row([torch.tensor(x) for x in unshifted], shifted=False) == [flat]
    assert packed_row(torch.tensor([joined(unshifted)]), shifted=False) == [flat]
    assert packed_row([torch.tensor([joined(unshifted)])], shifted=False) == [flat]
    response_only = [[-1.0, -2.0], [-3.0], [-4.0, -5.0]]
    assert packed_row(response_only, shifted=False) == [flat], 'the trained tokens alone need no shift'
    assert packed_row([7.0, 8.0, 9.0], shifted=False) == [[0, 7, 7, 0, 8, 0, 9, 9, 0]]
    rows = [rows_of(trained, 5)]
    padded = [x + [0.0] * (5 - len(x)) for x in want]
    assert packed_row(unshifted, shifted=False) == padded
    assert packed_row(torch.tensor([x + [NAN] * (5 - len(x)) for x in unshifted]), shifted=False) == padded


def test_none_stays_none_and_constants_go_to_every_micro_batch():
    rows = [WholeRows.of(batch, -100) for batch in LAYOUTS['two packed rows']]
    extra = {'old': None, 'power': [1, 2, 3, 4], 'unknown': 'abc'}
    assert align_extras(extra, KINDS, rows) == [extra, extra]
    assert align_extras({'old': [], 'advantages': None}, KINDS, []) == []
    with pytest.raises(ValueError, match='old must have one entry for each of the 0 sequences'):
        align_extras({'old': [[1.0]]}, KINDS, [WholeRows.of({'labels': torch.zeros(0, 3).long()}, -100)])


def test_the_inputs_are_not_written_to():
    value = torch.tensor(SCALARS, requires_grad=True)
    rows = torch.tensor([x + [NAN] * (8 - len(x)) for x in FULL])
    before = rows.clone()
    (found,) = aligned('one padded micro-batch', value)
    assert not found.requires_grad
    aligned('one padded micro-batch', rows)
    assert torch.equal(rows.nan_to_num(1), before.nan_to_num(1))
    labels = torch.tensor([[1, -100]])
    given = torch.tensor([[1.0, 2.0]])
    align_extras({'old': given}, KINDS, [WholeRows.of({'labels': labels}, -100)])
    assert given.tolist() == [[1, 2]]


WRONG = {
    'too few entries': ([1.0, 2.0, 3.0], r'old must have one entry for each of the 4 sequences.*got 3 entries'),
    'too many entries': (torch.ones(5), 'old must have one entry for each of the 4 sequences.*got 5 entries'),
    'no entry': ([], 'old must have one entry for each of the 4 sequences of the call.*got 0 entries'),
    'one token too few': (
        [GIVEN[0][:2], *GIVEN[1:]], r'old of sample 0 must have 1 entry, 3 \(its trained tokens\) or 5 \(all.*got 2'),
    'one token too many': ([*GIVEN[:2], [*GIVEN[2], 1.0, 1.0][:3], []], 'old of sample 2 .* got 3'),
    'between trained and all': ([[1.0] * 4, *GIVEN[1:]], 'old of sample 0 .* got 4'),
    'no token': ([*GIVEN[:2], [], []], 'old of sample 2 must have .* got 0'),
    'short rows of a tensor': (torch.ones(4, 2), 'old of sample 0 .* got 2'),
    'matrices of micro-batches': ([torch.ones(2, 6)] * 4, 'old of sample 0 .* one row, and these are several'),
    'a text': ([*GIVEN[:3], 'none'], 'old of sample 3 must be numbers, got str'),
    'a text among numbers': ([1.0, '2.0x', 3.0, 4.0], 'old of sample 1 must be numbers, got str'),
    'None among numbers': ([1.0, 2.0, None, 4.0], 'old of sample 2 must be numbers, got NoneType'),
    'None in a row': ([[None, -1.0, -2.0, -3.0, -4.0], *GIVEN[1:]], 'old of sample 0 must be numbers, got a list'),
    'None for a row': ([*GIVEN[:3], None], 'old of sample 3 must be numbers, got NoneType'),
    'a dictionary': ({'a': 1.0}, 'old must be numbers, got dict'),
    'one text': ('abc', 'old must be numbers, got str'),
}  # fmt: skip


@pytest.mark.parametrize('form', WRONG)
@pytest.mark.parametrize('name', ['one padded micro-batch', 'one packed row'])
def test_any_other_length_names_the_keyword_and_the_sample(name, form):
    value, words = WRONG[form]
    with pytest.raises(ValueError, match=words):
        aligned(name, value)


def test_a_sample_is_named_by_its_place_in_the_whole_call():
    with pytest.raises(ValueError, match='old of sample 2 '):
        aligned('two packed rows', [*GIVEN[:2], [1.0, 2.0], []])
    with pytest.raises(ValueError, match='old of sample 3 must be numbers'):
        aligned('two packed rows', [*GIVEN[:3], ['x', 'y']])
    with pytest.raises(ValueError, match=r'old\[1\] must have the shape of the labels of its micro-batch, \(1, 6\)'):
        aligned('two packed rows', [torch.ones(1, 8), torch.ones(1, 7)])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_mix_of_forms_and_micro_batches_gives_the_same(data):
    trained = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=5))
    values = [[float(10 * i + j) + 0.5 for j in range(sum(t))] for i, t in enumerate(trained)]
    entries = []
    for t, mine in zip(trained, values):
        kind = data.draw(st.sampled_from(['trained', 'all', 'longer']))
        row = mine if kind == 'trained' else at_tokens(mine, t, NAN) + [NAN] * (2 if kind == 'longer' else 0)
        ambiguous = len(row) == 1 and sum(t) != 1  # one entry stands for every token
        entries.append(data.draw(st.sampled_from([list, np.array, torch.tensor]))(mine if ambiguous else row))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(trained) - 1))) if len(trained) > 1 else [])
    batches, want = [], []
    for first, last in zip([0, *cuts], [*cuts, len(trained)]):
        part = trained[first:last]
        if data.draw(st.booleans()):
            batches.append(packed(part, cu_seqlens=bounds(part)))
            width = None
        else:
            width = max(map(len, part)) + data.draw(st.integers(0, 2))
            batches.append(rows_of(part, width))
        full = [at_tokens(v, t) for v, t in zip(values[first:last], part)]
        want.append([joined(full)] if width is None else [row + [0.0] * (width - len(row)) for row in full])
    found = align_extras({'old': entries}, KINDS, [WholeRows.of(batch, -100) for batch in batches])
    assert [part['old'].tolist() for part in found] == want


# ---- samples `[s]`, which are collated

SAMPLES = [{'input_ids': torch.arange(len(t)), 'labels': torch.tensor([7 if x else -100 for x in t])} for t in TRAINED]


@pytest.mark.parametrize('size', [1, 2, 3, 4, None])
@pytest.mark.parametrize('form', ['trained tokens, lists', 'all tokens, tensors', 'all tokens and padding, lists'])
def test_extras_of_samples_that_are_collated(size, form):
    """Each sample keeps its own length in a micro-batch that is padded to the longest."""
    batches = as_micro_batches(SAMPLES, size)
    rows = [WholeRows(batch, None, -100) for batch in batches]
    found = [x for part in align_extras({'old': ROW_FORMS[form]}, KINDS, rows) for x in part['old'].tolist()]
    for mine, values, trained in zip(found, GIVEN, TRAINED, strict=True):
        full = at_tokens(values, trained)
        assert mine == full + [0.0] * (len(mine) - len(full))


# ---- called by hand, and through MegatronModel


def test_a_loss_called_by_hand_takes_every_form():
    batch = LAYOUTS['one padded micro-batch'][0]
    logps = -torch.rand(4, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    losses = [
        GRPOLoss()(batch, {'logps': logps}, old_logps=old, advantages=advantages)['loss'].item()
        for old in (ROW_FORMS['trained tokens, lists'], ROW_FORMS['all tokens and padding, a tensor [S, L]'])
        for advantages in (SCALAR_FORMS['list'], SCALAR_FORMS['array [S, 1]'], [[x] * 6 for x in SCALARS])
    ]
    assert max(losses) - min(losses) < 1e-12
    with pytest.raises(ValueError, match='advantages of sample 1 must have'):
        GRPOLoss()(batch, {'logps': logps}, advantages=[[1.0] * 3, [], [1.0] * 4, []])


GPT = Spec(vocab_size=62, layers=2)


def model_on(layout, **init):
    initialize(layout)
    model = MegatronModel(wrap(build(GPT, layout)), vocab_size=62, head='logits')
    model.set_loss('GRPOLoss', **init)
    model.add_metric(GRPOMetric)
    return model


def samples_of(replica):
    """Two samples, of 6 and 4 tokens, of which the last 3 and 2 are trained."""
    generator = torch.Generator().manual_seed(replica)
    ids = [torch.randint(0, 62, (n,), generator=generator) for n in (6, 4)]
    return [
        {'input_ids': x, 'labels': torch.cat([torch.full((len(x) - k,), -100), x[-k:]])} for x, k in zip(ids, (3, 2))
    ]


def call(layout, place, value):
    """Replica 1 has `value` in its second sample, at its n-th token; the others have numbers only."""
    model = model_on(layout)
    replica = dist.get_rank(model.groups.dp)
    rows = [torch.full((6,), -1.0), torch.full((4,), -1.0)]
    if replica == dist.get_world_size(model.groups.dp) - 1:
        rows[1][place] = value
    return model.forward_backward(
        samples_of(replica), micro_batch_size=1, old_logps=rows, advantages=[1.0, -1.0], ref_logps=None
    )['loss']


@pytest.mark.parametrize('layout', [Layout(), Layout(tp=2, pp=2), Layout(dp=2), Layout(cp=2, dp=2)], ids=str)
def test_nan_at_a_trained_token_is_an_error_on_every_rank_that_names_the_sample(layout):
    words = r'old_logps of sample 1 must be numbers at its trained tokens, got NaN \(1 in micro-batch 1\)'
    outcomes = run_ranks(functools.partial(call, layout, 3, NAN), layout.world, collect_errors=True)
    assert [o.error for o in outcomes] == ['ValueError'] * layout.world
    last_stage = layout.world // layout.pp * (layout.pp - 1)  # where keywords are looked at
    first = last_stage + (layout.cp * layout.tp if layout.dp == 2 else 0)
    for outcome in outcomes:
        assert outcome.message.startswith(f'on rank {first}: '), outcome.message
        assert re.search(words, outcome.message)


@pytest.mark.parametrize('layout', [Layout(), Layout(cp=2, dp=2)], ids=str)
def test_nan_at_an_ignored_token_is_none(layout):
    (want, *_) = run_ranks(functools.partial(call, layout, 0, -1.0), layout.world)
    assert run_ranks(functools.partial(call, layout, 0, NAN), layout.world) == [want] * layout.world


def wrong_lengths(layout):
    model = model_on(layout)
    replica = dist.get_rank(model.groups.dp)
    rows = [[-1.0] * 3, [-1.0] * 2] if replica == 0 else [[-1.0] * 3, [-1.0] * 3]
    return model.forward_backward(samples_of(replica), 2, old_logps=rows, advantages=[1.0, -1.0])


def test_a_wrong_length_on_one_rank_is_raised_on_every_rank():
    outcomes = run_ranks(wrong_lengths, 2, Layout(dp=2), collect_errors=True)
    words = 'on rank 1: old_logps of sample 1 must have 2 (its trained tokens) or 4 (all of its tokens), got 3'
    assert [(o.error, o.message) for o in outcomes] == [('ValueError', words)] * 2


def forms(layout):
    """The loss and the metric of the same call with extras in other forms."""
    model = model_on(layout, clip_range=0.01)
    replica = dist.get_rank(model.groups.dp)
    whole = samples_of(replica)
    generator = torch.Generator().manual_seed(9)
    trained = [-4 + torch.randn(k, generator=generator) for k in (3, 2)]
    full = [torch.cat([torch.full((n - len(x),), NAN), x]) for n, x in zip((6, 4), trained)]
    padded = torch.stack([torch.cat([x, torch.full((6 - len(x),), NAN)]) for x in full])
    packed_row = {
        'input_ids': torch.cat([s['input_ids'] for s in whole])[None],
        'labels': torch.cat([s['labels'] for s in whole])[None],
        'cu_seqlens': torch.tensor([0, 6, 10]),
    }
    unshifted = [torch.cat([x.new_full((1,), NAN), x[:-1]]) for x in full]
    cut = [{**s, 'labels': torch.cat([s['labels'][:-1], torch.tensor([-100])])} for s in whole]
    cases = [
        (whole, 1, {'old_logps': trained, 'advantages': [1.0, -1.0]}),
        (whole, 2, {'old_logps': full, 'advantages': torch.tensor([[1.0], [-1.0]])}),
        (whole, 2, {'old_logps': padded, 'advantages': np.array([1.0, -1.0])}),
        ([packed_row], None, {'old_logps': torch.cat(full)[None], 'advantages': [torch.tensor(1.0), -1.0]}),
        ([packed_row], None, {'old_logps': [x.tolist() for x in trained], 'advantages': [[1.0] * 3, [-1.0] * 4]}),
        (cut, 2, {'old_logps': [x[:-1] for x in trained], 'advantages': [1.0, -1.0]}),
        (cut, 2, {'old_logps': unshifted, 'advantages': [1.0, -1.0], 'shifted': False}),
    ]
    found = []
    for inputs, size, extra in cases:
        loss = model.forward_backward(inputs, size, **extra)['loss']
        found.append({**model.calculate_metric(), 'loss': loss})
    return found


@pytest.mark.parametrize('layout', [Layout(), Layout(cp=2, dp=2)], ids=str)
def test_every_form_gives_the_same_loss_and_metrics_through_the_model(layout):
    for found in run_ranks(forms, layout.world, layout):
        for other in found[1:5]:
            assert other == pytest.approx(found[0], rel=1e-12)
        assert found[6] == pytest.approx(found[5], rel=1e-12)
