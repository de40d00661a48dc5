"""Preference losses called by hand: recorded values of Twinkle, numbers worked out by hand from the papers, plain
float64 formulas, hostile values, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.preference_formulas import LOSSES, Pair, loss_of
from tests.recorded import assert_recorded, name_of, records_of, replay
from twinkle_megatron import loss as losses
from twinkle_megatron.batch import Counts, TokenBatch
from twinkle_megatron.loss import CPOLoss, DPOLoss, ORPOLoss, PreferenceLossBase, SimPOLoss
from twinkle_megatron.loss.preference import LOSS_TYPES, log_odds
from twinkle_megatron.vocab_parallel import TokenStats

F64 = torch.float64
NAN, INF = math.nan, math.inf
PRECISE = {'rtol': 1e-12, 'atol': 1e-14}


def f64(values):
    return torch.tensor(values, dtype=F64)


def run(loss, inputs, logps, **extra):
    """Value and gradient of a loss on ready log-probs."""
    leaf = logps.clone().requires_grad_()
    result = loss(inputs, {'logps': leaf}, **extra)
    assert result['num_tokens'] == 0, 'a mean'
    result['loss'].backward()
    return result['loss'].detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


# ---- recorded values


@pytest.mark.parametrize('record', records_of(LOSSES, 'equal'), ids=name_of)
def test_recorded_values_and_gradients(record):
    assert_recorded(record)


@pytest.mark.parametrize('record', records_of(LOSSES, 'differs'), ids=name_of)
def test_where_twinkle_is_wrong_the_paper_counts(record):
    """IPO on log-ratios per token; KTO with its baselines, under both names."""
    assert record['init']['loss_type'] in ('ipo', 'kto', 'kto_pair')
    result, grads = replay(record)
    leaves = {key: value.double().requires_grad_() for key, value in record['outputs'].items()}
    init = {**record['init'], 'loss_type': record['init']['loss_type'].removesuffix('_pair')}
    want = loss_of(record['cls'], init, pairs_of(record, leaves))
    want.backward()
    tolerance = {'rtol': 1e-10, 'atol': 1e-12} if record['name'].endswith('f64') else {'rtol': 1e-4, 'atol': 1e-6}
    torch.testing.assert_close(result['loss'].double(), want, **tolerance)
    for key, leaf in leaves.items():
        torch.testing.assert_close(grads[key].double(), leaf.grad, **tolerance)


def pairs_of(record, leaves):
    labels, ref = record['inputs']['labels'], record['call']['ref_logps'].double()
    logps = leaves.get('logps')
    if logps is None:
        logps = leaves['logits'].log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    if not record['packed']:
        rows = [(logps[i, labels[i] != -100], ref[i, labels[i] != -100]) for i in range(len(labels))]
    else:
        starts = [*(record['inputs']['position_ids'][0] == 0).nonzero()[:, 0].tolist(), labels.shape[1]]
        rows = []
        for i in range(len(starts) - 1):
            mine = labels[0, starts[i] : starts[i + 1]] != -100
            rows.append((logps[0, starts[i] : starts[i + 1]][mine], ref[i, : len(mine)][mine]))
    return [Pair(a[0], b[0], a[1], b[1]) for a, b in zip(rows[0::2], rows[1::2])]


# ---- numbers worked out by hand

LABELS = torch.tensor([[1, 1, -100], [1, -100, -100], [1, 1, 1], [1, 1, -100]])
LOGPS = f64([[-1.0, -2.0, NAN], [-4.0, NAN, INF], [-1.0, -1.0, -1.0], [-0.5, -1.5, -INF]])
REF = f64([[-2.0, -3.0, NAN], [-3.0, NAN, NAN], [-1.0, -2.0, -3.0], [-1.0, -1.0, NAN]])
"""Log-ratios: 1 + 1 = 2 and −1; 0 + 1 + 2 = 3 and 0.5 − 0.5 = 0."""

BY_HAND = {
    'sigmoid': (DPOLoss(beta=0.5), (math.log1p(math.exp(-1.5)) + math.log1p(math.exp(-1.5))) / 2),
    'smoothed': (
        DPOLoss(beta=0.5, label_smoothing=0.2),
        0.8 * math.log1p(math.exp(-1.5)) + 0.2 * math.log1p(math.exp(1.5)),
    ),
    'hinge': (DPOLoss('hinge', beta=0.2), 1 - 0.2 * 3),
    # means per token: 2/2 − (−1)/1 = 2 and 3/3 − 0 = 1; 1/(2β) = 1
    'ipo': (DPOLoss('ipo', beta=0.5), ((2 - 1) ** 2 + (1 - 1) ** 2) / 2),
    # z_c = (2 + 3)/2, z_r = max(0, −1/2) = 0
    'kto': (
        DPOLoss('kto', beta=1.0),
        sum(1 / (1 + math.exp(x)) for x in (2.0, 3.0, 2.5 + 1.0, 2.5 - 0.0)) / 2,
    ),
    'sft': (DPOLoss('hinge', beta=0.2, sft_weight=3.0), 1 - 0.2 * 3 + 3 * 6.0 / 5),
    # means per token: −1.5 − (−4) = 2.5, −1 − (−1) = 0
    'simpo': (SimPOLoss(beta=2.0, gamma=1.0), (math.log1p(math.exp(-4.0)) + math.log1p(math.exp(1.0))) / 2),
    # sums: −3 − (−4) = 1, −3 − (−2) = −1; likelihood 6/5
    'cpo': (
        CPOLoss(beta=1.0, cpo_alpha=0.5),
        (math.log1p(math.exp(-1.0)) + math.log1p(math.exp(1.0))) / 2 + 0.5 * 6 / 5,
    ),
    'orpo': (
        ORPOLoss(beta=2.0),
        6 / 5
        + 2
        / 2
        * sum(
            math.log1p(math.exp(-(a - math.log1p(-math.exp(a)) - b + math.log1p(-math.exp(b)))))
            for a, b in ((-1.5, -4.0), (-1.0, -1.0))
        ),
    ),
}


@pytest.mark.parametrize('name', BY_HAND)
def test_values_by_hand(name):
    loss, want = BY_HAND[name]
    given = {'ref_logps': REF} if isinstance(loss, DPOLoss) else {}
    value, grad = run(loss, {'labels': LABELS}, LOGPS, **given)
    assert value.item() == pytest.approx(want, rel=1e-12)
    assert grad.isfinite().all()
    assert (grad[LABELS == -100] == 0).all(), 'what is ignored may hold anything'


@pytest.mark.parametrize('name', BY_HAND)
def test_separated_pairs_are_the_same_pairs(name):
    loss, want = BY_HAND[name]
    separated = type(loss)(**{**_arguments(loss), 'layout': 'separated'})
    order = [0, 2, 1, 3]
    given = {'ref_logps': REF[order]} if isinstance(loss, DPOLoss) else {}
    value, grad = run(separated, {'labels': LABELS[order]}, LOGPS[order], **given)
    _, plain = run(loss, {'labels': LABELS}, LOGPS, **({'ref_logps': REF} if given else {}))
    assert value.item() == pytest.approx(want, rel=1e-12)
    torch.testing.assert_close(grad, plain[order], **PRECISE)


def _arguments(loss):
    names = {
        DPOLoss: {'loss_type', 'beta', 'label_smoothing', 'reference_free'}, SimPOLoss: {'beta', 'gamma'},
        CPOLoss: {'beta'}, ORPOLoss: {'beta'},
    }[type(loss)]  # fmt: skip
    weight = {DPOLoss: 'sft_weight', CPOLoss: 'cpo_alpha'}.get(type(loss))
    return {name: getattr(loss, name) for name in names} | ({} if weight is None else {weight: loss.nll_weight})


def test_kto_baselines_are_detached_and_never_negative():
    """Each log-ratio's gradient is that of its own sigmoid alone."""
    loss = DPOLoss('kto', beta=1.0)
    _, grad = run(loss, {'labels': LABELS}, LOGPS, ref_logps=REF)

    def slope(x):
        return math.exp(-x) / (1 + math.exp(-x)) ** 2

    want = [-slope(2.0) / 2, slope(2.5 + 1.0) / 2, -slope(3.0) / 2, slope(2.5) / 2]
    for i, value in enumerate(want):
        assert grad[i, 0].item() == pytest.approx(value, rel=1e-12)
    worse = run(loss, {'labels': LABELS}, LOGPS - 10 * (LABELS == 1), ref_logps=REF)[0]
    ratios = [2 - 20.0, -1 - 10.0, 3 - 30.0, 0 - 20.0]  # both means are below 0, so z = 0
    want = sum(2 - 1 / (1 + math.exp(-c)) - 1 / (1 + math.exp(r)) for c, r in zip(ratios[0::2], ratios[1::2])) / 2
    assert worse.item() == pytest.approx(want, rel=1e-12)


# ---- the formulas


@st.composite
def batches(draw):
    """Log-probs of policy and reference, labels with any number of ignored tokens."""
    pairs, length = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    kept = draw(st.lists(st.integers(0, length), min_size=2 * pairs, max_size=2 * pairs))
    labels = torch.full((2 * pairs, length), -100)
    for row, n in zip(labels, kept):
        row[torch.randperm(length, generator=generator)[:n]] = 3
    logps, ref = (-3 * torch.rand(labels.shape, generator=generator, dtype=F64) for _ in range(2))
    return labels, logps, ref


CONFIGURED = [
    *(('DPOLoss', {'loss_type': kind, 'beta': 0.7, 'sft_weight': 0.3}) for kind in LOSS_TYPES),
    ('DPOLoss', {'label_smoothing': 0.3, 'beta': 0.7}), ('DPOLoss', {'reference_free': True}),
    ('SimPOLoss', {}), ('CPOLoss', {}), ('ORPOLoss', {'beta': 0.8}),
]  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batches(), st.sampled_from(CONFIGURED))
def test_any_batch_is_the_formula(batch, configured):
    labels, logps, ref = batch
    name, init = configured
    given = {'ref_logps': ref.masked_fill(labels == -100, NAN)} if name == 'DPOLoss' else {}
    leaf = logps.clone().requires_grad_()
    rows = [(leaf[i, labels[i] != -100], ref[i, labels[i] != -100]) for i in range(len(labels))]
    want = loss_of(name, init, [Pair(a[0], b[0], a[1], b[1]) for a, b in zip(rows[0::2], rows[1::2])])
    if want.requires_grad:
        want.backward()
    value, grad = run(getattr(losses, name)(**init), {'labels': labels}, logps, **given)
    torch.testing.assert_close(value, want.detach().to(F64), **PRECISE)
    expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-13)


def test_the_three_ways_to_give_a_reference_agree():
    sums = torch.where(LABELS == -100, 0, REF).sum(1)
    ragged = [row[labels != -100].tolist() for row, labels in zip(REF, LABELS)]
    longer = torch.cat([REF, torch.full((4, 3), NAN, dtype=F64)], 1)
    ways = [
        {'ref_logps': REF}, {'ref_logps': ragged}, {'ref_logps': longer}, {'ref_outputs': {'logps': REF}},
        {'ref_outputs': {'logps': ragged, 'loss': None}},
        {'ref_chosen_logps': sums[0::2], 'ref_rejected_logps': sums[1::2].tolist()},
        {'ref_chosen_logps': sums[0::2, None], 'ref_rejected_logps': sums[1::2].numpy()},
        {'ref_chosen_logps': sums[0::2, None].tolist(), 'ref_rejected_logps': list(sums[1::2])},
        {'ref_outputs': [{'logps': list(REF)}]}, {'ref_outputs': [{'logps': REF}]},
    ]  # fmt: skip
    for loss in (DPOLoss(sft_weight=0.1), DPOLoss('ipo'), DPOLoss('kto')):
        first, *others = [run(loss, {'labels': LABELS}, LOGPS, **way) for way in ways]
        for other in others:
            torch.testing.assert_close(other, first, **PRECISE)


def test_pairs_without_trained_tokens_do_not_count():
    """Padding a batch with them changes nothing, whatever they hold; a batch of nothing else is a 0 with a gradient."""
    padded = torch.cat([LABELS, torch.full((2, 3), -100)])
    logps, ref = (torch.cat([x, torch.full((2, 3), NAN, dtype=F64)]) for x in (LOGPS, REF))
    for loss, _ in BY_HAND.values():
        given = isinstance(loss, DPOLoss)
        plain = run(loss, {'labels': LABELS}, LOGPS, **({'ref_logps': REF} if given else {}))
        more = run(loss, {'labels': padded}, logps, **({'ref_logps': ref} if given else {}))
        torch.testing.assert_close(more[0], plain[0], **PRECISE)
        torch.testing.assert_close(more[1][:4], plain[1], **PRECISE)
        nothing = run(loss, {'labels': padded[4:]}, logps[4:], **({'ref_logps': ref[4:]} if given else {}))
        assert nothing[0] == 0
        assert (nothing[1] == 0).all()


def test_composite_terms_each_have_their_own_denominator():
    """Micro-batches of 1 and 2 pairs, with the counts of the global batch, add up to the whole."""
    labels, logps = torch.cat([LABELS, LABELS[[2, 1]]]), torch.cat([LOGPS, LOGPS[[2, 1]]])
    ref = torch.cat([REF, REF[[2, 1]]])
    chosen_tokens = int((labels[0::2] != -100).sum())
    counts = Counts(int((labels != -100).sum()), 6, 3, chosen_tokens)
    for loss in (DPOLoss(sft_weight=0.4), CPOLoss(), ORPOLoss(beta=0.7)):
        given = isinstance(loss, DPOLoss)
        whole, _ = run(loss, {'labels': labels}, logps, **({'ref_logps': ref} if given else {}))
        total = 0.0
        for part in (slice(0, 2), slice(2, 6)):
            batch = TokenBatch.of({'labels': labels[part]}, counts=counts)
            extra = {'ref_logps': ref[part].masked_fill(labels[part] == -100, 0)} if given else {}
            stats = TokenStats(log_prob=torch.where(labels[part] == -100, 0, logps[part]))
            total = total + loss.contribution(batch, stats, **extra)
        torch.testing.assert_close(total, whole, **PRECISE)


def test_long_sequences_lose_no_digits_in_float32():
    """A sum over 100,000 tokens is large beside the log-ratio that counts."""
    n = 100_000
    labels = torch.ones(2, n, dtype=torch.long)
    logps = -2 - torch.rand(2, n, generator=torch.Generator().manual_seed(0))
    ref = logps.clone()
    ref[0, :100] -= 0.01
    value, _ = run(DPOLoss(beta=1.0), {'labels': labels}, logps, ref_logps=ref)
    h = (logps.double() - ref.double()).sum(1)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(math.log1p(math.exp(-(h[0] - h[1]).item())), rel=1e-6)


def test_half_precision_is_summed_in_full():
    """Ready log-probs in float16: of 8,000 tokens at −10 the sum is beyond its range, and of a reference its digits."""
    n = 8000
    labels, logps = torch.ones(2, n, dtype=torch.long), torch.full((2, n), -10.0, dtype=torch.float16)
    value, grad = run(CPOLoss(), {'labels': labels}, logps)
    assert value.item() == pytest.approx(math.log(2) + 10, rel=1e-6)
    assert grad.dtype == torch.float16
    ref = torch.full((2, n), -10.0, dtype=F64)
    ref[0] -= 1e-4
    value, _ = run(DPOLoss(beta=1.0), {'labels': labels}, logps, ref_logps=ref)
    assert value.item() == pytest.approx(math.log1p(math.exp(-0.8)), rel=1e-5)
    with pytest.raises(ValueError, match='whole pairs of a chosen and a rejected sequence, got 3'):
        DPOLoss()(
            {'labels': labels[[0, 0, 1]]}, {'logps': logps[[0, 0, 1]]}, ref_chosen_logps=[1], ref_rejected_logps=[1]
        )


def test_odds_keep_their_digits_near_0_and_1():
    """In float32 too; of what is as good as sure the odds are those of 1 − 1e-7."""
    for dtype, tolerance in ((F64, 1e-12), (torch.float32, 2e-6)):
        for log_p in (-1e-6, -1e-4, -0.5, -math.log(2), -1.0, -20.0, -500.0):
            x = torch.tensor(log_p, dtype=dtype).requires_grad_()
            odds = log_odds(x)
            odds.backward()
            rest = -math.expm1(x.item())
            assert odds.item() == pytest.approx(x.item() - math.log(rest), rel=tolerance, abs=tolerance)
            assert x.grad.item() == pytest.approx(1 / rest, rel=1e-5)
        for log_p in (0.0, -1e-9, 1e-12):
            x = torch.tensor(log_p, dtype=dtype).requires_grad_()
            log_odds(x).backward()
            assert log_odds(x).item() == pytest.approx(-math.log(1e-7), rel=1e-3)
            assert x.grad == 1


@pytest.mark.parametrize('far', [1e4, -1e4, 1e30, -1e30])
@pytest.mark.parametrize(('name', 'init'), CONFIGURED, ids=str)
def test_far_off_policies_have_finite_gradients(name, init, far):
    """Where the loss itself is finite: of IPO and hinge it is as large as it is."""
    labels = torch.tensor([[1, 1], [1, 1]])
    logps = f64([[-abs(far), -1.0], [-1.0, -1.0]]) if far > 0 else f64([[-1.0, -1.0], [-1.0, far]])
    given = {'ref_logps': torch.full((2, 2), -1.0, dtype=F64)} if name == 'DPOLoss' else {}
    value, grad = run(getattr(losses, name)(**init), {'labels': labels}, logps, **given)
    assert value.isfinite()
    assert grad.isfinite().all()


# ---- what is refused


def test_dpo_needs_a_reference_to_train():
    """By hand, on logits that want a gradient; ready log-probs may be had without, as 0 (recorded: 'DPO noref')."""
    logits = torch.zeros(2, 3, 5, dtype=F64, requires_grad=True)
    inputs = {'labels': torch.ones(2, 3, dtype=torch.long)}
    for kind in LOSS_TYPES:
        with pytest.raises(ValueError, match='must be given a reference: ref_logps='):
            DPOLoss(kind)(inputs, {'logits': logits})
        with torch.no_grad():
            assert DPOLoss(kind)(inputs, {'logits': logits})['loss'] == 0
    assert DPOLoss(reference_free=True)(inputs, {'logits': logits})['loss'].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        ({'ref_chosen_logps': [1.0, 2.0]}, 'must be given together, got ref_chosen_logps only'),
        ({'ref_logps': REF, 'ref_outputs': {'logps': REF}}, 'in one way, got ref_logps and ref_outputs'),
        ({'ref_outputs': {'logits': REF}}, r"ref_outputs must be a dictionary with 'logps'.*got \['logits'\]"),
        ({'ref_outputs': 3}, "ref_outputs must be a dictionary with 'logps'"),
        ({'ref_logps': REF[:3]}, 'ref_logps must have one entry for each of the 4 sequences'),
        ({'ref_logps': [[1.0, 2.0]] * 4}, 'ref_logps of sample 1 must have'),
        (
            {'ref_logps': [-4.0, -5.0, -6.0, -7.0]},
            'must be log-probs of every trained token, got one number for each of',
        ),
        ({'ref_logps': -4.0}, 'ref_logps must be log-probs of every trained token, got one number;'),
        ({'ref_logps': [[-4.0], [-5.0], [-6.0], [-7.0]]}, 'ref_logps of sample 0 must have 2'),
        ({'ref_chosen_logps': [None, 1.0], 'ref_rejected_logps': [1.0, 1.0]}, 'ref_chosen_logps of pair 0 must be'),
        ({'ref_chosen_logps': [1.0], 'ref_rejected_logps': [1.0]}, 'one number for each of the 2 pairs'),
        ({'ref_chosen_logps': [1.0, 2.0], 'ref_rejected_logps': REF}, 'one number for each of the 2 pairs'),
        ({'ref_logp': REF}, "no argument 'ref_logp'; did you mean 'ref_logps'?"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        DPOLoss()({'labels': LABELS}, {'logps': LOGPS}, **call)


@pytest.mark.parametrize('loss', [DPOLoss(reference_free=True), SimPOLoss(), CPOLoss(), ORPOLoss()])
def test_an_odd_batch_is_an_error(loss):
    with pytest.raises(ValueError, match='whole pairs of a chosen and a rejected sequence, got 3 sequences'):
        loss({'labels': LABELS[:3]}, {'logps': LOGPS[:3]})


@pytest.mark.parametrize(
    ('cls', 'init', 'message'),
    [
        (DPOLoss, {'loss_type': ['sigmoid']}, 'loss_type must be one of'),
        (DPOLoss, {'loss_type': 'sigmoide'}, "loss_type must be one of 'sigmoid', 'hinge', 'ipo', 'kto', 'kto_pair'"),
        (DPOLoss, {'beta': 0}, 'beta must be a finite number > 0'),
        (DPOLoss, {'beta': True}, 'beta must be a finite number > 0'),
        (DPOLoss, {'sft_weight': -1}, 'sft_weight must be a finite number >= 0'),
        (DPOLoss, {'label_smoothing': 0.6}, r'label_smoothing must lie in \[0, 0.5\]'),
        (DPOLoss, {'label_smoothing': 0.1, 'loss_type': 'ipo'}, "defined for loss_type='sigmoid' only"),
        (DPOLoss, {'scope': 'global'}, "scope must be 'batch' or 'micro_batch'"),
        (DPOLoss, {'layout': 'concatenated'}, "layout must be 'interleaved' or 'separated'"),
        (DPOLoss, {'lambda_orpo': 0.1}, "DPOLoss has no argument 'lambda_orpo'"),
        (DPOLoss, {'sftweight': 0.1}, "did you mean 'sft_weight'?"),
        (SimPOLoss, {'gamma': INF}, 'gamma must be a finite number'),
        (CPOLoss, {'bc_coef': 0.1, 'cpo_alpha': 0.1}, 'bc_coef is another name of cpo_alpha'),
        (ORPOLoss, {'lambda_orpo': 0.1, 'beta': 0.1}, 'lambda_orpo is another name of beta'),
    ],
)
def test_wrong_constructions(cls, init, message):
    with pytest.raises(ValueError, match=message):
        cls(**init)


def test_aliases():
    assert CPOLoss(bc_coef=0.3).nll_weight == 0.3
    assert ORPOLoss(lambda_orpo=0.3).pair_weight == 0.3
    assert DPOLoss('kto_pair').loss_type == 'kto'


def test_another_loss_of_pairs_is_a_method():
    """What the documentation promises of PreferenceLossBase, and another DPO type in its table."""

    class Squared(PreferenceLossBase):
        def pair_losses(self, chosen, rejected):
            return (chosen.total - rejected.total) ** 2

    value, _ = run(Squared(), {'labels': LABELS}, LOGPS)
    assert value.item() == pytest.approx(((-3 + 4) ** 2 + (-3 + 2) ** 2) / 2)
