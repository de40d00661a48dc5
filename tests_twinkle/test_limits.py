"""What Twinkle's contract leaves open, and wrong calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradients import collect_grads
from ranks import run_ranks
from tiny_gpt import Layout

from tests_twinkle.formulas import KEPT, LENGTHS, SIZE, SPEC, extras, samples
from tests_twinkle.world import twinkle_model, zero
from twinkle_megatron import inside_twinkle, loss, metric


def grads(model: Any, inputs: list[dict[str, Any]], size: int = SIZE, **given: Any) -> tuple[float, dict[str, Any]]:
    zero(model)
    found = model.forward_backward(inputs=inputs, micro_batch_size=size, **given)
    return found['loss'], {key: part.tensor for key, part in collect_grads(model.model).items()}


def ignored(layout: Layout, packed: bool) -> None:
    model = twinkle_model(SPEC, layout, packed)
    nothing = [{**one, 'labels': torch.full_like(one['labels'], -100)} for one in samples()]
    for name in ('CrossEntropyLoss', 'GRPOLoss', 'GSPOLoss', 'DPOLoss', 'ORPOLoss'):
        model.set_loss(getattr(inside_twinkle, name))
        given = {'advantages': [1.0] * 8} if 'GRPO' in name or 'GSPO' in name else {}
        given |= {'ref_logps': [[]] * 8} if name == 'DPOLoss' else {}
        found, gradients = grads(model, nothing, **given)
        assert all(not g.any() for g in gradients.values()), name
        assert found == 0, name


@pytest.mark.parametrize('packed', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize('layout', [Layout(pp=2), Layout(cp=2)], ids=str)
def test_nothing_to_train_gives_zero_and_no_gradient(layout: Layout, packed: bool) -> None:
    run_ranks(ignored, layout.world, layout, packed, timeout=30)


def alone(layout: Layout, packed: bool) -> dict[str, torch.Tensor]:
    model = twinkle_model(SPEC, layout, packed)
    model.set_loss(inside_twinkle.GSPOLoss)
    given = {'advantages': [0.7], 'old_logps': extras()['old_logps'][3:4]}
    return grads(model, samples()[3:4], size=1, **given)[1]


def test_one_packed_sample_of_an_odd_length_is_the_padded_one_also_when_split() -> None:
    (one,) = run_ranks(alone, 1, Layout(), False, timeout=30)
    for layout, packed in ((Layout(), True), (Layout(cp=2), False), (Layout(cp=2), True)):
        for rank in run_ranks(alone, layout.world, layout, packed, timeout=30):
            for name, gradient in one.items():
                torch.testing.assert_close(rank[name], gradient, rtol=1e-9, atol=1e-12)


def empty_micro_batch() -> list[dict[str, torch.Tensor]]:
    model = twinkle_model(SPEC, Layout())
    model.set_loss(inside_twinkle.CrossEntropyLoss)
    return [grads(model, samples(), size)[1] for size in (4, 2)]


def test_a_micro_batch_without_a_trained_token_counts_as_one_token() -> None:
    ((without, beside),) = run_ranks(empty_micro_batch, 1, timeout=30)  # samples 4 and 5 have none
    for name, gradient in without.items():
        torch.testing.assert_close(beside[name], gradient * sum(KEPT) / (sum(KEPT) + 1), rtol=1e-9, atol=1e-12)


def undivided() -> list[dict[str, torch.Tensor]]:
    return [_of(twinkle_model(SPEC, Layout(), bare=bare)) for bare in (False, True)]


def _of(model: Any) -> dict[str, torch.Tensor]:
    model.set_loss(inside_twinkle.CrossEntropyLoss)
    return grads(model, samples())[1]


def test_in_one_process_twinkle_divides_no_gradient() -> None:
    ((divided, bare),) = run_ranks(undivided, 1, timeout=30)
    for name, gradient in bare.items():
        torch.testing.assert_close(gradient, divided[name] * sum(KEPT), rtol=1e-9, atol=1e-12)


def wrong_calls() -> None:
    model = twinkle_model(SPEC, Layout())
    model.set_loss(loss.GRPOLoss)
    with pytest.raises(ValueError, match=r'twinkle_megatron\.inside_twinkle'):
        model.forward_backward(inputs=samples(), micro_batch_size=SIZE)
    model.set_loss(inside_twinkle.GRPOLoss)
    with pytest.raises(ValueError, match="no argument 'advantage'; did you mean 'advantages'"):
        model.forward_backward(inputs=samples(), micro_batch_size=SIZE, advantage=[1.0] * 8)
    with pytest.raises(ValueError, match="no argument 'epsilonn'"):
        model.set_loss(inside_twinkle.GRPOLoss, epsilonn=0.1)
    rows = [torch.zeros(2, max(LENGTHS)) for _ in range(4)]
    with pytest.raises(ValueError, match='Twinkle cuts as if they were samples'):
        model.forward_backward(inputs=samples(), micro_batch_size=2, advantages=[1.0] * 8, old_logps=rows)
    model.set_loss(inside_twinkle.CrossEntropyLoss)
    model.add_metric(inside_twinkle.GRPOMetric, is_training=True)
    model.forward_backward(inputs=samples(), micro_batch_size=SIZE, advantages=[1.0] * 8)  # the metric's
    assert 'train/mean_new_logp' in model.calculate_metric(is_training=True)
    model.add_metric(metric.Accuracy, is_training=True)
    model.forward_backward(inputs=samples(), micro_batch_size=SIZE)
    with pytest.raises(ValueError, match=r'twinkle_megatron\.inside_twinkle'):
        model.calculate_metric(is_training=True)


def test_wrong_calls_say_what_is_wrong() -> None:
    run_ranks(wrong_calls, 1, timeout=30)


def split_embeddings() -> None:
    model = twinkle_model(SPEC, Layout(cp=2))
    model.set_loss(inside_twinkle.InfonceLoss)
    marked = [{**one, 'labels': torch.tensor([float(i % 2 == 0)])} for i, one in enumerate(samples())]
    with pytest.raises(ValueError, match='cp_size=1'):
        model.forward_backward(inputs=marked, micro_batch_size=SIZE, task='embedding')


def test_embeddings_under_context_parallelism_are_refused() -> None:
    run_ranks(split_embeddings, 2, timeout=30)
