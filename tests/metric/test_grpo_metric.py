"""GRPOMetric, GSPOMetric and CISPOMetric on one process: their definitions in float64, and every form in which
micro-batches and extras come."""

from __future__ import annotations

import math

import pytest
import torch

from tests.policy_formulas import METRICS, Response, metric_of, records_of
from twinkle_megatron import metric as metrics
from twinkle_megatron.metric import CISPOMetric, GRPOMetric, GSPOMetric
from twinkle_megatron.vocab_parallel import LinearHead, TokenStats, VocabShard

F64 = torch.float64
NAN, INF = math.nan, math.inf
TOP = '_high_kl_records'
CLASSES = [getattr(metrics, name) for name in METRICS]
OLD_KEYS = {'mean_old_logp', 'logp_diff_mean', 'approx_kl', 'token_kl_max', 'token_ratio_max'}
CLIP_KEYS = {'clip_ratio', 'clip_ratio_low', 'clip_ratio_high'}


def f64(values):
    return torch.tensor(values, dtype=F64)


def result_of(cls, *calls, **init):
    metric = cls(**init)
    for inputs, outputs, extra in calls:
        metric.accumulate(inputs, outputs, **extra)
    return metric.calculate()


def keys(*names):
    return {f'train/{name}' for group in names for name in ([group] if isinstance(group, str) else group)}


# ---- by hand: ratios 1.25, 0.5, 1.1 with A = 2, and 1.25, 0.5 with A = −1; a third sequence without trained tokens

LABELS = torch.tensor([[-100, 5, 6, -100, 7], [8, 9, -100, -100, -100], [-100] * 5])
AT = LABELS != -100
RATIOS = f64([1.25, 0.5, 1.1, 1.25, 0.5])
NEW = f64([-1.0, -0.25, -2.0, -0.5, -3.0])
ENTROPIES = f64([1.0, 2.0, 3.0, 4.0, 6.0])
GARBAGE = f64([NAN, INF, -INF, 1e308] * 4)[:15].view(3, 5)
HAND_KL = [r - 1 - math.log(r) for r in RATIOS.tolist()]


def whole(values):
    return GARBAGE.clone().masked_scatter_(AT, values)


HAND = (
    {'labels': LABELS},
    {'logps': whole(NEW), 'entropies': whole(ENTROPIES)},
    {'old_logps': whole(NEW - RATIOS.log()), 'advantages': [2.0, -1.0, NAN]},
)
HAND_FIGURES = {
    'train/policy_confidence': math.exp(-1.35),
    'train/mean_new_logp': -1.35,
    'train/mean_old_logp': -1.35 - math.log(1.25 * 0.5 * 1.1 * 1.25 * 0.5) / 5,
    'train/logp_diff_mean': math.log(1.25 * 0.5 * 1.1 * 1.25 * 0.5) / 5,
    'train/approx_kl': sum(HAND_KL) / 5,
    'train/token_kl_max': 0.5 - 1 + math.log(2),
    'train/token_ratio_max': 1.25,
    'train/entropy': 3.2,
}
CLIPS = {
    # too high and A > 0: the first; too low and A < 0: the last
    GRPOMetric: (1 / 5, 1 / 5),
    # whatever the sign: 0.5 twice, 1.25 twice
    CISPOMetric: (2 / 5, 2 / 5),
    # 0.6875^(1/3) = 0.883 stays; 0.625^(1/2) = 0.791 is too low with A < 0: one of two sequences
    GSPOMetric: (1 / 2, 0.0),
}


@pytest.mark.parametrize('cls', CLASSES)
def test_definitions_by_hand(cls):
    low, high = CLIPS[cls]
    clips = {'train/clip_ratio_low': low, 'train/clip_ratio_high': high, 'train/clip_ratio': low + high}
    assert result_of(cls, HAND) == pytest.approx({**HAND_FIGURES, **clips}, rel=1e-13, abs=1e-15)


def test_the_clip_range_has_two_sides():
    found = result_of(GRPOMetric, HAND, epsilon=0.6, epsilon_high=0.05)
    assert (found['train/clip_ratio_low'], found['train/clip_ratio_high']) == (0, 2 / 5)
    found = result_of(GRPOMetric, HAND, epsilon=0.05)
    assert (found['train/clip_ratio_low'], found['train/clip_ratio_high']) == (1 / 5, 2 / 5)
    found = result_of(GSPOMetric, HAND, epsilon=0.1)
    assert (found['train/clip_ratio_low'], found['train/clip_ratio_high']) == (1 / 2, 0)


def test_high_kl_records_by_hand():
    """Highest first: with 0.4 in the second sequence, and 0.5 in the first, whose KL is ln 2 − ½."""
    inputs, outputs, extra = HAND
    moved = extra['old_logps'].clone()
    moved[1, 1] = -3.0 - math.log(0.4)
    changed = (inputs, outputs, {**extra, 'old_logps': moved})
    top = result_of(GRPOMetric, changed, top_k_kl=3)[TOP]
    assert [(r['gsi'], r['pos'], r['token_id']) for r in top] == [(1, 1, 9), (0, 2, 6), (0, 1, 5)]
    assert list(top[0]) == ['gsi', 'pos', 'token_id', 'kl', 'ratio', 'logp_new', 'logp_old']
    want = {'gsi': 0, 'pos': 2, 'token_id': 6, 'kl': math.log(2) - 0.5, 'ratio': 0.5, 'logp_new': -0.25,
            'logp_old': -0.25 + math.log(2)}  # fmt: skip
    assert top[1] == pytest.approx(want, rel=1e-13)
    assert len(result_of(GRPOMetric, HAND, top_k_kl=50)[TOP]) == 5, 'only trained tokens'
    assert TOP not in result_of(GRPOMetric, HAND)


@pytest.mark.parametrize('rows', [1, 2, 4])
def test_among_tokens_of_equal_kl_the_first_ones_are_recorded(rows):
    """All far-off tokens have that of the bound; how the batch is cut into micro-batches does not matter."""
    labels, logps = torch.full((4, 50), 3), torch.full((4, 50), -1.0, dtype=F64)
    old = torch.full((4, 50), -90.0, dtype=F64)
    old[0, :48] = -1.0
    calls = [
        ({'labels': labels[i : i + rows]}, {'logps': logps[i : i + rows]}, {'old_logps': old[i : i + rows]})
        for i in range(0, 4, rows)
    ]
    top = result_of(GRPOMetric, *calls, top_k_kl=7)[TOP]
    assert [(r['gsi'], r['pos']) for r in top] == [(0, 48), (0, 49), *((1, i) for i in range(5))]


# ---- at random, in every form


def batches(seed, sizes=((2, 7), (1, 4), (3, 9), (1, 5))):
    """Micro-batches `[rows, length]` of unequal lengths: labels, values and one advantage a row. One row has no trained
    token."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for rows, length in sizes:
        labels = torch.randint(0, 30, (rows, length), generator=generator)
        labels[torch.rand(rows, length, generator=generator) > 0.7] = -100
        if rows == 3:
            labels[1] = -100

        def draw(mean, shape=(rows, length)):
            return mean + 0.5 * torch.randn(shape, generator=generator, dtype=F64)

        values = {'new': draw(-3), 'old': draw(-3), 'entropy': draw(2)}
        ignored = labels == -100
        values = {name: x.masked_fill(ignored, NAN) for name, x in values.items()}
        out.append((labels, values, torch.randn(rows, generator=generator, dtype=F64)))
    return out


def responses_of(some):
    found = []
    for labels, values, advantages in some:
        for i, row in enumerate(labels):
            at = row != -100
            new, old, entropy = (values[name][i, at] for name in ('new', 'old', 'entropy'))
            where, tokens = at.nonzero()[:, 0].tolist(), row[at].tolist()
            found.append(Response(new, old, old, advantages[i], entropy, positions=where, token_ids=tokens))
    return found


def inputs_of(some):
    return [{'labels': labels} for labels, *_ in some]


def outputs_of(some):
    return [{'logps': values['new'], 'entropies': values['entropy']} for _, values, _ in some]


def ragged(some):
    rows = [values['old'][i, row != -100] for labels, values, _ in some for i, row in enumerate(labels)]
    return {'old_logps': rows, 'advantages': torch.cat([a for *_, a in some]).tolist()}


INIT = {'epsilon': 0.3, 'epsilon_high': 0.5}


def check(cls, found, some, top_k=0):
    top = found.pop(TOP, [])
    assert found == pytest.approx(metric_of(cls.__name__, INIT, responses_of(some)), rel=1e-12, abs=1e-14)
    for mine, want in zip(top, records_of(top_k, responses_of(some)), strict=True):
        assert mine == pytest.approx(want, rel=1e-12)


def single_calls(some):
    return [(i, o, ragged([one])) for i, o, one in zip(inputs_of(some), outputs_of(some), some)]


def as_lists(some):
    return [(inputs_of(some), outputs_of(some), ragged(some))]


def one_dictionary_of_lists(some):
    outputs = {key: [o[key] for o in outputs_of(some)] for key in ('logps', 'entropies')}
    return [(inputs_of(some), outputs, ragged(some))]


def aligned_list(some):
    """A tensor a micro-batch, NaN where nothing is trained; advantages `[S, 1]`."""
    extra = {'old_logps': [values['old'] for _, values, _ in some]}
    return [(inputs_of(some), outputs_of(some), {**extra, 'advantages': torch.cat([a for *_, a in some])[:, None]})]


def of_lists_and_arrays(some):
    """Labels as lists, old log-probs as arrays, advantages of each token."""
    advantages = [a[:, None].expand(labels.shape) for labels, _, a in some]
    extra = {'old_logps': [values['old'].numpy() for _, values, _ in some], 'advantages': advantages}
    return [([{'labels': labels.tolist()} for labels, *_ in some], outputs_of(some), extra)]


def masked(some):
    """`completion_mask` in place of ignored labels."""
    inputs = [{'labels': x.clamp(min=0), 'completion_mask': (x != -100).int()} for x, *_ in some]
    return [(inputs, outputs_of(some), ragged(some))]


def packed(some, by='position_ids'):
    """Each micro-batch as one packed row."""
    calls = []
    for labels, values, _ in some:
        rows, length = labels.shape
        told = torch.arange(length).repeat(rows)[None]
        if by == 'cu_seqlens':
            told = torch.arange(rows + 1) * length
        calls.append(({'labels': labels.view(1, -1), by: told}, {k: v.view(1, -1) for k, v in values.items()}))
    outputs = [{'logps': v['new'], 'entropies': v['entropy']} for _, v in calls]
    return [([i for i, _ in calls], outputs, ragged(some))]


def ready_statistics(some):
    outputs = [{'token_stats': TokenStats(log_prob=v['new'], entropy=v['entropy'])} for _, v, _ in some]
    return [(inputs_of(some), outputs, ragged(some))]


def packed_by_boundaries(some):
    return packed(some, 'cu_seqlens')


FORMS = [
    single_calls, as_lists, one_dictionary_of_lists, aligned_list, of_lists_and_arrays, masked, packed,
    packed_by_boundaries, ready_statistics,
]  # fmt: skip


@pytest.mark.parametrize('form', FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize('cls', CLASSES)
def test_every_form_gives_the_definitions(cls, form):
    """Micro-batches of unequal lengths; the records of one that is packed have positions within the sequence."""
    some = batches(1)
    check(cls, result_of(cls, *form(some), **INIT, top_k_kl=6), some, top_k=6)


@pytest.mark.parametrize('cls', CLASSES)
def test_one_tensor_with_the_rows_of_all_micro_batches(cls):
    some = batches(2, sizes=((2, 6), (1, 6), (3, 6)))
    outputs = {key: torch.cat([o[key] for o in outputs_of(some)]) for key in ('logps', 'entropies')}
    check(cls, result_of(cls, (inputs_of(some), outputs, ragged(some)), **INIT), some)
    old = torch.cat([values['old'] for _, values, _ in some])
    extra = {'old_logps': old, 'advantages': ragged(some)['advantages']}
    check(cls, result_of(cls, (inputs_of(some), outputs, extra), **INIT), some)
    unequal, joined = batches(1), {'logps': torch.zeros(7, 9)}
    with pytest.raises(ValueError, match=r"outputs\['logps'\] of 4 micro-batches must be a list"):
        result_of(cls, (inputs_of(unequal), joined, ragged(unequal)))


@pytest.mark.parametrize('cls', CLASSES)
def test_samples_of_one_dimension(cls):
    some = batches(3, sizes=((1, 6), (1, 4)))
    inputs = [{'labels': labels[0]} for labels, *_ in some]
    outputs = [{key: x[0] for key, x in o.items()} for o in outputs_of(some)]
    check(cls, result_of(cls, (inputs, outputs, ragged(some)), **INIT, top_k_kl=3), some, top_k=3)
    calls = [(i, o, ragged([one])) for i, o, one in zip(inputs, outputs, some)]
    check(cls, result_of(cls, *calls, **INIT, top_k_kl=3), some, top_k=3)
    aligned = [{**e, 'old_logps': one[1]['old'][0]} for (*_, e), one in zip(calls, some)]
    check(cls, result_of(cls, *[(i, o, e) for (i, o, _), e in zip(calls, aligned)], **INIT), some)


def test_float32_log_probs_are_summed_in_float64():
    some = batches(4, sizes=((4, 4000),))
    (inputs, outputs, extra), *_ = as_lists(some)
    single = [{key: x.float() for key, x in o.items()} for o in outputs]
    exact = [{key: x.double() for key, x in o.items()} for o in single]
    found = result_of(GRPOMetric, (inputs, single, {}))
    assert found == pytest.approx(result_of(GRPOMetric, (inputs, exact, {})), rel=1e-14)
    assert result_of(GRPOMetric, (inputs, single, extra)).keys() == result_of(GRPOMetric, (inputs, exact, extra)).keys()


# ---- from logits: temperature, shard, linear head


def from_logits(temperature):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(3, 6, 4, generator=generator, dtype=F64)
    weight = 2 * torch.randn(12, 4, generator=generator, dtype=F64)
    labels = torch.randint(0, 10, (3, 6), generator=generator)
    labels[torch.rand(3, 6, generator=generator) > 0.7] = -100
    at = labels != -100
    logits = (hidden @ weight.T)[..., :10]
    logp = (logits / temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)

    def picked(x):
        return x.gather(-1, labels.clamp(min=0)[..., None])[..., 0]

    old = picked(logp) + 0.4 * torch.randn(3, 6, generator=generator, dtype=F64)
    new, plain = picked(logp), picked(logits.log_softmax(-1))
    responses = [
        Response(new[i, a], old[i, a], old[i, a], f64(1.0 - i), entropy[i, a], plain[i, a]) for i, a in enumerate(at)
    ]
    extra = {'old_logps': [old[i, a] for i, a in enumerate(at)], 'advantages': [1.0, 0.0, -1.0]}
    hidden = hidden.masked_fill(~at[..., None], NAN)
    return {'labels': labels}, hidden, weight, extra, responses


@pytest.mark.parametrize('temperature', [0.5, 1.0, 2.0])
@pytest.mark.parametrize('cls', CLASSES)
def test_from_logits_at_the_temperature_of_the_sampler(cls, temperature):
    """Confidence and mean log-prob are those at temperature 1, everything else is at the sampler's."""
    inputs, hidden, weight, extra, responses = from_logits(temperature)
    want = metric_of(cls.__name__, INIT, responses)
    shard = VocabShard(0, 12, 10, None)
    for logits in (hidden @ weight.T, LinearHead(hidden, weight)):
        outputs = {'logits': logits, 'vocab_shard': shard}
        found = result_of(cls, (inputs, outputs, extra), **INIT, temperature=temperature)
        assert found == pytest.approx(want, rel=1e-12, abs=1e-14)
    outputs = {'logits': (hidden @ weight.T)[..., :10]}
    assert result_of(cls, (inputs, outputs, extra), **INIT, temperature=temperature) == pytest.approx(want, rel=1e-12)


def test_case_17_and_18_temperature_by_hand():
    """Logits [2, 0] at temperature ½: entropy 0.090095, log-prob −0.018150; at 1 it is −0.126928."""
    inputs, logits = {'labels': torch.tensor([[0]])}, f64([[[2.0, 0.0]]])
    rollout = -math.log1p(math.exp(-4))
    for _ in range(2):  # the logits are not scaled in place
        found = result_of(GRPOMetric, (inputs, {'logits': logits}, {'old_logps': [[rollout]]}), temperature=0.5)
        assert round(found['train/entropy'], 6) == 0.090095
        assert round(found['train/mean_old_logp'], 6) == -0.018150
        assert round(found['train/mean_new_logp'], 6) == -0.126928
        assert found['train/policy_confidence'] == pytest.approx(1 / (1 + math.exp(-2)), rel=1e-14)
        assert found['train/logp_diff_mean'] == pytest.approx(0, abs=1e-15)
        assert found['train/token_ratio_max'] == pytest.approx(1, rel=1e-14)
        assert found['train/approx_kl'] == pytest.approx(0, abs=1e-15)
    ready = {'logps': f64([[rollout]])}
    found = result_of(GRPOMetric, (inputs, ready, {'old_logps': [[rollout]]}), temperature=0.5)
    assert round(found['train/mean_new_logp'], 6) == -0.018150, 'a ready log-prob stays as it is'


def test_a_temperature_that_takes_no_part_in_the_sweep_of_the_loss():
    """Statistics of the loss's own sweep are at its temperature, with the log-prob at 1 beside."""
    stats = TokenStats(log_prob=f64([[-0.5, -1.0]]), entropy=f64([[1.0, 2.0]]), plain_log_prob=f64([[-2.0, -4.0]]))
    call = ({'labels': torch.tensor([[3, 3]])}, {'token_stats': stats}, {'old_logps': [[-0.5, -1.0]]})
    found = result_of(GRPOMetric, call, temperature=0.5)
    assert found['train/mean_new_logp'] == -3.0
    assert found['train/logp_diff_mean'] == 0.0
    assert found['train/entropy'] == 1.5


def test_the_sweep_of_the_loss_is_asked_for_entropy_and_the_plain_log_prob():
    for cls in CLASSES:
        assert cls.needs == {'entropy', 'plain_log_prob'}
        assert set(cls.extras) == {'old_logps', 'advantages'}


# ---- what is not given is left out


def test_keys_that_cannot_be_known_are_left_out():
    inputs, outputs, extra = HAND
    bare = keys('policy_confidence', 'mean_new_logp')
    logps = {'logps': outputs['logps']}
    assert set(result_of(GRPOMetric, (inputs, logps, {}))) == bare
    assert set(result_of(GRPOMetric, (inputs, outputs, {}))) == bare | keys('entropy')
    only_old = {'old_logps': extra['old_logps']}
    assert set(result_of(GRPOMetric, (inputs, logps, only_old))) == bare | keys(OLD_KEYS)
    assert set(result_of(GRPOMetric, (inputs, logps, extra))) == bare | keys(OLD_KEYS, CLIP_KEYS)
    only_advantages = {'advantages': extra['advantages']}
    assert set(result_of(GSPOMetric, (inputs, outputs, only_advantages))) == bare | keys('entropy')
    assert TOP not in result_of(GRPOMetric, (inputs, logps, {}), top_k_kl=4)


def test_nothing_accumulated_says_nothing():
    for cls in CLASSES:
        metric = cls(top_k_kl=2)
        assert metric.values() == {}
        assert metric.calculate() == {}
        metric.accumulate([], [])
        metric.accumulate(None, None)
        nothing = torch.full((2, 3), -100)
        metric.accumulate({'labels': nothing}, {'logps': torch.full((2, 3), NAN)}, old_logps=[[], []],
                          advantages=[1.0, 2.0])  # fmt: skip
        assert metric.calculate() == {}


def test_calculate_resets_and_values_do_not():
    metric = GRPOMetric(top_k_kl=2)
    for _ in range(2):
        inputs, outputs, extra = HAND
        metric.accumulate(inputs, outputs, **extra)
        first = metric.values()
        assert metric.values() == first
        shown = metric.calculate()
        assert sorted(r['gsi'] for r in shown.pop(TOP)) == [0, 1], 'numbers of sequences start anew'
        assert shown == first
        assert all(isinstance(value, float) for value in shown.values())
        assert metric.values() == metric.calculate() == {}


def test_sequences_are_numbered_over_calls():
    some = batches(6)
    metric = GRPOMetric(**INIT, top_k_kl=40)
    for inputs, outputs, extra in [*single_calls(some[:2]), *as_lists(some[2:])]:
        metric.accumulate(inputs, outputs, **extra)
    check(GRPOMetric, metric.calculate(), some, top_k=40)


@pytest.mark.parametrize('far', [1e4, -1e4, INF, -INF])
def test_far_off_policies_are_bounded_at_20_nats(far):
    inputs, outputs = {'labels': torch.tensor([[3, 3]])}, {'logps': f64([[-1.0, -1.0]])}
    metric = GRPOMetric(top_k_kl=1)
    metric.accumulate(inputs, outputs, old_logps=f64([[far, -1.0]]), advantages=[1.0])
    top = metric.calculate()[TOP]
    d = 20.0 if far < 0 else -20.0
    assert top[0]['kl'] == pytest.approx(math.exp(d) - 1 - d, rel=1e-12)
    assert top[0]['ratio'] == pytest.approx(math.exp(d), rel=1e-12)


def test_other_ignored_labels():
    inputs = {'labels': torch.tensor([[3, -1, 4]])}
    found = result_of(GRPOMetric, (inputs, {'logps': f64([[-1.0, NAN, -3.0]])}, {'old_logps': [[-1.0, -3.0]]}),
                      ignore_index=-1)  # fmt: skip
    assert found['train/mean_new_logp'] == -2.0
    assert found['train/approx_kl'] == 0.0


def test_the_inputs_are_not_written_to():
    inputs, outputs, extra = HAND
    before = [x.clone() for x in (inputs['labels'], *outputs.values(), extra['old_logps'])]
    for cls in CLASSES:
        result_of(cls, HAND, top_k_kl=3)
    for x, old in zip((inputs['labels'], *outputs.values(), extra['old_logps']), before):
        assert torch.equal(x.nan_to_num(7), old.nan_to_num(7))


WRONG = [
    ({'labels': LABELS}, {}, {}, 'outputs must hold token_stats, logps or logits'),
    ({'labels': LABELS}, {'logps': torch.zeros(3, 4)}, {}, r"outputs\['logps'\] must have the shape of labels"),
    (
        {'labels': LABELS},
        {'logps': torch.zeros(3, 5), 'entropies': torch.zeros(3, 4)},
        {},
        r"\['entropies'\] must have",
    ),
    (
        {'labels': LABELS},
        {'logps': torch.zeros(3, 5)},
        {'old_logps': [[1.0] * 4, [1.0], []]},
        'old_logps of sample 0 must',
    ),
    (
        {'labels': LABELS},
        {'logps': torch.zeros(3, 5)},
        {'advantages': [1.0]},
        'advantages must have one entry for each',
    ),
    ({'labels': LABELS}, {'logps': torch.zeros(3, 5)}, {'old_logp': [1.0]}, "no argument 'old_logp'; did you mean"),
    ({'input_ids': LABELS}, {'logps': torch.zeros(3, 5)}, {}, 'labels'),
]


@pytest.mark.parametrize(('inputs', 'outputs', 'extra', 'words'), WRONG)
def test_a_wrong_call_says_what_is_wrong(inputs, outputs, extra, words):
    with pytest.raises(ValueError, match=words):
        GRPOMetric().accumulate(inputs, outputs, **extra)


def test_what_a_training_loop_tells_every_metric_is_dropped():
    inputs, outputs, extra = HAND
    metric = GRPOMetric()
    metric.accumulate(inputs, outputs, **extra, lr=0.1, step=3, gradient_accumulation_steps=2, loss_reduction='mean')
    assert metric.calculate() == pytest.approx(result_of(GRPOMetric, HAND))
