"""What every metric shares: the state, keywords, hot path, subclasses of a person."""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.metric.metric_data import micro_batch
from twinkle_megatron.arguments import reject_unknown
from twinkle_megatron.metric import MAXIMUM, MINIMUM, SUM, Accuracy, LossMetric, Metric, TrainMetric, build_metric
from twinkle_megatron.metric.state import State


class Documented(Metric):
    """As the document shows: no super().__init__, nothing but the four methods and gather_results."""

    def __init__(self, device_mesh, process_group, **kwargs):
        self.process_group = process_group
        self.device_mesh = device_mesh
        self.scale = kwargs.get('scale', 1)
        self.reset()

    def accumulate(self, inputs, outputs):
        self.seen.append({'n': self.scale * len(inputs)})

    def calculate(self):
        results = self.gather_results(self.seen)
        self.reset()
        return {'n': sum(r['n'] for r in results)}

    def reset(self):
        self.seen = []


class Extremes(Metric):
    """Declares fields and says how they read."""

    fields = {'low': MINIMUM, 'high': MAXIMUM, 'sum': SUM}  # noqa: RUF012

    def accumulate(self, inputs, outputs):
        self.state.fold(low=outputs, high=outputs, sum=outputs)

    def figures(self, totals):
        return dict(totals)


def test_a_documented_subclass_works():
    metric = Documented(None, None, scale=2)
    metric.accumulate([1, 2, 3], None)
    metric.on_step(lr=1.0, step=1, gradient_accumulation_steps=1, grad_norm=1.0)
    assert metric.values() == {}
    assert metric.calculate() == {'n': 6}
    assert metric.calculate() == {'n': 0}
    assert metric.needs == frozenset()


def test_a_subclass_may_hand_its_own_keywords_to_the_base():
    class Own(Metric):
        def __init__(self, device_mesh, process_group, **kwargs):
            super().__init__(device_mesh, process_group, **kwargs)

    assert Own(None, None, bins=3).process_group is None


def test_a_subclass_with_fields_gets_the_reduction_and_4_decimals():
    metric = Extremes()
    for value in (2.0, torch.tensor(-1.0), 5):
        metric.accumulate(None, value)
    assert metric.values() == {'low': -1.0, 'high': 5.0, 'sum': 6.0}
    assert metric.calculate() == {'low': '-1.0000', 'high': '5.0000', 'sum': '6.0000'}
    assert metric.values() == {'low': math.inf, 'high': -math.inf, 'sum': 0.0}


@pytest.mark.parametrize('cls', [TrainMetric, LossMetric, Accuracy])
def test_an_unknown_keyword_of_the_constructor_names_the_nearest(cls):
    with pytest.raises(
        ValueError, match=f"{cls.__name__} has no argument 'proces_group'; did you mean 'process_group'"
    ):
        cls(None, None, proces_group=None)


def test_reject_unknown_lists_all_unknown_and_all_known_names():
    reject_unknown({'reduction': 1}, ['reduction'], 'X')
    reject_unknown({}, [], 'X')
    with pytest.raises(
        ValueError, match=r"^X has no argument 'redution'; did you mean 'reduction'\? Known: dft, reduction$"
    ):
        reject_unknown({'redution': 1, 'dft': 1}, ['reduction', 'dft'], 'X')
    with pytest.raises(ValueError, match=r"X has no argument 'zzz'\. Known: dft$"):
        reject_unknown({'zzz': 1}, iter(['dft']), 'X')
    with pytest.raises(ValueError, match=r"X has no argument 'zzz'\. Nor 'DFT'; did you mean 'dft'\? Known: dft$"):
        reject_unknown({'zzz': 1, 'DFT': 2}, ('dft',), 'X')
    with pytest.raises(ValueError, match='Known: none'):
        reject_unknown({'a': 1}, (), 'X')


def test_accumulate_reads_nothing_back_to_the_host():
    class NoSync(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            name = getattr(func, '__name__', '')
            assert name not in ('item', 'tolist', '__bool__', '__int__', '__float__', '__index__', 'nonzero', 'cpu'), (
                name
            )
            return func(*args, **(kwargs or {}))

    inputs, outputs = micro_batch(1, 2, 5)
    loss = {'loss': torch.tensor(2.0), 'num_tokens': torch.tensor(3)}
    metrics = LossMetric(), LossMetric(), Accuracy()
    stats = {'token_stats': type('Stats', (), {'argmax': outputs['logits'].argmax(-1)})}
    with NoSync():
        metrics[0].accumulate(inputs, loss, loss_reduction='sum', grad_norm=torch.tensor(1.0))
        metrics[1].accumulate([inputs, inputs], [loss, loss])
        metrics[2].accumulate(inputs, stats)


def test_state_made_in_inference_mode_is_usable_outside_and_the_other_way_round():
    metric = Extremes()
    with torch.inference_mode():
        metric.accumulate(None, torch.tensor(1.0))
        metric.reset()
        metric.accumulate(None, torch.tensor(1.0) + 1)
    metric.accumulate(None, torch.tensor(3.0))
    with torch.inference_mode():
        assert metric.values() == {'low': 2.0, 'high': 3.0, 'sum': 5.0}
        metric.accumulate(None, 1)
    assert metric.values()['sum'] == 6.0


def test_the_state_does_not_follow_the_default_device():
    metric = LossMetric()
    with torch.device('meta'):
        metric.accumulate(None, {'loss': 2.0}, grad_norm=1.0)
        metric.reset()
        metric.accumulate(None, {'loss': 3.0}, grad_norm=1.0)
        assert metric.values() == {'loss': 3.0, 'grad_norm': 1.0}


def test_nan_survives_every_merge():
    metric = Extremes()
    metric.accumulate(None, float('nan'))
    metric.accumulate(None, 1.0)
    assert all(math.isnan(x) for x in metric.values().values())
    state = State({'low': MINIMUM, 'high': MAXIMUM})
    rows = torch.tensor([[1.0, 1.0], [math.nan, math.nan], [2.0, 2.0]], dtype=torch.float64)
    assert state.merged(rows).isnan().all()


def test_gather_results_on_one_process_is_the_list_itself():
    metric = Metric()
    assert metric.gather_results([{'a': 1}]) == [{'a': 1}]
    with pytest.raises(ValueError, match='local_results must be a list, got dict'):
        metric.gather_results({'a': 1})  # type: ignore[arg-type]


@pytest.mark.parametrize('given', ['LossMetric', LossMetric, LossMetric()])
def test_a_metric_is_built_from_a_name_a_class_or_an_instance(given):
    metric = build_metric(given, 'mesh', None)
    assert isinstance(metric, LossMetric)
    assert metric.device_mesh == 'mesh'


def test_an_instance_keeps_its_own_mesh():
    assert build_metric(LossMetric('own'), 'mesh').device_mesh == 'own'


def test_a_metric_that_no_class_of_ours_is_will_do():
    class Foreign:
        def __init__(self, device_mesh, process_group, scale):
            self.scale = scale

        def accumulate(self, inputs, outputs): ...

        def calculate(self): ...

        def reset(self): ...

    assert build_metric(Foreign, scale=3).scale == 3


@pytest.mark.parametrize('given', [lambda inputs, outputs: {}, micro_batch, 3, dict])
def test_a_function_is_no_metric(given):
    with pytest.raises(ValueError, match='needs accumulate, calculate and reset'):
        build_metric(given)


def test_what_cannot_be_built_says_why():
    with pytest.raises(ValueError, match=r"^there is no metric 'Acuracy'; did you mean 'Accuracy'"):
        build_metric('Acuracy')
    with pytest.raises(ValueError, match=r"LossMetric is an instance already and takes no \['scale'\]"):
        build_metric(LossMetric(), scale=1)
    with pytest.raises(ValueError, match="LossMetric has no argument 'scale'"):
        build_metric(LossMetric, scale=1)
