"""TrainMetric: what the training loop tells, and time."""

import math

import pytest
import torch

from twinkle_megatron.metric import TrainMetric
from twinkle_megatron.metric import train as train_module


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(train_module.time, 'perf_counter', lambda: Clock.now)
    return Clock


def test_documented_call(clock):
    metric = TrainMetric()
    metric.accumulate(None, None, lr=0.0001, step=10, gradient_accumulation_steps=16)
    clock.now += 2
    assert metric.calculate() == {
        'learning rate': '1.000000e-04',
        'iters': 0,
        'total time elapse': '2 seconds',
        'speed': '0.31 iters/s',
    }


def test_speed_is_that_of_the_last_interval_and_the_time_is_total(clock):
    metric = TrainMetric()
    metric.accumulate(lr=1.0, step=32, gradient_accumulation_steps=4)
    clock.now += 4
    assert metric.values() == {'lr': 1.0, 'iters': 8.0, 'elapsed_seconds': 4.0, 'iters_per_second': 2.0}
    assert metric.calculate()['speed'] == '2.00 iters/s'
    metric.on_step(lr=[0.5], step=72, gradient_accumulation_steps=4, grad_norm=3.0)
    clock.now += 100
    assert metric.values() == {'lr': 0.5, 'iters': 18.0, 'elapsed_seconds': 104.0, 'iters_per_second': 0.1}
    assert metric.calculate() == {
        'learning rate': '5.000000e-01',
        'iters': 18,
        'total time elapse': '1.7 minutes',
        'speed': '0.10 iters/s',
    }


def test_several_parameter_groups_are_numbered_from_one():
    metric = TrainMetric()
    metric.accumulate(None, None, lr=[1e-3, torch.tensor(2e-3, dtype=torch.float64)], step=1)
    assert [key for key in metric.values() if key.startswith('lr')] == ['lr_1', 'lr_2']
    shown = metric.calculate()
    assert shown['learning rate(param group 1)'] == '1.000000e-03'
    assert shown['learning rate(param group 2)'] == '2.000000e-03'
    assert 'learning rate' not in shown


def test_a_learning_rate_tensor_is_read_when_it_is_given():
    lr = torch.tensor(1.0, dtype=torch.float64)
    metric = TrainMetric()
    metric.accumulate(None, None, lr=lr, step=1)
    lr.fill_(7.0)
    assert metric.values()['lr'] == 1.0


def test_no_division_by_zero_without_time_steps_or_data(clock):
    metric = TrainMetric()
    assert metric.calculate() == {'iters': 0, 'total time elapse': '0 seconds', 'speed': '0.00 iters/s'}
    metric.accumulate(None, None, step=5)
    assert metric.calculate()['speed'] == '0.00 iters/s'
    metric.accumulate(None, None, step=2)  # the counter was set back
    clock.now += 1
    assert metric.values()['iters_per_second'] == 0.0


def test_reset_keeps_step_and_learning_rate(clock):
    metric = TrainMetric()
    metric.accumulate(None, None, lr=1.0, step=8)
    metric.reset()
    clock.now += 1
    assert metric.calculate()['iters'] == 8
    assert metric.calculate()['learning rate'] == '1.000000e+00'


@pytest.mark.parametrize('steps', [0, -1])
def test_accumulation_steps_below_one_are_refused(steps):
    with pytest.raises(ValueError, match='gradient_accumulation_steps must be at least 1'):
        TrainMetric().accumulate(None, None, step=1, gradient_accumulation_steps=steps)


def test_values_are_finite_floats_with_the_real_clock():
    metric = TrainMetric()
    metric.accumulate(None, None, lr=1e-4, step=3)
    assert all(isinstance(x, float) and math.isfinite(x) for x in metric.values().values())
