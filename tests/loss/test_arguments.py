"""Constructor keywords of the losses: documented and Twinkle's names, conflicts, unknown ones, wrong values."""

from __future__ import annotations

import inspect
import math

import pytest

from tests.policy_formulas import LOSSES, METRICS
from twinkle_megatron import loss as losses
from twinkle_megatron import metric as metrics
from twinkle_megatron.arguments import checked_arguments
from twinkle_megatron.loss import CISPOLoss, CrossEntropyLoss, DRGRPOLoss, GRPOLoss, SAPOLoss

FAMILY = [getattr(losses, name) for name in LOSSES]
POLICY_METRICS = [getattr(metrics, name) for name in METRICS]


@pytest.mark.parametrize('cls', FAMILY)
def test_documented_names_and_twinkle_s_set_the_same(cls):
    ours, theirs = cls(clip_range=0.1, clip_range_high=0.4), cls(epsilon=0.1, epsilon_high=0.4)
    assert vars(ours) == vars(theirs)
    assert (ours.clip_range, ours.clip_range_high) == (0.1, 0.4)
    assert cls(clip_range=0.3).clip_range_high == 0.3
    assert cls(epsilon=0.3).clip_range_high == 0.3
    assert cls(epsilon_high=0.3).clip_range == 0.2


@pytest.mark.parametrize('cls', FAMILY)
def test_documented_examples_and_defaults(cls):
    loss = cls(clip_range=0.2, beta=0.01)
    assert (loss.clip_range, loss.beta) == (0.2, 0.01)
    bare = cls()
    assert (bare.clip_range, bare.clip_range_high, bare.beta, bare.entropy_coef) == (0.2, 0.2, 0.0, 0.0)
    assert (bare.temperature, bare.ignore_index) == (1.0, -100)
    assert isinstance(bare, GRPOLoss)


def test_tau_sets_both_sides():
    loss = SAPOLoss(clip_range=0.2, beta=0.01, tau=1.5)
    assert (loss.tau_pos, loss.tau_neg) == (1.5, 1.5)
    loss = SAPOLoss(tau_pos=2.0)
    assert (loss.tau_pos, loss.tau_neg) == (2.0, 1.0)
    assert DRGRPOLoss().max_completion_length == 1024


CONFLICTS = [
    (GRPOLoss, (), {'epsilon': 0.1, 'clip_range': 0.1}, 'epsilon is another name of clip_range: give one of them'),
    (GRPOLoss, (0.1,), {'epsilon': 0.1}, 'epsilon is another name of clip_range'),
    (CISPOLoss, (), {'epsilon_high': 0.1, 'clip_range_high': None}, 'epsilon_high is another name of clip_range_high'),
    (DRGRPOLoss, (0.1, 0.2), {'epsilon_high': 0.1}, 'epsilon_high is another name of clip_range_high'),
    (SAPOLoss, (), {'tau': 1.0, 'tau_pos': 1.0}, 'tau is another name of tau_pos'),
    (SAPOLoss, (), {'tau_neg': 1.0, 'tau': 1.0}, 'tau is another name of tau_neg'),
    (SAPOLoss, (), {'clip_range': 0.1, 'epsilon': 0.2, 'tau': 1.0}, 'epsilon is another name of clip_range'),
]


@pytest.mark.parametrize(('cls', 'args', 'given', 'words'), CONFLICTS)
def test_both_names_at_once_are_refused(cls, args, given, words):
    with pytest.raises(ValueError, match=words):
        cls(*args, **given)


UNKNOWN = [
    (GRPOLoss, 'clip_rang', 'clip_range'),
    (GRPOLoss, 'eps', 'epsilon'),
    (GRPOLoss, 'Beta', 'beta'),
    (GRPOLoss, 'entropy_coeff', 'entropy_coef'),
    (GRPOLoss, 'temprature', 'temperature'),
    (SAPOLoss, 'tau_positive', 'tau_pos'),
    (DRGRPOLoss, 'max_length', 'max_completion_length'),
    (CISPOLoss, 'epsilon_hi', 'epsilon_high'),
    *((cls, 'epsilom', 'epsilon') for cls in POLICY_METRICS),
    (metrics.GRPOMetric, 'top_k', 'top_k_kl'),
]


@pytest.mark.parametrize(('cls', 'name', 'nearest'), UNKNOWN)
def test_an_unknown_keyword_is_refused_with_the_nearest_known_name(cls, name, nearest):
    with pytest.raises(ValueError, match=f"{cls.__name__} has no argument '{name}'; did you mean '{nearest}'"):
        cls(**{name: 1})


@pytest.mark.parametrize(
    ('cls', 'name'),
    [(GRPOLoss, 'tau'), (GRPOLoss, 'max_completion_length'), (SAPOLoss, 'max_completion_length'),
     (CISPOLoss, 'num_items_in_batch'), (CrossEntropyLoss, 'epsilon'), (CrossEntropyLoss, 'beta'),
     (GRPOLoss, 'unknown'), (metrics.GRPOMetric, 'unknown')],
)  # fmt: skip
def test_keywords_of_other_losses_are_unknown(cls, name):
    with pytest.raises(ValueError, match=f"{cls.__name__} has no argument '{name}'"):
        cls(**{name: 1})


NUMBERS = ('clip_range', 'clip_range_high', 'beta', 'entropy_coef')
BAD = [
    *((GRPOLoss, name, bad, f'{name} must be a finite number >= 0') for name in NUMBERS
      for bad in (-0.1, math.inf, math.nan, '0.1', [0.1])),
    *((GRPOLoss, 'temperature', bad, 'temperature must be a finite number > 0') for bad in (0, -1.0, math.inf, math.nan,
      None)),
    *((SAPOLoss, name, bad, 'must be a finite number > 0') for name in ('tau', 'tau_pos', 'tau_neg') for bad in (0, -1,
      math.inf, None)),
    *((DRGRPOLoss, 'max_completion_length', bad, 'must be an int >= 1') for bad in (0, -5, 10.0, None)),
    (GRPOLoss, 'clip_range', None, 'clip_range must be'),
    (GRPOLoss, 'epsilon', -1, 'clip_range must be a finite number >= 0, got -1'),
    (GRPOLoss, 'ignore_index', 'pad', 'ignore_index must be an int'),
    *((cls, 'epsilon', bad, 'epsilon must be a finite number >= 0') for cls in POLICY_METRICS for bad in (-1, math.nan,
      None)),
    (metrics.GRPOMetric, 'epsilon_high', math.inf, 'epsilon_high must be a finite number'),
    (metrics.GRPOMetric, 'temperature', 0, 'temperature must be a finite number > 0'),
    (metrics.GRPOMetric, 'top_k_kl', -1, 'top_k_kl must be an int >= 0'),
    (metrics.GRPOMetric, 'top_k_kl', 2.0, 'top_k_kl must be an int >= 0'),
]  # fmt: skip


@pytest.mark.parametrize(('cls', 'name', 'bad', 'words'), BAD)
def test_wrong_values_are_refused(cls, name, bad, words):
    with pytest.raises(ValueError, match=words):
        cls(**{name: bad})


class Steeper(GRPOLoss):
    """A loss of one's own, which adds an argument."""

    @checked_arguments
    def __init__(self, power: float = 2.0, clip_range: float = 0.2, **unknown):
        super().__init__(clip_range)
        self.power = power


class Same(SAPOLoss):
    """A loss of one's own without a constructor."""


def test_losses_of_one_s_own_share_the_aliases_and_checks():
    loss = Steeper(power=3.0, epsilon=0.1)
    assert (loss.power, loss.clip_range, loss.clip_range_high) == (3.0, 0.1, 0.1)
    with pytest.raises(ValueError, match="Steeper has no argument 'pover'; did you mean 'power'"):
        Steeper(pover=1)
    assert Same(tau=2.0).tau_neg == 2.0
    with pytest.raises(ValueError, match="Same has no argument 'tua'"):
        Same(tua=2.0)


@pytest.mark.parametrize('cls', [*FAMILY, *POLICY_METRICS])
def test_the_signature_shows_the_documented_names(cls):
    parameters = inspect.signature(cls).parameters
    known = {'clip_range', 'clip_range_high', 'beta'} if cls in FAMILY else {'epsilon', 'top_k_kl', 'process_group'}
    assert known <= set(parameters)
