"""LossMetric on one process: the mean over tokens, whatever the cut into micro-batches."""

import inspect
import math

import numpy as np
import pytest
import torch

from tests.metric.metric_data import losses, micro_batch
from twinkle_megatron.metric import LossMetric

BATCHES = [micro_batch(1, 2, 7), micro_batch(2, 1, 3, masked=False), micro_batch(3, 3, 9, trained=0.05)]
TOTAL, TOKENS = (sum(x) for x in zip(*losses(BATCHES)))
NAN, INF = float('nan'), float('inf')


def features(tokens: int, ignored: int = 2) -> dict:
    return {'labels': torch.tensor([1] * tokens + [-100] * ignored)}


def loss_of(*calls, **keywords):
    metric = LossMetric()
    for inputs, outputs in calls:
        metric.accumulate(inputs, outputs, **keywords)
    return metric.values()['loss']


def means():
    return [
        (inputs, {'loss': torch.tensor(s / n if n else NAN)}) for (inputs, _), (s, n) in zip(BATCHES, losses(BATCHES))
    ]


def sums(counted: bool):
    pairs = zip(BATCHES, losses(BATCHES))
    return [(i, {'loss': s, 'num_tokens': torch.tensor(n)} if counted else {'loss': s}) for (i, _), (s, n) in pairs]


@pytest.mark.parametrize('counted', [True, False])
def test_sums_give_the_token_mean(counted):
    assert loss_of(*sums(counted), loss_reduction='sum') == pytest.approx(TOTAL / TOKENS, rel=1e-15)


def test_means_of_unequal_micro_batches_give_the_token_mean():
    assert loss_of(*means()) == pytest.approx(TOTAL / TOKENS, rel=1e-6)  # the means are float32


@pytest.mark.parametrize('calls', [means(), sums(True), sums(False)], ids=['mean', 'sum', 'sum, tokens from labels'])
def test_a_list_of_micro_batches_equals_single_calls(calls):
    reduction = 'mean' if isinstance(calls[0][1]['loss'], torch.Tensor) else 'sum'
    inputs, outputs = map(list, zip(*calls))
    assert loss_of((inputs, outputs), loss_reduction=reduction) == loss_of(*calls, loss_reduction=reduction)


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_one_loss_over_a_list_of_micro_batches_weighs_all_their_tokens(reduction):
    inputs = [inputs for inputs, _ in BATCHES]
    loss = TOTAL if reduction == 'sum' else TOTAL / TOKENS
    other = (features(1000), {'loss': 5.0 * (1000 if reduction == 'sum' else 1)})
    expected = (TOTAL + 5000) / (TOKENS + 1000)
    assert loss_of((inputs, {'loss': loss}), other, loss_reduction=reduction) == pytest.approx(expected, rel=1e-15)


def test_case_27_mean_of_means():
    assert (
        loss_of((None, {'loss': 6.0, 'num_tokens': 2}), (None, {'loss': 3.0, 'num_tokens': 6}), loss_reduction='sum')
        == 1.125
    )
    assert loss_of((features(2), {'loss': 3.0}), (features(6), {'loss': 0.5})) == 1.125


def test_case_59_padding_repeats_do_not_count():
    full = [(features(1, ignored=0), {'loss': float(v)}) for v in range(1, 8)]
    repeat = ({'labels': torch.tensor([1]), 'completion_mask': torch.tensor([0])}, {'loss': 1.0})
    assert loss_of(*full, repeat) == 4.0


def test_without_labels_each_loss_weighs_one():
    assert (
        loss_of((None, {'loss': 2.0}), ({}, {'loss': torch.tensor([4.0])}), ({'input_ids': 0}, {'loss': np.float32(9)}))
        == 5.0
    )


def test_num_tokens_zero_says_that_a_loss_is_a_finished_mean():
    calls = [(features(2), {'loss': 3.0, 'num_tokens': 0}), (features(6), {'loss': 3.0, 'num_tokens': torch.tensor(6)})]
    assert loss_of(*calls, loss_reduction='sum') == 1.125
    assert loss_of((None, {'loss': 3.0, 'num_tokens': 0}), loss_reduction='sum') == 3.0


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
@pytest.mark.parametrize('bad', [NAN, INF, -INF])
def test_case_22_a_loss_over_no_tokens_does_not_poison(bad, reduction):
    empty = (features(0), {'loss': torch.tensor(bad), 'num_tokens': 0})
    good = (features(2), {'loss': 1.0, 'num_tokens': 1 if reduction == 'mean' else 2})
    assert loss_of(empty, good, loss_reduction=reduction) == (1.0 if reduction == 'mean' else 0.5)
    masked = ({'labels': [1, 2], 'completion_mask': [0, 0]}, {'loss': bad})
    assert loss_of(good, masked, loss_reduction=reduction) == (1.0 if reduction == 'mean' else 0.5)


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_a_nan_loss_over_tokens_shows(reduction):
    metric = LossMetric()
    metric.accumulate(features(2), {'loss': 1.0}, loss_reduction=reduction)
    metric.accumulate(features(1), {'loss': torch.tensor(NAN)}, loss_reduction=reduction)
    assert math.isnan(metric.values()['loss'])
    assert metric.calculate() == {'loss': 'nan'}
    assert metric.calculate() == {'loss': '0.0000'}


def test_case_35_all_labels_ignored():
    metric = LossMetric()
    metric.accumulate(features(0), {'loss': torch.tensor(NAN)})
    assert metric.values() == {'loss': 0.0}
    assert metric.calculate() == {'loss': '0.0000'}


def test_grad_norm_is_the_last_one_given_and_has_six_decimals():
    metric = LossMetric()
    metric.accumulate(None, {'loss': 1.0}, grad_norm=3.0)
    metric.accumulate(None, {'loss': 1.0}, grad_norm=torch.tensor([0.5]))
    metric.accumulate(None, {'loss': 1.0})
    assert metric.values() == {'loss': 1.0, 'grad_norm': 0.5}
    metric.on_step(lr=1.0, step=3, gradient_accumulation_steps=1, grad_norm=0.25)
    metric.on_step(lr=1.0, step=4)
    assert metric.calculate() == {'loss': '1.0000', 'grad_norm': '0.250000'}
    assert metric.calculate() == {'loss': '0.0000'}


def test_grad_norm_without_a_loss():
    metric = LossMetric()
    metric.accumulate(None, None, grad_norm=2.0)
    metric.accumulate(features(2), {'logits': None}, grad_norm=1.0)
    assert metric.calculate() == {'loss': '0.0000', 'grad_norm': '1.000000'}


@pytest.mark.parametrize(('norm', 'text'), [(NAN, 'nan'), (INF, 'inf'), (0.0, None)])
def test_a_bad_grad_norm_shows_and_zero_does_not(norm, text):
    metric = LossMetric()
    metric.on_step(grad_norm=norm)
    assert metric.calculate().get('grad_norm') == text


def test_many_small_micro_batches_do_not_drift():
    metric = LossMetric()
    large, tiny = 2**25, 1000
    metric.accumulate(None, {'loss': torch.tensor(float(large)), 'num_tokens': large}, loss_reduction='sum')
    for _ in range(tiny):
        metric.accumulate(None, {'loss': torch.tensor(0.5), 'num_tokens': torch.tensor(1)}, loss_reduction='sum')
    assert metric.state.packed().dtype == torch.float64
    assert metric.values()['loss'] == (large + 0.5 * tiny) / (large + tiny)
    assert torch.tensor(float(large)) + 0.5 == large  # float32 would have lost them all


@pytest.mark.long
def test_a_hundred_thousand_small_micro_batches_do_not_drift():
    metric = LossMetric()
    loss = torch.tensor(0.1)
    for _ in range(100_000):
        metric.accumulate(None, {'loss': loss, 'num_tokens': 1}, loss_reduction='sum')
    assert metric.values()['loss'] == pytest.approx(loss.item(), rel=1e-11)


def test_the_loss_is_not_kept_by_reference_and_no_graph_is_kept():
    loss = torch.tensor(3.0, requires_grad=True) * 1.0
    metric = LossMetric()
    metric.accumulate(features(2), {'loss': loss})
    loss.detach().fill_(99.0)
    assert metric.values()['loss'] == 3.0
    assert not metric.state.packed().requires_grad


def test_keywords_of_the_training_loop_are_taken_and_a_misspelt_one_is_not():
    metric = LossMetric()
    metric.accumulate(features(1), {'loss': 1.0}, lr=1.0, step=1, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="no argument 'loss_reducton'; did you mean 'loss_reduction'"):
        metric.accumulate(features(1), {'loss': 1.0}, loss_reducton='sum')
    assert list(inspect.signature(metric.accumulate).parameters)[2:] == ['loss_reduction', 'grad_norm']


@pytest.mark.parametrize(
    ('inputs', 'outputs', 'keywords', 'message'),
    [
        ({}, {'loss': torch.zeros(3)}, {}, r'loss must be one number, got a tensor of shape \(3,\)'),
        ({}, {'loss': [1.0]}, {}, 'loss must be one number or a one-element tensor, got list'),
        ({}, {'loss': 1.0}, {'loss_reduction': 'none'}, "loss_reduction must be 'mean' or 'sum', got 'none'"),
        ({}, {'loss': 1.0}, {'loss_reduction': 'sum'}, "'sum' needs num_tokens in outputs, or labels in inputs"),
        ({}, {'loss': 1.0, 'num_tokens': 'x'}, {'loss_reduction': 'sum'}, 'num_tokens must be one number'),
        ({}, {}, {'grad_norm': torch.zeros(2)}, r'grad_norm must be one number, got a tensor of shape \(2,\)'),
        ([features(1)] * 2, [{'loss': 1.0}], {}, 'each of the 2 micro-batches of inputs, got 1'),
        ({}, 3.0, {}, 'outputs must be a dictionary or a list of dictionaries, got float'),
    ],
)
def test_a_wrong_call_is_one_error_that_names_the_argument(inputs, outputs, keywords, message):
    metric = LossMetric()
    with pytest.raises(ValueError, match=message):
        metric.accumulate(inputs, outputs, **keywords)
    assert metric.calculate() == {'loss': '0.0000'}
