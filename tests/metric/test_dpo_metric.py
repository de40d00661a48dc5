"""DPOMetric by hand: recorded values of Twinkle, the definition, lists and ragged micro-batches, both layouts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.preference_formulas import Pair, metric_of
from twinkle_megatron.metric import DPOMetric

RECORDS = [
    r
    for r in torch.load(Path(__file__).parents[1] / 'golden' / 'metrics.pt', weights_only=True)
    if r['cls'] == 'DPOMetric'
]
NAN = math.nan
LENGTHS = ((3, 2), (1, 4), (0, 2), (5, 5))


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def replay(record):
    metric = DPOMetric(**record['init'])
    for inputs, outputs, keywords in record['ops']:
        metric.accumulate(inputs, outputs, **keywords)
    return metric


@pytest.mark.parametrize('record', RECORDS, ids=lambda r: r['name'])
def test_recorded_values(record):
    """Twinkle's own keys in its own form; of unequal lengths it counts its padding, so there the equal ones' values."""
    result = replay(record).calculate()
    expected = record['result']
    if 'unequal' in record['name']:
        assert expected['logps/chosen'] == '-133.57', 'twice -200 / 2 pairs less'
        expected = {'logps/chosen': '-33.57', 'logps/rejected': '-11.15'}
    assert {key: result[key] for key in expected} == expected


@pytest.fixture
def pairs():
    generator = torch.Generator().manual_seed(5)

    def values(n):
        return -torch.rand(n, generator=generator, dtype=torch.float64)

    return [Pair(values(n), values(m), values(n), values(m)) for n, m in LENGTHS]


def rows(sequences, length=6, fill=NAN):
    out = torch.full((len(sequences), length), fill, dtype=torch.float64)
    for row, values in zip(out, sequences):
        row[: len(values)] = values
    return out


def labels_of(sequences, length=6):
    return torch.where(rows(sequences, length).isnan(), -100, 7)


def in_order(pairs, layout, reference=False):
    names = ('ref_chosen', 'ref_rejected') if reference else ('chosen', 'rejected')
    sides = [[getattr(pair, name) for pair in pairs] for name in names]
    return [one for pair in zip(*sides) for one in pair] if layout == 'interleaved' else sides[0] + sides[1]


@pytest.mark.parametrize('layout', ['interleaved', 'separated'])
@pytest.mark.parametrize(
    'form', ['one batch', 'micro-batches', 'samples', 'rows of one tensor', 'padded rows of samples', 'sums', 'packed']
)
def test_however_the_pairs_come(pairs, layout, form):
    metric = DPOMetric(beta=0.3, layout=layout)
    new, ref = in_order(pairs, layout), in_order(pairs, layout, reference=True)
    if form == 'one batch':
        metric.accumulate({'labels': labels_of(new)}, {'logps': rows(new)}, ref_logps=rows(ref))
    elif form == 'micro-batches':  # of unequal sizes and lengths
        parts = [pairs[:1], pairs[1:]]
        new, ref = ([in_order(part, layout, r) for part in parts] for r in (False, True))
        inputs = [{'labels': labels_of(part, length)} for part, length in zip(new, (3, 7))]
        outputs = {'logps': [rows(part, length) for part, length in zip(new, (3, 7))]}
        reference = {'logps': [rows(part, length) for part, length in zip(ref, (3, 7))]}
        metric.accumulate(inputs, outputs, ref_outputs=reference)
    elif form == 'samples':  # 1-D, each of its own length
        lengths = [len(one) + 1 for one in new]
        inputs = [{'labels': labels_of([one], n)[0]} for one, n in zip(new, lengths)]
        outputs = {'logps': [rows([one], n)[0] for one, n in zip(new, lengths)]}
        metric.accumulate(inputs, outputs, ref_logps=[one.tolist() for one in ref])
    elif form == 'rows of one tensor':
        inputs = [{'labels': labels_of([one])[0]} for one in new]
        metric.accumulate(inputs, {'logps': rows(new).numpy()}, ref_logps=[rows([one])[0] for one in ref])
    elif form == 'padded rows of samples':
        inputs = [{'labels': labels_of([one], len(one) + 1)[0]} for one in new]
        metric.accumulate(inputs, {'logps': rows(new)}, ref_logps=rows(ref, 9))
    elif form == 'sums':
        sums = {f'ref_{side}_logps': [float(getattr(p, f'ref_{side}').sum()) for p in pairs] for side in
                ('chosen', 'rejected')}  # fmt: skip
        metric.accumulate([{'labels': labels_of(new)}], [{'logps': rows(new)}], **sums)
    else:
        lengths = [len(one) + 1 for one in new]
        flat = [torch.cat([rows([one], n)[0] for one, n in zip(some, lengths)])[None] for some in (new, ref)]
        inputs = {
            'labels': torch.where(flat[0].isnan(), -100, 7),
            'position_ids': torch.cat([torch.arange(n) for n in lengths])[None],
        }
        metric.accumulate(inputs, {'logps': flat[0]}, ref_logps=[rows([one], n)[0] for one, n in zip(ref, lengths)])
    assert metric.values() == pytest.approx(metric_of(0.3, pairs), rel=1e-12)
    shown = metric.calculate()
    assert shown['rewards/accuracies'].endswith('%')
    assert metric.calculate() == {}


def test_how_numbers_are_shown():
    metric = DPOMetric(beta=0.5)
    labels = torch.tensor([[3, 3], [3, 3]])
    metric.accumulate({'labels': labels}, {'logps': f64([[-1, -2], [-3, -4]])}, ref_logps=f64([[-2, -2], [-3, -3]]))
    assert metric.calculate() == {
        'chosen_logps': '-3.0000', 'rejected_logps': '-7.0000', 'ref_chosen_logps': '-4.0000',
        'ref_rejected_logps': '-6.0000', 'rewards/chosen': '0.5000', 'rewards/rejected': '-0.5000',
        'accuracy': '1.0000', 'margin': '1.0000', 'logps/chosen': '-3.00', 'logps/rejected': '-7.00',
        'logps/ref_chosen': '-4.00', 'logps/ref_rejected': '-6.00', 'rewards/margins': '1.0000',
        'rewards/accuracies': '100.0%',
    }  # fmt: skip


def test_pairs_without_trained_tokens_do_not_count(pairs):
    empty = Pair(*(f64([]) for _ in range(4)))
    metric = DPOMetric(beta=0.3)
    for part in (pairs, [empty, empty]):
        new, ref = in_order(part, 'interleaved'), in_order(part, 'interleaved', reference=True)
        metric.accumulate({'labels': labels_of(new)}, {'logps': rows(new)}, ref_logps=rows(ref))
    assert metric.values() == pytest.approx(metric_of(0.3, pairs), rel=1e-12)


def test_some_calls_without_a_reference(pairs):
    """Rewards are means over the pairs that had one."""
    metric = DPOMetric(beta=0.3)
    new, ref = in_order(pairs, 'interleaved'), in_order(pairs, 'interleaved', reference=True)
    metric.accumulate({'labels': labels_of(new[:2])}, {'logps': rows(new[:2])})
    metric.accumulate({'labels': labels_of(new[2:])}, {'logps': rows(new[2:])}, ref_logps=rows(ref[2:]))
    values, want = metric.values(), metric_of(0.3, pairs[1:])
    assert values['chosen_logps'] == pytest.approx(metric_of(0.3, pairs, reference=False)['chosen_logps'], rel=1e-12)
    assert values['margin'] == pytest.approx(want['margin'], rel=1e-12)
    assert values['accuracy'] == want['accuracy']


def test_whole_logits_do_as_well(pairs):
    logits = torch.randn(2, 3, 9, dtype=torch.float64)
    labels = torch.tensor([[1, 2, -100], [3, -100, 8]])
    metric, other = DPOMetric(), DPOMetric()
    metric.accumulate({'labels': labels}, {'logits': logits})
    logps = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    other.accumulate({'labels': labels}, {'logps': logps})
    assert metric.values() == pytest.approx(other.values(), rel=1e-12)


def test_nothing_given_is_nothing_said():
    metric = DPOMetric()
    metric.accumulate({'labels': torch.tensor([[1, 2]] * 2)}, {'loss': 1.0})
    metric.accumulate([], {'logps': []})
    metric.accumulate(None, None)
    assert metric.values() == {}
    assert metric.calculate() == {}


@pytest.mark.parametrize(
    ('labels', 'call', 'message'),
    [
        ([[1, 2]] * 3, {}, 'whole pairs of a chosen and a rejected sequence, got 3 sequences'),
        ([[1, 2]] * 2, {'ref_logps': [[1.0]]}, 'ref_logps must have one entry for each of the 2 sequences'),
        ([[1, 2]] * 2, {'ref_outputs': {'loss': 1}}, "ref_outputs must be a dictionary with 'logps'"),
        (
            [[1, 2]] * 2,
            {'ref_chosen_logps': [1.0, 2.0], 'ref_rejected_logps': [1.0]},
            'one number for each of the 1 pairs',
        ),
        ([[1, 2]] * 2, {'ref_chosen_logps': [1.0]}, 'must be given together, got ref_chosen_logps only'),
        ([[1, 2]] * 2, {'ref_logps': [1.0, 2.0]}, 'must be log-probs of every trained token, got one number for each'),
        ([[1, 2]] * 2, {'reflogps': 1}, "did you mean 'ref_logps'?"),
    ],
)
def test_wrong_calls(labels, call, message):
    with pytest.raises(ValueError, match=message):
        DPOMetric().accumulate({'labels': torch.tensor(labels)}, {'logps': torch.zeros(len(labels), 2)}, **call)


def test_wrong_constructions():
    with pytest.raises(ValueError, match='beta must be a finite number > 0'):
        DPOMetric(beta=-1)
    with pytest.raises(ValueError, match="layout must be 'interleaved' or 'separated'"):
        DPOMetric(layout='pairs')
    with pytest.raises(ValueError, match="did you mean 'beta'"):
        DPOMetric(betta=1)
