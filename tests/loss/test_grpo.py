"""GRPO and its variants called by hand: recorded values of Twinkle, numbers worked out by hand, plain float64 formulas,
far-off policies, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from tests.policy_formulas import LOSSES, Response, loss_of
from tests.recorded import assert_recorded, name_of, records_of, replay
from twinkle_megatron import loss as losses
from twinkle_megatron.batch import Counts, TokenBatch
from twinkle_megatron.loss import BNPOLoss, CISPOLoss, GRPOLoss, GSPOLoss
from twinkle_megatron.loss.grpo import k3
from twinkle_megatron.vocab_parallel import LinearHead, TokenStats

F64 = torch.float64
NAN, INF = math.nan, math.inf
PRECISE = {'rtol': 1e-12, 'atol': 1e-14}


def f64(values):
    return torch.tensor(values, dtype=F64)


def make(name, **init):
    return getattr(losses, name)(**init)


def run(loss, inputs, logps, entropies=None, **extra):
    """Value and gradients of a loss on ready log-probs."""
    leaves = {'logps': logps.clone().requires_grad_()}
    if entropies is not None:
        leaves['entropies'] = entropies.clone().requires_grad_()
    result = loss(inputs, leaves, **extra)
    assert result['num_tokens'] == 0, 'a mean'
    result['loss'].backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values()]
    return result['loss'].detach(), *grads


# ---- recorded values


@pytest.mark.parametrize('record', records_of(LOSSES, 'equal'), ids=name_of)
def test_recorded_values_and_gradients(record):
    assert_recorded(record)


DIFFERENT = records_of(LOSSES, 'differs')


@pytest.mark.parametrize('record', DIFFERENT, ids=name_of)
def test_where_twinkle_is_wrong_the_paper_counts(record):
    """CISPO caps at 1 + epsilon_high, which Twinkle swallows; the mean of nothing is 0 with zero gradients."""
    assert record['cls'] == 'CISPOLoss'
    labels, logps = record['inputs']['labels'], record['outputs']['logps']
    result, grads = replay(record)
    at = labels != -100
    want, grad = 0.0, torch.zeros_like(logps)
    if at.any():
        leaf = logps[at].double().requires_grad_()
        advantages = f64(record['call']['advantages'])[:, None].expand(labels.shape)[at]
        cap = (leaf.detach() - record['call']['old_logps'][at].double()).exp().clamp(max=1 + 0.4)
        mean = -(cap * advantages * leaf).mean()
        mean.backward()
        want, grad[at] = mean.item(), leaf.grad.to(grad.dtype)
    tolerance = 1e-10 if logps.dtype == F64 else 1e-6
    assert result['loss'].item() == pytest.approx(want, rel=tolerance, abs=0)
    torch.testing.assert_close(grads['logps'], grad, rtol=tolerance, atol=0)
    assert record['loss'].item() != pytest.approx(want, rel=1e-3), 'the record does not show the fault'


def test_all_records_that_differ_are_looked_at():
    assert {r['name'].split('|')[0] for r in DIFFERENT} == {
        "CISPOLoss {'epsilon': 0.1, 'epsilon_high': 0.4}",
        'CISPOLoss all ignored',
    }


# ---- by hand: two sequences of three and two tokens, and one without any

LABELS = torch.tensor([[-100, 5, 5, -100, 5], [5, 5, -100, -100, -100], [-100] * 5])
AT = LABELS != -100
RATIOS = f64([1.25, 0.5, 1.1, 1.25, 0.5])
A1, A2 = 2.0, -1.0
GARBAGE = f64([NAN, INF, -INF, 1e308] * 4)[:15].view(3, 5)


def whole(at_tokens):
    """`[3, 5]` with garbage where nothing is trained."""
    return GARBAGE.clone().masked_scatter_(AT, f64(at_tokens) if isinstance(at_tokens, list) else at_tokens)


NEW = f64([-1.0, -0.25, -2.0, -0.5, -3.0])
HAND_INPUTS = {'labels': LABELS}
HAND = {'old_logps': whole(NEW - RATIOS.log()), 'advantages': [A1, A2, 3.0]}
S1, S2 = 0.6875 ** (1 / 3), 0.625**0.5  # geometric means of the ratios


def sigma(x):
    return 1 / (1 + math.exp(-x))


def gated(r, a, tau):
    """SAPO's loss of a token, and its derivative by the log-prob."""
    s = sigma(tau * (r - 1))
    return -a * s * 4 / tau, -a * 4 * s * (1 - s) * r


BY_HAND = {
    # A = 2: 1.25 is clipped to 1.2; 0.5 and 1.1 stay. A = −1: 1.25 stays, 0.5 is clipped to 0.8.
    'GRPOLoss': ({}, ((-2.4 - 1.0 - 2.2) / 3 + (1.25 + 0.8) / 2) / 2, [0, -1.0 / 6, -2.2 / 6, 1.25 / 4, 0]),
    'BNPOLoss': ({}, (-2.4 - 1.0 - 2.2 + 1.25 + 0.8) / 5, [0, -0.2, -0.44, 0.25, 0]),
    'DRGRPOLoss': (
        {'max_completion_length': 10}, (-2.4 - 1.0 - 2.2 + 1.25 + 0.8) / 20, [0, -0.05, -0.11, 0.0625, 0]),
    # the second sequence, 0.7906 with A = −1, is clipped to 0.8
    'GSPOLoss': ({}, (-2 * S1 + 0.8) / 2, [-S1 / 3, -S1 / 3, -S1 / 3, 0, 0]),
    'CISPOLoss': (
        {}, (1.2 * 2 * 1.0 + 0.5 * 2 * 0.25 + 1.1 * 2 * 2.0 - 1.2 * 0.5 - 0.5 * 3.0) / 5,
        [-2.4 / 5, -1.0 / 5, -2.2 / 5, 1.2 / 5, 0.5 / 5]),
    'SAPOLoss': (
        {'tau_pos': 2.0, 'tau_neg': 0.5},
        (sum(gated(r, 2, 2.0)[0] for r in (1.25, 0.5, 1.1)) / 3 + sum(gated(r, -1, 0.5)[0] for r in (1.25, 0.5)) / 2)
        / 2,
        [gated(r, 2, 2.0)[1] / 6 for r in (1.25, 0.5, 1.1)] + [gated(r, -1, 0.5)[1] / 4 for r in (1.25, 0.5)]),
}  # fmt: skip


@pytest.mark.parametrize('name', LOSSES)
def test_values_and_gradients_by_hand(name):
    init, value, gradient = BY_HAND[name]
    found, grad = run(make(name, **init), HAND_INPUTS, whole(NEW), **HAND)
    assert found.item() == pytest.approx(value, rel=1e-13)
    torch.testing.assert_close(grad, torch.zeros(3, 5, dtype=F64).masked_scatter_(AT, f64(gradient)), **PRECISE)


def weights_of(name):
    """Of each of the five tokens in the mean."""
    if name in ('BNPOLoss', 'CISPOLoss'):
        return f64([0.2] * 5)
    return f64([0.05] * 5) if name == 'DRGRPOLoss' else f64([1 / 6] * 3 + [1 / 4] * 2)


@pytest.mark.parametrize('name', LOSSES)
def test_kl_and_entropy_by_hand(name):
    """e = ln 2, ln ½, 0, ln 4, ln ¼: exp(e) − e − 1 has the derivative 1 − exp(e) by the log-prob."""
    init = BY_HAND[name][0]
    plain, grad = run(make(name, **init), HAND_INPUTS, whole(NEW), **HAND)
    ref = whole(NEW + f64([2, 0.5, 1, 4, 0.25]).log())
    both = make(name, **init, beta=0.5, entropy_coef=0.25)
    entropies = whole([1.0, 2.0, 3.0, 4.0, 5.0])
    value, by_logps, by_entropies = run(both, HAND_INPUTS, whole(NEW), entropies, ref_logps=ref, **HAND)
    kl = f64([1 - math.log(2), math.log(2) - 0.5, 0, 3 - math.log(4), math.log(4) - 0.75])
    weights = weights_of(name)
    more = (weights * (0.5 * kl - 0.25 * f64([1, 2, 3, 4, 5]))).sum()
    assert value.item() == pytest.approx((plain + more).item(), rel=1e-13)
    slope = 0.5 * (1 - f64([2, 0.5, 1, 4, 0.25]))
    torch.testing.assert_close(by_logps[AT], grad[AT] + weights * slope, **PRECISE)
    torch.testing.assert_close(by_entropies[AT], -0.25 * weights, **PRECISE)
    assert not by_logps[~AT].any()
    assert not by_entropies[~AT].any()


# ---- the formulas at random, in every form of a batch


def random_batch(seed, lengths=(6, 3, 8, 5, 4)):
    """Sequences with random labels of which about two thirds are trained; the fourth has none."""
    generator = torch.Generator().manual_seed(seed)
    labels = [torch.randint(0, 11, (n,), generator=generator) for n in lengths]
    for row in labels:
        row[torch.rand(len(row), generator=generator) > 0.7] = -100
    labels[3][:] = -100

    def draw(n):
        return torch.randn(n, generator=generator, dtype=F64)

    values = [{'new': draw(n) - 3, 'old': draw(n) - 3, 'ref': draw(n) - 3, 'entropy': draw(n)} for n in lengths]
    return labels, values, torch.randn(len(lengths), generator=generator, dtype=F64).tolist()


def responses_of(labels, values, advantages):
    """For the formulas, with leaves to differentiate."""
    out = []
    for row, of, advantage in zip(labels, values, advantages):
        at = row != -100
        out.append(Response(of['new'][at].clone().requires_grad_(), of['old'][at], of['ref'][at], f64(advantage),
                            of['entropy'][at].clone().requires_grad_()))  # fmt: skip
    return out


def padded(labels, values):
    width = max(map(len, labels)) + 1

    def fill(rows, value):
        return torch.stack([torch.cat([row, row.new_full((width - len(row),), value)]) for row in rows])

    return {'labels': fill(labels, -100)}, {name: fill([v[name] for v in values], NAN) for name in values[0]}


def packed(labels, values, by='position_ids'):
    told = torch.cat([torch.arange(len(row)) for row in labels])[None]
    if by == 'cu_seqlens':
        told = torch.tensor([0, *map(len, labels)]).cumsum(0)
    found = {name: torch.cat([v[name] for v in values])[None] for name in values[0]}
    return {'labels': torch.cat(labels)[None], by: told}, found


def masked(labels, values):
    """Padded, with `completion_mask` in place of ignored labels."""
    inputs, found = padded(labels, values)
    mask = (inputs['labels'] != -100).long()
    return {'labels': inputs['labels'].clamp(min=0), 'completion_mask': mask}, found


BATCHES = {
    'padded': padded,
    'masked': masked,
    'packed by positions': packed,
    'packed by boundaries': lambda *batch: packed(*batch, by='cu_seqlens'),
    'packed, 1-D': lambda *batch: tuple({key: x[0] for key, x in part.items()} for part in packed(*batch)),
}
INITS = {
    'GRPOLoss': {'clip_range': 0.3, 'clip_range_high': 0.6},
    'GSPOLoss': {'clip_range': 0.2, 'clip_range_high': 0.4},
    'SAPOLoss': {'tau_pos': 1.7, 'tau_neg': 0.6},
    'CISPOLoss': {'clip_range_high': 0.5},
    'BNPOLoss': {'clip_range': 0.3},
    'DRGRPOLoss': {'clip_range': 0.3, 'max_completion_length': 17},
}


@pytest.mark.parametrize('form', BATCHES)
@pytest.mark.parametrize('name', LOSSES)
def test_formulas_padded_and_packed(name, form):
    init = {**INITS[name], 'beta': 0.2, 'entropy_coef': 0.1}
    for seed in range(3):
        labels, values, advantages = random_batch(seed)
        responses = responses_of(labels, values, advantages)
        want = loss_of(name, init, responses)
        want.backward()
        inputs, given = BATCHES[form](labels, values)
        extra = {'old_logps': given['old'], 'ref_logps': given['ref'], 'advantages': advantages}
        found, *grads = run(make(name, **init), inputs, given['new'], given['entropy'], **extra)
        assert found.item() == pytest.approx(want.item(), rel=1e-12)
        at = torch.cat([row != -100 for row in labels])
        for grad, leaves in zip(grads, ([r.new for r in responses], [r.entropy for r in responses])):
            inside = grad != 0
            wanted = torch.cat([torch.zeros(0, dtype=F64) if x.grad is None else x.grad for x in leaves])
            torch.testing.assert_close(grad[inside], wanted[wanted != 0], **PRECISE)
            if form.startswith('packed'):
                assert not grad.reshape(-1)[~at].any()


@pytest.mark.parametrize('name', LOSSES)
def test_advantages_of_each_token(name):
    """Given per token they need not be the same over a sequence."""
    labels, values, _ = random_batch(7)
    inputs, given = padded(labels, values)
    advantages = torch.randn(given['new'].shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    responses = responses_of(labels, values, [0.0] * 5)
    at = [row != -100 for row in labels]
    responses = [
        Response(r.new, r.old, r.ref, advantages[i, : len(a)][a], r.entropy)
        for i, (r, a) in enumerate(zip(responses, at))
    ]
    want = loss_of(name, INITS[name], responses)
    found, _ = run(make(name, **INITS[name]), inputs, given['new'], old_logps=given['old'], advantages=advantages)
    assert found.item() == pytest.approx(want.item(), rel=1e-12)


# ---- what is missing


@pytest.mark.parametrize('name', LOSSES)
@pytest.mark.parametrize('worst', [-2.0, INF, -INF, NAN])
def test_without_advantages_the_loss_is_0_with_a_gradient_path(name, worst):
    logps = torch.full((3, 5), worst, dtype=F64)
    value, grad = run(make(name, beta=0.1), HAND_INPUTS, logps, old_logps=HAND['old_logps'], ref_logps=None)
    assert value.item() == 0
    assert torch.equal(grad, torch.zeros(3, 5, dtype=F64))


@pytest.mark.parametrize('name', LOSSES)
def test_without_old_logps_the_ratio_is_1(name):
    found = run(make(name), HAND_INPUTS, whole(NEW), advantages=HAND['advantages'])
    want = run(make(name), HAND_INPUTS, whole(NEW), advantages=HAND['advantages'], old_logps=whole(NEW))
    assert found[0] == want[0]
    assert torch.equal(found[1], want[1])
    gradient = -weights_of(name) * f64([A1] * 3 + [A2] * 2)
    if name == 'DRGRPOLoss':
        gradient = gradient * 10 / 1024
    torch.testing.assert_close(found[1][AT], gradient, **PRECISE)


def test_without_ref_logps_there_is_no_kl():
    found = run(GRPOLoss(beta=0.5), HAND_INPUTS, whole(NEW), **HAND)
    assert found[0] == run(GRPOLoss(), HAND_INPUTS, whole(NEW), **HAND)[0]


@pytest.mark.parametrize('name', LOSSES)
def test_a_batch_without_trained_tokens_is_0_with_zero_gradients(name):
    inputs = {'labels': torch.full((2, 3), -100)}
    extra = {'old_logps': torch.full((2, 3), NAN), 'ref_logps': [[], []], 'advantages': [1.0, NAN]}
    value, grad = run(make(name, beta=0.1), inputs, torch.full((2, 3), NAN, dtype=F64), **extra)
    assert value.item() == 0
    assert torch.equal(grad, torch.zeros(2, 3, dtype=F64))


def test_gradients_go_to_the_log_probs_only():
    old, advantages = whole(NEW).requires_grad_(), f64([1.0, 2.0, 3.0]).requires_grad_()
    GRPOLoss()(HAND_INPUTS, {'logps': whole(NEW).requires_grad_()}, old_logps=old, advantages=advantages)[
        'loss'
    ].backward()
    assert old.grad is None
    assert advantages.grad is None


# ---- far-off policies, garbage at ignored tokens


@pytest.mark.parametrize('far', [1e4, -1e4, INF, -INF, 700.0, -700.0])
@pytest.mark.parametrize('which', ['old_logps', 'ref_logps', 'both'])
@pytest.mark.parametrize('name', LOSSES)
def test_a_far_off_token_leaves_value_and_gradient_finite_and_those_of_other_tokens_alone(name, which, far):
    """The ratio and the divergence of a token more than 20 nats off have no gradient."""
    loss = make(name, **INITS[name], beta=0.1)
    near = {'old_logps': whole(NEW - RATIOS.log()), 'ref_logps': whole(NEW + 0.3), 'advantages': HAND['advantages']}
    _, usual = run(loss, HAND_INPUTS, whole(NEW), **near)
    moved = {key: x.clone() for key, x in near.items() if key != 'advantages'}
    for key in moved if which == 'both' else [which]:
        moved[key][0, 2] = far
    value, grad = run(loss, HAND_INPUTS, whole(NEW), **moved, advantages=HAND['advantages'])
    assert value.isfinite()
    assert grad.isfinite().all()
    untouched = torch.ones_like(AT)
    untouched[0, 2] = False
    if name == 'GSPOLoss' and which != 'ref_logps':
        untouched[0] = False  # its whole sequence has one ratio
    assert torch.equal(grad[untouched], usual[untouched])
    if which == 'both' and name not in ('CISPOLoss', 'GSPOLoss'):
        assert grad[0, 2] == 0
    if which == 'both' and name == 'CISPOLoss':
        weight = 1.5 if far < 0 else math.exp(-20)
        assert grad[0, 2].item() == pytest.approx(-weight * A1 / 5, rel=1e-12)


def test_log_ratios_are_bounded_at_20_nats():
    """Values of one token by hand: exp(±20), and exp(20) − 21 for the divergence."""
    inputs, logps = {'labels': torch.tensor([[3]])}, f64([[-30.0]])
    low = run(GRPOLoss(), inputs, logps, old_logps=f64([[0.0]]), advantages=[2.0])
    assert low[0].item() == pytest.approx(-2 * math.exp(-20), rel=1e-13)
    high = run(GRPOLoss(), inputs, logps, old_logps=f64([[-90.0]]), advantages=[-2.0])
    assert high[0].item() == pytest.approx(2 * math.exp(20), rel=1e-13)
    kl = run(GRPOLoss(beta=1.0), inputs, logps, ref_logps=f64([[0.0]]), advantages=[0.0])
    assert kl[0].item() == pytest.approx(math.exp(20) - 21, rel=1e-12)
    assert [grad.item() for _, grad in (low, high, kl)] == [0, 0, 0]
    just = run(GRPOLoss(beta=1.0), inputs, logps, ref_logps=f64([[-10.5]]), advantages=[0.0])
    assert just[1].item() == pytest.approx(1 - math.exp(19.5), rel=1e-12)


@pytest.mark.parametrize('name', LOSSES)
@pytest.mark.parametrize('garbage', [NAN, INF, -INF, 1e308])
def test_garbage_at_ignored_tokens_changes_nothing(name, garbage):
    """In log-probs, entropies, and every extra; GSPO's gradient runs through sums over the sequence."""
    labels, values, advantages = random_batch(11)
    inputs, given = padded(labels, values)
    loss = make(name, **INITS[name], beta=0.2, entropy_coef=0.1)
    at = inputs['labels'] != -100
    given['advantage'] = f64(advantages)[:, None].expand(at.shape)

    def outcome(fill):
        new, old, ref, entropy, a = (
            torch.where(at, given[key], fill) for key in ('new', 'old', 'ref', 'entropy', 'advantage')
        )
        return run(loss, inputs, new, entropy, old_logps=old, ref_logps=ref, advantages=a)

    for mine, want in zip(outcome(garbage), outcome(0.0)):
        assert torch.equal(mine, want)


@pytest.mark.parametrize('name', LOSSES)
def test_garbage_logits_of_ignored_tokens_change_nothing(name):
    """Also for a `LinearHead`, whose hidden states are garbage there."""
    labels, values, advantages = random_batch(12)
    inputs, given = padded(labels, values)
    at = inputs['labels'] != -100
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*at.shape, 4, generator=generator, dtype=F64)
    weight = torch.randn(11, 4, generator=generator, dtype=F64)
    extra = {'old_logps': given['old'], 'ref_logps': given['ref'], 'advantages': advantages}
    loss = make(name, **INITS[name], beta=0.2, entropy_coef=0.1, temperature=0.7)
    found = []
    for fill in (0.0, NAN, INF):
        x = torch.where(at[..., None], hidden, fill).requires_grad_()
        logits = torch.where(at[..., None], hidden @ weight.T, fill).requires_grad_()
        w = weight.clone().requires_grad_()
        by_head = loss(inputs, {'logits': LinearHead(x, w)}, **extra)['loss']
        built = loss(inputs, {'logits': logits}, **extra)['loss']
        (by_head + 3 * built).backward()
        assert by_head.item() == pytest.approx(built.item(), rel=1e-12)
        found.append((by_head.detach(), built.detach(), x.grad, w.grad, logits.grad))
    for other in found[1:]:
        for mine, want in zip(other, found[0]):
            assert torch.equal(mine, want)
    torch.testing.assert_close(found[0][3] * 3, torch.einsum('bsv,bsh->vh', found[0][4], hidden), **PRECISE)


# ---- cases


def test_case_18_the_temperature_of_the_sampler_gives_a_ratio_of_1():
    """Logits [2, 0] at temperature ½, sampled with the log-prob −0.018150."""
    logits = f64([[[2.0, 0.0]]]).requires_grad_()
    rollout = -math.log1p(math.exp(-4))
    assert round(rollout, 6) == -0.018150
    result = GRPOLoss(temperature=0.5)({'labels': torch.tensor([[0]])}, {'logits': logits}, old_logps=f64([[rollout]]),
                                       advantages=[3.0])['loss']  # fmt: skip
    assert result.item() == pytest.approx(-3.0, rel=1e-12)
    result.backward()
    p = 1 / (1 + math.exp(-4))
    torch.testing.assert_close(logits.grad, f64([[[-3.0 * 2 * (1 - p), 3.0 * 2 * (1 - p)]]]), **PRECISE)
    wrong = GRPOLoss()({'labels': torch.tensor([[0]])}, {'logits': logits}, old_logps=f64([[rollout]]),
                       advantages=[3.0])  # fmt: skip
    assert wrong['loss'].item() != pytest.approx(-3.0, rel=0.05)


def test_case_22_nan_at_a_masked_token():
    """Losses [1, NaN] with the mask [1, 0]: 1, and a finite gradient."""
    for name in LOSSES:
        extra = {'old_logps': f64([[-0.5, NAN]]), 'ref_logps': f64([[-1.0, NAN]]), 'advantages': [-1.0]}
        inputs = {'labels': torch.tensor([[3, 3]]), 'completion_mask': torch.tensor([[1, 0]])}
        logps = f64([[-0.5 if name != 'CISPOLoss' else -1.0, NAN]])
        if name == 'CISPOLoss':
            extra['old_logps'][0, 0] = -1.0
        value, grad = run(make(name, **({'max_completion_length': 1} if name == 'DRGRPOLoss' else {})), inputs, logps,
                          **extra)  # fmt: skip
        want = {'SAPOLoss': 2.0, 'CISPOLoss': -1.0}.get(name, 1.0)
        assert value.item() == pytest.approx(want, rel=1e-14), name
        assert grad[0].tolist() == [1.0, 0.0], name


def test_case_23_the_divergence_is_capped_before_the_exponential():
    """ref − policy = 100 with the cap 10: 10, and a finite gradient."""
    logps = f64([-101.0]).requires_grad_()
    value = k3(logps, f64([-1.0]), cap=10.0)
    value.backward()
    assert value.item() == 10
    assert logps.grad.item() == 0
    near = k3(f64([-2.0]), f64([-1.0]), cap=10.0)
    assert near.item() == pytest.approx(math.e - 2, rel=1e-14)
    assert k3(f64([-1.0]), f64([-1.0 - 1e-9])).item() == pytest.approx(5e-19, rel=1e-6), 'exact near 0'


def test_case_40_the_token_total_is_that_of_the_accumulated_micro_batches():
    """Four micro-batches a generation, two a step, of 1, 3, 2 and 2 trained tokens: each step has its token mean."""
    rows = [torch.tensor([[3] * n + [-100] * (3 - n)]) for n in (1, 3, 2, 2)]
    logps = [-torch.rand(1, 3, generator=torch.Generator().manual_seed(i), dtype=F64) for i in range(4)]
    for step in ((0, 1), (2, 3)):
        tokens = sum(int((rows[i] != -100).sum()) for i in step)
        values = torch.cat([logps[i][rows[i] != -100] for i in step])
        for name in ('BNPOLoss', 'CISPOLoss'):
            want = -(values if name == 'CISPOLoss' else torch.ones_like(values)).mean().item()
            loss = make(name)
            parts = [
                loss.contribution(
                    TokenBatch.of({'labels': rows[i]}, counts=Counts(tokens, 2)), TokenStats(log_prob=logps[i]),
                    advantages=torch.ones(1, 3),
                ).item()
                for i in step
            ]  # fmt: skip
            assert sum(parts) == pytest.approx(want, rel=1e-14)
            if name == 'CISPOLoss':
                by_hand = [
                    loss({'labels': rows[i]}, {'logps': logps[i]}, advantages=[1.0], num_items_in_batch=tokens)['loss']
                    for i in step
                ]
                assert sum(by_hand).item() == pytest.approx(want, rel=1e-14)


def test_case_47_the_weight_of_cispo_is_detached():
    """logp −1, old −1.5, A = 1, cap 1.28: −1.28 by the log-prob, where the PPO clip gives 0."""
    inputs, logps, old = {'labels': torch.tensor([[3]])}, f64([[-1.0]]), f64([[-1.5]])
    value, grad = run(CISPOLoss(clip_range_high=0.28), inputs, logps, old_logps=old, advantages=[1.0])
    assert grad.item() == pytest.approx(-1.28, rel=1e-15)
    assert value.item() == pytest.approx(1.28, rel=1e-15)
    assert run(GRPOLoss(clip_range_high=0.28), inputs, logps, old_logps=old, advantages=[1.0])[1].item() == 0
    below = run(CISPOLoss(clip_range=0.2), inputs, logps, old_logps=f64([[0.0]]), advantages=[1.0])
    assert below[1].item() == pytest.approx(-math.exp(-1), rel=1e-15), 'there is no lower bound'


# ---- what a call takes


@pytest.mark.parametrize('items', [7, 7.0, torch.tensor(7), torch.tensor(7.0)])
def test_cispo_divides_by_num_items_in_batch(items):
    value, grad = run(CISPOLoss(), HAND_INPUTS, whole(NEW), **HAND, num_items_in_batch=items)
    _, five, gradient = BY_HAND['CISPOLoss']
    assert value.item() == pytest.approx(five * 5 / 7, rel=1e-13)
    torch.testing.assert_close(grad[AT], f64(gradient) * 5 / 7, **PRECISE)


@pytest.mark.parametrize('items', [0, -1, NAN])
def test_a_wrong_num_items_in_batch_is_refused(items):
    with pytest.raises(ValueError, match='num_items_in_batch must be a number > 0'):
        CISPOLoss()(HAND_INPUTS, {'logps': whole(NEW)}, **HAND, num_items_in_batch=items)


def test_unknown_keywords_of_a_call_are_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"GRPOLoss.__call__ has no argument 'old_logp'; did you mean 'old_logps'"):
        GRPOLoss()(HAND_INPUTS, {'logps': whole(NEW)}, old_logp=None)
    with pytest.raises(ValueError, match="no argument 'num_items_in_batch'"):
        BNPOLoss()(HAND_INPUTS, {'logps': whole(NEW)}, num_items_in_batch=3)


def test_the_entropy_is_asked_for_only_where_it_counts():
    assert GRPOLoss().needs == {'log_prob'}
    assert GRPOLoss(entropy_coef=0.1).needs == {'log_prob', 'entropy'}
    with pytest.raises(ValueError, match=r"GRPOLoss needs \['entropy'\] of the whole distribution"):
        GRPOLoss(entropy_coef=0.1)(HAND_INPUTS, {'logps': whole(NEW)}, **HAND)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r'logps must have the shape of labels, \(3, 5\), got \(3, 4\)'):
        GRPOLoss()(HAND_INPUTS, {'logps': torch.zeros(3, 4)}, advantages=[1.0] * 3)
    with pytest.raises(ValueError, match='entropies must have the shape of labels'):
        GRPOLoss()(HAND_INPUTS, {'logps': torch.zeros(3, 5), 'entropies': torch.zeros(3, 4)}, advantages=[1.0] * 3)
    with pytest.raises(ValueError, match="outputs must hold 'logits' or 'logps'"):
        GRPOLoss()(HAND_INPUTS, {}, advantages=[1.0] * 3)


@pytest.mark.parametrize('name', LOSSES)
def test_inputs_are_not_written_to(name):
    labels, values, advantages = random_batch(5)
    inputs, given = padded(labels, values)
    tensors = [inputs['labels'], *given.values()]
    before = [x.clone() for x in tensors]
    loss = make(name, **INITS[name], beta=0.1, entropy_coef=0.1)
    extra = {'old_logps': given['old'], 'ref_logps': given['ref'], 'advantages': torch.tensor(advantages)}
    run(loss, inputs, given['new'], given['entropy'], **extra)
    for x, old in zip(tensors, before):
        assert torch.equal(x.nan_to_num(9), old.nan_to_num(9))


def test_backward_twice():
    for name in LOSSES:
        logps = whole(NEW).requires_grad_()
        loss = make(name, beta=0.1)(HAND_INPUTS, {'logps': logps}, **HAND, ref_logps=whole(NEW + 0.5))['loss']
        loss.backward(retain_graph=True)
        once = logps.grad.clone()
        loss.backward()
        assert torch.equal(logps.grad, 2 * once)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_gradients_have_the_dtype_of_what_they_are_of(dtype):
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    loss = GSPOLoss(entropy_coef=0.1)({'labels': LABELS}, {'logits': logits}, **HAND)['loss']
    loss.backward()
    assert logits.grad.dtype == dtype
    assert loss.dtype == torch.float32
