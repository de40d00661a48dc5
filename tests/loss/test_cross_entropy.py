"""Cross entropy called by hand: recorded values of Twinkle, plain float64 formulas, and wrong calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks

from tests.recorded import assert_recorded, called, name_of, records_of, tolerance_of
from twinkle_megatron.loss import ChunkedCrossEntropyLoss, CrossEntropyLoss
from twinkle_megatron.vocab_parallel import VocabShard

CLASSES = ('CrossEntropyLoss', 'ChunkedCrossEntropyLoss')


@pytest.mark.parametrize('record', records_of(CLASSES, 'equal'), ids=name_of)
def test_recorded_values_and_gradients(record):
    assert_recorded(record)


@pytest.mark.parametrize('record', records_of(CLASSES, 'differs'), ids=name_of)
def test_where_the_record_contradicts_document_or_paper_ours_is_the_formula(record):
    """reduction 'none' is the per-token tensor; DFT is −sg(p)·log p, whose gradient is −p · d log p (arXiv
    2508.05629)."""
    result, outputs = called(record)
    labels, init = record['inputs']['labels'], record['init']
    leaf = {key: value.clone().requires_grad_() for key, value in record['outputs'].items()}
    logps = (
        leaf['logps']
        if 'logps' in leaf
        else leaf['logits'].log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    )
    trained = labels != -100
    nll = -logps * (logps.detach().exp() if init.get('dft') else 1)
    tokens = torch.where(trained, nll, 0)
    expected = {'none': tokens, 'sum': tokens.sum(), 'mean': tokens.sum() / trained.sum()}[
        init.get('reduction', 'mean')
    ]
    torch.testing.assert_close(result['loss'], expected, **tolerance_of(record))
    assert result['loss'].shape == (labels.shape if init.get('reduction') == 'none' else ())
    upstream = torch.rand_like(expected)
    result['loss'].backward(upstream)
    expected.backward(upstream)
    for key in leaf:
        torch.testing.assert_close(outputs[key].grad, leaf[key].grad, **tolerance_of(record))


def test_dft_by_hand():
    """p = 1/4 over four equal logits: value (1/4)·log 4; gradient p·(p − 1[j = label])."""
    logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    result = CrossEntropyLoss(dft=True)({'labels': torch.tensor([2])}, {'logits': logits})
    result['loss'].backward()
    assert result['loss'].item() == pytest.approx(0.25 * 1.3862943611198906)
    assert logits.grad[0].tolist() == pytest.approx([0.0625, 0.0625, -0.1875, 0.0625])


def test_dft_of_an_impossible_target_is_zero_without_nan():
    logits = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    result = CrossEntropyLoss(dft=True)({'labels': torch.tensor([1])}, {'logits': logits})
    result['loss'].backward()
    assert result['loss'].item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize('cls', [CrossEntropyLoss, ChunkedCrossEntropyLoss])
@pytest.mark.parametrize(
    'init', [{}, {'label_smoothing': 0.1}, {'label_smoothing': 0.3, 'ignore_index': 0}, {'reduction': 'sum'}], ids=str
)
def test_equals_torch(cls, init):
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (3, 5))
    labels[0, :3] = init.get('ignore_index', -100)
    found = cls(**init)({'labels': labels}, {'logits': logits})['loss']
    torch_init = {'ignore_index': -100, **init}
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **torch_init)
    torch.testing.assert_close(found, expected)
    one, two = torch.autograd.grad(found, logits)[0], torch.autograd.grad(expected, logits)[0]
    torch.testing.assert_close(one, two)


def test_chunk_size_changes_no_value():
    torch.manual_seed(0)
    logits = torch.randn(4, 6, 50, dtype=torch.float64)
    labels = torch.randint(0, 50, (4, 6))
    values = [
        float(ChunkedCrossEntropyLoss(chunk_size=c)({'labels': labels}, {'logits': logits})['loss'])
        for c in (1, 7, 50, 999)
    ]
    assert values == pytest.approx([values[0]] * 4, rel=1e-14)
    assert ChunkedCrossEntropyLoss().chunk_size == 1024


def test_case_7_ignored_tokens_are_not_in_the_denominator():
    rows = torch.tensor(
        [[0, 1, 2, 3], [5, 5, 5, 5], [9, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.float64, requires_grad=True
    )
    labels = torch.tensor([1, -100, -100, 3])
    loss = CrossEntropyLoss()({'labels': labels}, {'logits': rows})['loss']
    loss.backward()
    assert loss.item() == pytest.approx(1.913242, abs=1e-6)
    assert torch.equal(rows.grad[1:3], torch.zeros(2, 4, dtype=torch.float64))


def test_case_22_nan_at_a_masked_position_stays_out():
    logits = torch.tensor([[0.0, 0.0], [torch.nan, torch.inf]], requires_grad=True)
    for inputs in (
        {'labels': torch.tensor([1, -100])},
        {'labels': torch.tensor([1, 1]), 'completion_mask': torch.tensor([1, 0])},
    ):
        logits.grad = None
        loss = CrossEntropyLoss()(inputs, {'logits': logits})['loss']
        loss.backward()
        assert loss.item() == pytest.approx(0.6931472, abs=1e-6)
        assert logits.grad.isfinite().all()
        assert torch.equal(logits.grad[1], torch.zeros(2))


def test_case_35_no_trained_token_is_zero_with_a_gradient_path():
    logits = torch.randn(2, 3, requires_grad=True)
    loss = CrossEntropyLoss()({'labels': torch.full((2,), -100)}, {'logits': logits})['loss']
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_logits_are_the_shard_of_megatrons_tensor_parallel_group():
    """By hand inside Megatron, without `vocab_shard`: the group says that the logits are a shard. Case 1's value."""
    for loss, grad in run_ranks(_by_hand, 2):
        assert loss == pytest.approx(5.308340, abs=1e-6)
        assert grad == pytest.approx(0.0, abs=1e-12)


def _by_hand():
    from tiny_gpt import Layout, initialize

    initialize(Layout(tp=2))
    rank = torch.distributed.get_rank()
    logits = torch.arange(4.0, dtype=torch.float64)[None] + 4 * rank
    logits.requires_grad_()
    loss = CrossEntropyLoss(label_smoothing=0.1)({'labels': torch.tensor([2])}, {'logits': logits})['loss']
    loss.backward()
    total = logits.grad.sum()
    torch.distributed.all_reduce(total)
    return loss.item(), total.item()


WRONG = [
    (lambda: CrossEntropyLoss(redution='sum'), "did you mean 'reduction'"),
    (lambda: CrossEntropyLoss(reduction='batchmean'), "must be one of 'mean', 'sum', 'none'"),
    (lambda: CrossEntropyLoss(label_smoothing=1.5), 'label_smoothing must be'),
    (lambda: CrossEntropyLoss(z_loss=-1), 'z_loss must be'),
    (lambda: CrossEntropyLoss(ignore_index=1.5), 'ignore_index must be an int'),
    (lambda: ChunkedCrossEntropyLoss(chunk_size='big'), 'chunk_size must be an int'),
    (lambda: CrossEntropyLoss()({}, {'logits': torch.zeros(1, 4)}), "must hold 'labels'"),
    (lambda: CrossEntropyLoss()({'labels': torch.zeros(1).long()}, {}), "'logits' or 'logps'"),
    (
        lambda: CrossEntropyLoss()({'labels': torch.zeros(2).long()}, {'logits': torch.zeros(1, 4)}),
        'shape of the logits',
    ),
    (lambda: CrossEntropyLoss()({'labels': torch.zeros(2).long()}, {'logps': torch.zeros(1)}), 'shape of labels'),
    (lambda: CrossEntropyLoss()({'labels': torch.tensor([4])}, {'logits': torch.zeros(1, 4)}), r'ids in \[0, 4\)'),
    (lambda: CrossEntropyLoss()({'labels': torch.tensor([1.0])}, {'logits': torch.zeros(1, 4)}), 'integer ids'),
    (
        lambda: CrossEntropyLoss()({'labels': torch.tensor([1])}, {'logits': torch.zeros(1, 4).int()}),
        'float16, bfloat16',
    ),
    (lambda: CrossEntropyLoss(z_loss=0.1)({'labels': torch.tensor([1])}, {'logps': torch.zeros(1)}), 'log_normalizer'),
    (
        lambda: CrossEntropyLoss()({'labels': torch.tensor([1])}, {'logits': torch.zeros(1, 4)}, beta=1),
        "no argument 'beta'",
    ),
    (
        lambda: CrossEntropyLoss()(
            {'labels': torch.tensor([1])}, {'logits': torch.zeros(1, 4), 'vocab_shard': VocabShard(0, 8, 8)}
        ),
        r'8 ids \[0, 8\)',
    ),
]


@pytest.mark.parametrize(('call', 'words'), WRONG, ids=[w for _, w in WRONG])
def test_a_wrong_call_says_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call()
