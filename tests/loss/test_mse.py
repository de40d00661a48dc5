"""MSELoss called by hand: plain float64 formulas, what is ignored, shapes, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from twinkle_megatron.loss import MSELoss

F64 = torch.float64


def rand(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(loss, labels, values, key='values', **inputs):
    leaf = values.clone().requires_grad_()
    out = loss({'labels': labels, **inputs}, {key: leaf})
    upstream = rand(*out['loss'].shape, seed=9)
    (out['loss'] * upstream).sum().backward()
    return out, leaf.grad, upstream


def plain(values, labels, counted):
    """Squares one by one, and their derivatives."""
    squares, slopes = torch.zeros_like(values), torch.zeros_like(values)
    for i, (v, y, c) in enumerate(
        zip(values.flatten().tolist(), labels.flatten().tolist(), counted.flatten().tolist())
    ):
        if c:
            squares.view(-1)[i], slopes.view(-1)[i] = (v - y) ** 2, 2 * (v - y)
    return squares, slopes


@pytest.mark.parametrize('key', ['values', 'logits', 'embeddings'])
@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('shape', [(5,), (3, 4), (2, 3, 4)], ids=str)
def test_it_is_the_mean_of_squares_over_what_counts(shape, reduction, key):
    """A vector that embeddings are drawn to has no entries that do not count."""
    values, labels = rand(*shape), rand(*shape, seed=1)
    labels.view(-1)[::3] = -100
    counted = (labels != -100) | (key == 'embeddings')
    squares, slopes = plain(values, labels, counted)
    out, grad, upstream = run(MSELoss(reduction=reduction), labels, values, key)
    count = int(counted.sum())
    if reduction == 'none':
        torch.testing.assert_close(out['loss'], squares, rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, slopes * upstream, rtol=1e-12, atol=0)
        assert out['num_tokens'] == 0
        return
    scale = 1 if reduction == 'sum' else 1 / count
    torch.testing.assert_close(out['loss'], squares.sum() * scale, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, slopes * scale * upstream, rtol=1e-12, atol=0)
    assert out['num_tokens'] == (count if reduction == 'sum' else 0)


def test_without_anything_ignored_it_is_torchs():
    values, labels = rand(3, 4), rand(3, 4, seed=1)
    out, grad, upstream = run(MSELoss(), labels, values)
    leaf = values.clone().requires_grad_()
    expected = torch.nn.functional.mse_loss(leaf, labels)
    (expected * upstream).backward()
    torch.testing.assert_close(out['loss'], expected)
    torch.testing.assert_close(grad, leaf.grad)


def test_minus_a_hundred_is_a_value_where_nothing_is_ignored():
    labels = torch.tensor([-100.0, 1.0], dtype=F64)
    values = torch.tensor([0.0, 3.0], dtype=F64)
    assert run(MSELoss(ignore_index=None), labels, values)[0]['loss'].item() == (100**2 + 2**2) / 2
    assert run(MSELoss(), labels, values)[0]['loss'].item() == 4
    assert run(MSELoss(ignore_index=1), labels, values)[0]['loss'].item() == 100**2


@pytest.mark.parametrize('mask', ['completion_mask', 'attention_mask'])
def test_masked_tokens_are_never_read(mask):
    values, labels = rand(2, 3), rand(2, 3, seed=1)
    keep = torch.tensor([[1, 1, 0], [0, 1, 1]])
    squares, slopes = plain(values, labels, keep)
    values[keep == 0], labels[keep == 0] = math.nan, math.inf
    out, grad, upstream = run(MSELoss(), labels, values, **{mask: keep})
    torch.testing.assert_close(out['loss'], squares.sum() / 4, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, slopes * upstream / 4, rtol=1e-12, atol=0)


def test_nothing_that_counts_is_0_with_a_gradient_of_zeros():
    values = rand(2, 3)
    values[0] = math.nan
    out, grad, _ = run(MSELoss(), torch.full((2, 3), -100), values)
    assert out['loss'] == 0
    assert not grad.any()
    out, grad, _ = run(MSELoss(), torch.zeros(0), rand(0))
    assert out['loss'] == 0
    assert grad.shape == (0,)


@pytest.mark.parametrize(
    ('values', 'labels'), [((4, 1), (4,)), ((4,), (4, 1)), ((2, 3, 1), (2, 3)), ((2, 3), (2, 3, 1)), ((4, 1), (4, 1))]
)
def test_a_last_dim_of_1_may_be_missing(values, labels):
    v, y = rand(*values), rand(*labels, seed=1)
    out, grad, _ = run(MSELoss(), y, v)
    assert out['loss'].item() == pytest.approx(((v.flatten() - y.flatten()) ** 2).mean().item(), rel=1e-12)
    assert grad.shape == values


@pytest.mark.parametrize(
    ('values', 'labels'),
    [((4, 1), (1, 4)), ((4,), (1,)), ((4, 3), (3,)), ((4, 3), (4, 1)), ((4, 3), ()), ((2, 3), (3, 2))],
)
def test_shapes_that_torch_would_broadcast_are_refused(values, labels):
    with pytest.raises(ValueError, match=r"labels must have the shape of outputs\['values'\]"):
        run(MSELoss(), rand(*labels), rand(*values))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_squares_of_half_precision_are_float32(dtype):
    values, labels = torch.tensor([300.0, -200.0], dtype=dtype), torch.tensor([-20, 7])
    out, grad, _ = run(MSELoss(reduction='sum'), labels, values)
    assert out['loss'].dtype == torch.float32
    assert out['loss'].item() == 320**2 + 207**2
    assert grad.dtype == dtype


def test_plain_lists_and_integers_are_labels():
    out, _, _ = run(MSELoss(), [1, 2], torch.tensor([1.0, 4.0]))
    assert out['loss'] == 2


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: MSELoss(reduction='avg'), "one of 'mean', 'sum', 'none', got 'avg'"),
        (lambda: MSELoss(ignore_index=1.5), 'must be an int or None'),
        (lambda: MSELoss(redution='sum'), "did you mean 'reduction'"),
        (lambda: MSELoss()({'labels': torch.ones(2)}, {'logps': torch.ones(2)}), "outputs must hold 'values'"),
        (lambda: MSELoss()({'labels': torch.ones(2)}, {'values': torch.ones(2).long()}), 'a tensor of floats'),
        (lambda: MSELoss()({'input_ids': torch.ones(2)}, {'values': torch.ones(2)}), "inputs must hold 'labels'"),
        (lambda: MSELoss()({'labels': ['a']}, {'values': torch.ones(1)}), 'labels must be numbers'),
        (lambda: MSELoss()({'labels': torch.ones(1)}, {'values': torch.ones(1)}, weight=1), "no argument 'weight'"),
        (
            lambda: MSELoss()(
                {'labels': torch.ones(2, 3), 'completion_mask': torch.ones(2)}, {'values': torch.ones(2, 3)}
            ),
            'completion_mask must have the shape of labels',
        ),
    ],
)
def test_wrong_calls_are_told_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()
