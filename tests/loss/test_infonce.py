"""InfonceLoss in one process: recorded values of Twinkle, the formula with loops in float64, numbers at the edges,
memory, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from tests.recorded import assert_recorded, name_of, records_of, replay
from tests.vocab_parallel.probes import NewTensors
from twinkle_megatron.batch import Counts, TokenBatch
from twinkle_megatron.loss import InfonceLoss, contrast
from twinkle_megatron.loss.contrast import check_starts, negative_weights
from twinkle_megatron.seen import Pooled

F64 = torch.float64
PRECISE = {'rtol': 1e-11, 'atol': 1e-13}
RAGGED, EQUAL = (2, 1, 3, 5, 3), (2, 2, 2, 2)  # negatives of each group
OPTIONS = [
    {},
    {'temperature': 0.7},
    {'use_batch': False},
    {'use_batch': False, 'mask_fake_negative': True, 'fake_neg_margin': 0.5},
    {'use_batch': False, 'hard_negatives': 2},
    {'hard_negatives': 1},
    {'hard_negatives': 4},
    {'hard_negatives': 5, 'seed': 3, 'include_dd': True},
    {'mask_fake_negative': True},
    {'mask_fake_negative': True, 'fake_neg_margin': 2.0, 'include_qq': True},
    {'include_qq': True},
    {'include_dd': True},
    {'include_qq': True, 'include_dd': True, 'mask_fake_negative': True, 'hard_negatives': 4},
]


def labels_of(negatives):
    return torch.tensor([x for m in negatives for x in [1] + [0] * (m + 1)])


def reference(
    rows, negatives, temperature=0.1, use_batch=True, hard_negatives=None, mask_fake_negative=False,
    fake_neg_margin=0.1, include_qq=False, include_dd=False, seed=0,
):  # fmt: skip
    """The mean over the anchors, one similarity after the other. Each document carries how often it counts."""
    groups, at = [], 0
    for m in negatives:
        weights = [1.0] * m if hard_negatives is None else negative_weights(m, hard_negatives, seed).tolist()
        documents = [(at + 1, 1.0)] + [(at + 2 + i, w) for i, w in enumerate(weights) if w > 0]
        groups.append((at, documents))
        at += m + 2
    everything = [document for _, documents in groups for document in documents]
    losses = []
    for anchor, documents in groups:
        positive = rows[anchor] @ rows[anchor + 1]
        highest = positive.item() + fake_neg_margin if mask_fake_negative else math.inf
        terms = []
        for j, w in everything if use_batch else documents:
            s = rows[anchor] @ rows[j]
            if s.item() <= highest:
                terms.append(s / temperature + math.log(w))
        for other, _ in groups if include_qq else []:
            s = rows[anchor] @ rows[other]
            if other != anchor and s.item() <= highest:
                terms.append(s / temperature)
        for j, w in everything if include_dd else []:
            if j != anchor + 1:
                terms.append(rows[anchor + 1] @ rows[j] / temperature + math.log(w))
        losses.append(torch.stack(terms).logsumexp(0) - positive / temperature)
    return torch.stack(losses).mean()


def rows_of(negatives, width=6, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return 0.6 * torch.randn(len(labels_of(negatives)), width, generator=generator, dtype=dtype)


def value_and_grad(function, rows, upstream=1.0):
    leaf = rows.clone().requires_grad_()
    value = function(leaf)
    (value * upstream).backward()
    return value.detach(), leaf.grad


def ours(negatives, **init):
    return lambda rows: InfonceLoss(**init)({'labels': labels_of(negatives)}, {'embeddings': rows})['loss']


@pytest.mark.parametrize('record', records_of(('InfonceLoss',), 'equal'), ids=name_of)
def test_recorded_values_and_gradients(record):
    assert_recorded(record)


@pytest.mark.parametrize('record', records_of(('InfonceLoss',), 'differs'), ids=name_of)
def test_where_twinkle_is_wrong(record):
    """It takes the positive for one of the negatives, and draws from the process's own generator."""
    result, grads = replay(record)
    negatives = torch.diff(record['inputs']['labels'].nonzero()[:, 0], append=torch.tensor([12])) - 2
    rows = record['outputs']['embeddings'].double()
    value, grad = value_and_grad(lambda x: reference(x, negatives.tolist(), **record['init']), rows)
    close = PRECISE if record['name'].endswith('f64') else {'rtol': 1e-4, 'atol': 1e-6}
    torch.testing.assert_close(result['loss'].double(), value, **close)
    torch.testing.assert_close(grads['embeddings'].double(), grad, **close)


@pytest.mark.parametrize('block', [1, 40, None], ids=['one anchor at once', 'a few', 'all'])
@pytest.mark.parametrize('negatives', [RAGGED, EQUAL], ids=['ragged', 'equal'])
@pytest.mark.parametrize('init', OPTIONS, ids=str)
def test_values_and_gradients_are_those_of_the_formula(init, negatives, block, monkeypatch):
    if block is not None:
        monkeypatch.setattr(contrast, 'BLOCK', block)
    rows = rows_of(negatives)
    want = value_and_grad(lambda x: reference(x, negatives, **init), rows, upstream=-1.7)
    found = value_and_grad(ours(negatives, **init), rows, upstream=-1.7)
    for x, y in zip(found, want):
        torch.testing.assert_close(x, y, **PRECISE)


@pytest.mark.parametrize('init', [{}, {'use_batch': False}, {'include_qq': True, 'include_dd': True}], ids=str)
def test_groups_may_have_no_negatives_or_stand_alone(init):
    for negatives in ((0, 0, 0), (0, 3, 0), (0,), (2,)):
        want = value_and_grad(lambda x, n=negatives: reference(x, n, **init), rows_of(negatives))
        found = value_and_grad(ours(negatives, **init), rows_of(negatives))
        for x, y in zip(found, want):
            torch.testing.assert_close(x, y, **PRECISE)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_summed_in_float32(dtype):
    """The only error is the rounding of the gradient to the type of its input; under autocast, too."""
    init = {'include_qq': True, 'include_dd': True, 'temperature': 0.5}
    rows = rows_of(RAGGED).to(dtype)
    want, slope = value_and_grad(lambda x: reference(x, RAGGED, **init), rows.double())
    with torch.autocast('cpu', dtype=torch.bfloat16):
        value, grad = value_and_grad(ours(RAGGED, **init), rows)
    assert value.dtype == torch.float32
    assert grad.dtype == dtype
    assert value.item() == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(grad.double(), slope, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize('init', OPTIONS, ids=str)
@pytest.mark.parametrize('temperature', [1e-3, 1e-2])
def test_similarities_of_ten_thousand_do_not_overflow(init, temperature):
    init = {**init, 'temperature': temperature}
    rows = rows_of(RAGGED) * 130
    assert (rows @ rows.T).abs().max() > 1e4
    value, grad = value_and_grad(ours(RAGGED, **init), rows)
    want, slope = value_and_grad(lambda x: reference(x, RAGGED, **init), rows)
    torch.testing.assert_close(value, want, rtol=1e-11, atol=1e-8)
    torch.testing.assert_close(grad, slope, rtol=1e-9, atol=1e-6)
    single, half = value_and_grad(ours(RAGGED, **init), rows.float())
    assert single.isfinite()
    assert half.isfinite().all()


def test_equal_similarities_give_the_logarithm_of_their_number():
    rows = torch.ones(len(labels_of(RAGGED)), 3, dtype=F64)
    documents, anchors = sum(RAGGED) + len(RAGGED), len(RAGGED)
    for init, n in (
        ({}, documents),
        ({'mask_fake_negative': True}, documents),
        ({'include_qq': True, 'include_dd': True}, 2 * documents - 1 + anchors - 1),
        ({'hard_negatives': 4}, 5 * anchors),
        ({'hard_negatives': 4, 'use_batch': False}, 5),
    ):
        value, grad = value_and_grad(ours(RAGGED, **init), rows)
        assert value.item() == pytest.approx(math.log(n), rel=1e-12)
        assert grad.isfinite().all()


@pytest.mark.parametrize('use_batch', [True, False])
def test_nothing_is_left_but_the_positive_when_all_else_is_masked(use_batch):
    """Each positive is the farthest of all rows from its anchor."""
    negatives = (2, 3, 1)
    rows = torch.ones(len(labels_of(negatives)), 3, dtype=F64)
    for group, anchor in enumerate(labels_of(negatives).nonzero()[:, 0]):
        rows[anchor, group] = 9.0
        rows[anchor + 1] = -5.0
        rows[anchor + 1, group] = -5.5
    value, grad = value_and_grad(ours(negatives, mask_fake_negative=True, use_batch=use_batch), rows)
    assert value == 0
    assert (grad == 0).all()


def test_the_threshold_of_false_negatives_has_no_gradient():
    """One negative above the threshold, one below: the loss is that of two documents."""
    rows = torch.tensor([[1.0, 0.0], [0.5, 0.1], [0.9, 0.0], [0.4, 0.3]], dtype=F64)
    init = {'mask_fake_negative': True, 'temperature': 1.0}
    value, grad = value_and_grad(ours((2,), **init), rows)
    assert value.item() == pytest.approx(math.log(1 + math.exp(0.4 - 0.5)), rel=1e-12)
    assert (grad[2] == 0).all()
    p = 1 / (1 + math.exp(0.1))
    torch.testing.assert_close(grad[1], torch.tensor([-p, 0.0], dtype=F64), **PRECISE)
    torch.testing.assert_close(grad[3], torch.tensor([p, 0.0], dtype=F64), **PRECISE)


@pytest.mark.parametrize('rows', [0, 3])
def test_without_any_anchor_the_loss_is_zero_and_so_is_the_gradient(rows):
    leaf = torch.randn(rows, 4, requires_grad=True)
    loss = InfonceLoss()({'labels': torch.zeros(rows)}, {'embeddings': leaf})['loss']
    loss.backward()
    assert loss == 0
    assert leaf.grad.shape == leaf.shape
    assert (leaf.grad == 0).all()


def test_labels_may_be_a_list_or_a_column_of_any_numbers():
    rows = rows_of(EQUAL)
    want = ours(EQUAL)(rows)
    labels = labels_of(EQUAL)
    for given in (labels.tolist(), labels[:, None], labels.bool(), labels.float() * 0.5, -7 * labels):
        assert InfonceLoss()({'labels': given}, {'embeddings': rows})['loss'] == want


def test_the_first_position_of_logits_stands_for_missing_embeddings():
    rows = rows_of(EQUAL)
    want = ours(EQUAL)(rows)
    padded = torch.stack([rows, torch.full_like(rows, torch.nan)], 1).requires_grad_()
    for logits in (rows, padded):
        assert InfonceLoss()({'labels': labels_of(EQUAL)}, {'logits': logits})['loss'] == want
    InfonceLoss()({'labels': labels_of(EQUAL)}, {'logits': padded})['loss'].backward()
    torch.testing.assert_close(padded.grad[:, 0], value_and_grad(ours(EQUAL), rows)[1])
    assert (padded.grad[:, 1] == 0).all()


def test_backward_runs_twice_and_inputs_stay_as_they_are():
    rows = rows_of(EQUAL, width=12)[:, ::2].requires_grad_()  # not contiguous
    before, labels = rows.detach().clone(), labels_of(EQUAL)
    loss = InfonceLoss()({'labels': labels}, {'embeddings': rows})['loss']
    first, second = (torch.autograd.grad(loss, rows, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(rows, before)
    assert torch.equal(labels, labels_of(EQUAL))


def test_a_second_derivative_is_refused():
    rows = rows_of(EQUAL).requires_grad_()
    (grad,) = torch.autograd.grad(ours(EQUAL)(rows), rows, create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivative'):
        (grad.square().sum() + rows.sum()).backward()


def test_without_a_wish_for_it_there_is_no_gradient(monkeypatch):
    wishes, real = [], contrast.contrast
    monkeypatch.setattr('twinkle_megatron.loss.infonce.contrast', lambda *args: wishes.append(args[-1]) or real(*args))
    rows = rows_of(EQUAL)
    assert not ours(EQUAL)(rows).requires_grad
    with torch.no_grad():
        assert not ours(EQUAL)(rows.requires_grad_()).requires_grad
    assert wishes == [None, None]


def test_memory_does_not_grow_with_anchors_times_documents():
    """2,048 anchors × 4,096 documents would be 32 MiB a matrix."""
    negatives = (1,) * 2048
    rows = rows_of(negatives, width=8, dtype=torch.float32).requires_grad_()
    with NewTensors() as new, pytest.MonkeyPatch.context() as patch:
        patch.setattr(contrast, 'BLOCK', 1 << 18)
        ours(negatives, include_qq=True, include_dd=True)(rows).backward()
    assert new.sizes[0] <= 4 << 18
    with NewTensors() as new:
        ours(negatives)(rows).backward()
    assert new.sizes[0] <= 4 * contrast.BLOCK


def test_only_the_gradient_of_the_rows_is_kept():
    kept = []
    rows = rows_of(EQUAL).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        ours(EQUAL)(rows)
    assert sum(n for n in kept if n > 1) == rows.numel()


@pytest.mark.parametrize(('count', 'wanted'), [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5), (7, 5), (5, 1), (3, 9)])
def test_negatives_are_taken_as_evenly_as_can_be(count, wanted):
    weights = negative_weights(count, wanted, 0)
    assert weights.sum() == wanted
    if count >= wanted:
        assert weights.tolist() == [1.0] * wanted + [0.0] * (count - wanted)
    else:
        assert set(weights.tolist()) <= {wanted // count, wanted // count + 1}


def test_the_draw_of_negatives_depends_on_the_seed_alone():
    state = torch.get_rng_state()
    drawn = [negative_weights(40, 60, seed).tolist() for seed in (0, 0, 1, -1)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2] != drawn[3]
    assert torch.equal(torch.get_rng_state(), state)


def test_without_use_batch_micro_batches_add_up_to_the_whole():
    """Each is a summand of the mean over the groups of the global batch."""
    init = {'use_batch': False, 'hard_negatives': 2}
    want = value_and_grad(lambda x: reference(x, RAGGED, **init), rows_of(RAGGED), upstream=-1.7)
    counts = Counts(0, 0, groups=len(RAGGED))
    batch, cut = TokenBatch({}, torch.zeros(1, 1), -100, counts), len(labels_of(RAGGED[:2]))

    def summed(rows):
        loss, labels = InfonceLoss(**init), torch.cat([labels_of(RAGGED), torch.zeros(2)])
        padded = torch.cat([rows, torch.ones(2, 6, dtype=F64)])  # a last micro-batch holds nothing
        sizes = [cut, len(rows) - cut, 2]
        parts = zip(padded.split(sizes), labels.split(sizes))
        return sum(loss.contribution(batch, Pooled('embeddings', x, False), marks) for x, marks in parts)

    for x, y in zip(value_and_grad(summed, rows_of(RAGGED), upstream=-1.7), want):
        torch.testing.assert_close(x, y, **PRECISE)


def test_the_temperature_may_change_while_training():
    loss = InfonceLoss(temperature=1.0)
    loss.temperature = 0.3
    given = {'labels': labels_of(EQUAL)}, {'embeddings': rows_of(EQUAL)}
    assert loss(*given)['loss'] == InfonceLoss(temperature=0.3)(*given)['loss']


def test_the_order_of_groups_does_not_matter():
    order = [3, 0, 4, 2, 1]
    pieces = rows_of(RAGGED).split([m + 2 for m in RAGGED])
    for init in OPTIONS:
        moved = torch.cat([pieces[i] for i in order])
        value = ours([RAGGED[i] for i in order], **init)(moved)
        torch.testing.assert_close(value, ours(RAGGED, **init)(rows_of(RAGGED)), **PRECISE)


@pytest.mark.parametrize(
    ('init', 'message'),
    [
        ({'temperature': 0}, 'temperature must be a finite number > 0, got 0'),
        ({'temperature': math.nan}, 'temperature must be'),
        ({'hard_negatives': 0}, 'hard_negatives must be an int >= 1'),
        ({'hard_negatives': True}, 'hard_negatives must be an int >= 1'),
        ({'hard_negatives': 2.0}, 'hard_negatives must be an int >= 1'),
        ({'mask_fake_negative': True, 'fake_neg_margin': 0.0}, 'fake_neg_margin must be a finite number > 0'),
        ({'mask_fake_negative': 1}, 'mask_fake_negative must be True or False'),
        ({'use_batch': 'no'}, 'use_batch must be True or False'),
        ({'use_batch': False, 'include_qq': True}, 'include_qq=True needs use_batch=True'),
        ({'use_batch': False, 'include_dd': True}, 'include_dd=True needs use_batch=True'),
        ({'process_group': 'dp'}, 'process_group must be the data parallel ProcessGroup'),
        ({'seed': 0.5}, 'seed must be an int'),
        ({'temprature': 0.1}, "no argument 'temprature'; did you mean 'temperature'"),
    ],
)
def test_wrong_arguments_are_named(init, message):
    with pytest.raises(ValueError, match=message):
        InfonceLoss(**init)


@pytest.mark.parametrize(
    ('labels', 'hard_negatives', 'message'),
    [
        ([0, 1, 0], None, 'must mark the first row as an anchor'),
        ([0, 0], None, 'must mark the first row as an anchor'),
        ([1, 0, 1, 1, 0], None, 'the one at row 2 has no positive'),
        ([1, 0, 1], None, 'the one at row 2 has no positive'),
        ([1, 0, 0, 1, 0], 2, 'hard_negatives=2 must find negatives in each group; the one at row 3 has none'),
    ],
)
def test_labels_that_are_no_whole_groups_are_refused(labels, hard_negatives, message):
    with pytest.raises(ValueError, match=message):
        check_starts(torch.tensor(labels), hard_negatives)
    if any(labels):
        with pytest.raises(ValueError, match=message):
            InfonceLoss(hard_negatives=hard_negatives)({'labels': labels}, {'embeddings': torch.randn(len(labels), 2)})


def test_labels_of_several_numbers_a_row_are_refused():
    with pytest.raises(ValueError, match=r'labels must be \[n\]'):
        InfonceLoss().check_targets(torch.ones(4, 2))


def test_sound_labels_pass():
    for negatives in (RAGGED, (0, 0), ()):
        check_starts(torch.tensor(labels_of(negatives).tolist()), None)
    check_starts(labels_of(RAGGED), 7)


X = torch.randn(4, 3)


@pytest.mark.parametrize(
    ('inputs', 'outputs', 'extra', 'message'),
    [
        ({}, {'embeddings': X}, {}, "inputs must hold 'labels'"),
        ({'labels': [1, 0, 1, 0]}, {'logps': X}, {}, "outputs must hold 'embeddings'"),
        ({'labels': [1, 0, 1]}, {'embeddings': X}, {}, 'labels must be one number for each of the 4 embeddings, got 3'),
        ({'labels': [0, 0, 0]}, {'embeddings': X}, {}, 'labels must be one number for each of the 4 embeddings, got 3'),
        ({'labels': torch.ones(2, 2)}, {'embeddings': X}, {}, r'labels must be \[n\].* got the shape \(2, 2\)'),
        ({'labels': 'abc'}, {'embeddings': X}, {}, "labels must be one number for each embedding, got 'abc'"),
        ({'labels': [1, 0, 1, 0]}, {'embeddings': X.long()}, {}, 'embeddings must be a tensor of floating-point'),
        ({'labels': [1, 0, 1, 0]}, {'embeddings': X.tolist()}, {}, 'embeddings must be a tensor .* got list'),
        ({'labels': [1, 0, 1, 0]}, {'embeddings': X[None]}, {}, r'embeddings must be \[n, D\], got the shape \(1, 4'),
        ({'labels': [1, 0, 1, 0]}, {'embeddings': X[:, :0]}, {}, r'embeddings must be \[n, D\], got the shape \(4, 0'),
        ({'labels': [1, 0, 1, 0]}, {'logits': X[0]}, {}, r'logits must be \[n, D\], or \[n, s, D\]'),
        ({'labels': [1, 0, 1, 0]}, {'embeddings': X}, {'advantages': 1}, "no argument 'advantages'"),
    ],
)
def test_wrong_calls_are_named(inputs, outputs, extra, message):
    with pytest.raises(ValueError, match=message):
        InfonceLoss()(inputs, outputs, **extra)
