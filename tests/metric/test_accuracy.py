"""Accuracy on one process: which tokens count, and every form in which micro-batches come."""

import inspect

import numpy as np
import pytest
import torch

from tests.metric.metric_data import VOCAB, counts, micro_batch, shown
from twinkle_megatron.metric import Accuracy
from twinkle_megatron.vocab_parallel import TokenStats, VocabShard

BATCHES = [micro_batch(1, 2, 7), micro_batch(2, 1, 3, masked=False), micro_batch(3, 3, 5, trained=0.0)]
EQUAL_LENGTHS = [micro_batch(4, 2, 6), micro_batch(5, 1, 6, trained=0.1), micro_batch(6, 3, 6)]
LABELS = torch.tensor([[1, -100, 2]])
LOGITS = torch.nn.functional.one_hot(torch.tensor([[1, 1, 1]]), 4).float()


def accuracy(*calls, **init):
    metric = Accuracy(**init)
    for inputs, outputs in calls:
        metric.accumulate(inputs, outputs)
    return metric.calculate()


def test_counts_are_those_of_a_plain_loop():
    assert accuracy(*BATCHES) == shown(*counts(BATCHES))


def test_a_list_of_micro_batches_equals_single_calls():
    inputs, outputs = map(list, zip(*BATCHES))
    assert accuracy((inputs, outputs)) == shown(*counts(BATCHES))


def test_micro_batches_with_concatenated_logits_equal_single_calls():
    inputs, outputs = map(list, zip(*EQUAL_LENGTHS))
    joined = {'logits': torch.cat([output['logits'] for output in outputs])}
    assert accuracy((inputs, joined)) == shown(*counts(EQUAL_LENGTHS))


def test_micro_batches_with_a_list_of_logits_equal_single_calls():
    inputs, outputs = map(list, zip(*BATCHES))
    assert accuracy((inputs, {'logits': [output['logits'] for output in outputs]})) == shown(*counts(BATCHES))


def test_samples_with_stacked_logits_equal_single_calls():
    (inputs, outputs), *_ = BATCHES
    samples = [{key: value[i] for key, value in inputs.items()} for i in range(2)]
    assert accuracy((samples, outputs)) == shown(*counts(BATCHES[:1]))
    assert accuracy(*[(s, {'logits': outputs['logits'][i]}) for i, s in enumerate(samples)]) == shown(
        *counts(BATCHES[:1])
    )


def test_argmax_of_the_losss_sweep_is_used_and_logits_are_then_not_read():
    calls = [
        (inputs, {'token_stats': TokenStats(argmax=outputs['logits'].argmax(-1)), 'logits': object()})
        for inputs, outputs in BATCHES
    ]
    assert accuracy(*calls) == shown(*counts(BATCHES))
    inputs, outputs = map(list, zip(*calls))
    assert accuracy((inputs, outputs)) == shown(*counts(BATCHES))


def test_token_stats_without_argmax_leave_the_logits():
    inputs, outputs = BATCHES[0]
    assert accuracy((inputs, {**outputs, 'token_stats': TokenStats()})) == shown(*counts(BATCHES[:1]))


def test_the_loss_is_asked_for_argmax():
    assert Accuracy.needs == {'argmax'}


@pytest.mark.parametrize('kind', [torch.bool, torch.uint8, torch.int32, torch.float32, list, np.array])
def test_mask_and_labels_of_any_kind(kind):
    inputs, outputs = BATCHES[0]
    labels, mask = inputs['labels'], inputs['completion_mask']
    if isinstance(kind, torch.dtype):
        given = {'labels': labels.to(torch.int32), 'completion_mask': mask.to(kind)}
    elif kind is list:
        given = {'labels': labels.tolist(), 'completion_mask': mask.bool().tolist()}
    else:
        given = {'labels': labels.numpy(), 'completion_mask': mask.bool().numpy()}
    assert accuracy((given, outputs)) == shown(*counts(BATCHES[:1]))


def test_lists_of_one_dimensional_labels():
    assert accuracy(({'labels': [torch.tensor([1, -100, 2])]}, {'logits': LOGITS})) == shown(1, 2)
    assert accuracy(({'labels': [1, -100, 2]}, {'logits': LOGITS[0]})) == shown(1, 2)


@pytest.mark.parametrize('garbage', [float('nan'), float('inf'), -float('inf')])
def test_garbage_on_ignored_tokens_changes_nothing(garbage):
    logits = LOGITS.clone()
    logits[:, 1] = garbage
    assert accuracy(({'labels': LABELS}, {'logits': logits})) == shown(1, 2)
    masked = {'labels': torch.tensor([[1, 1, 2]]), 'completion_mask': torch.tensor([[1, 0, 1]])}
    assert accuracy((masked, {'logits': logits})) == shown(1, 2)


def test_a_label_is_ignored_even_where_completion_mask_is_one():
    assert accuracy(({'labels': LABELS, 'completion_mask': torch.ones_like(LABELS)}, {'logits': LOGITS})) == shown(1, 2)


def test_the_lowest_id_wins_among_equal_logits():
    logits = torch.zeros(1, 4, 6)
    logits[0, 1, 2:] = 1.0
    labels = torch.tensor([[0, 2, 1, 5]])
    assert accuracy(({'labels': labels}, {'logits': logits})) == shown(2, 4)


def test_case_12_padded_vocabulary_never_predicts():
    logits = torch.tensor([[[1.0, 2, 0, 1, 3, 99]]])
    shard = VocabShard(0, 6, 5)
    assert accuracy(({'labels': [[4]]}, {'logits': logits, 'vocab_shard': shard})) == shown(1, 1)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_lower_precision(dtype):
    assert accuracy(({'labels': LABELS}, {'logits': LOGITS.to(dtype)})) == shown(1, 2)


@pytest.mark.parametrize('shape', [(0, 5), (2, 0), (0,)])
def test_no_tokens_give_no_keys(shape):
    call = ({'labels': torch.zeros(shape, dtype=torch.int64)}, {'logits': torch.zeros(*shape, VOCAB)})
    assert accuracy(call) == {}
    assert accuracy(*[BATCHES[0], call]) == shown(*counts(BATCHES[:1]))


@pytest.mark.parametrize('call', [(None, None), ([], []), ([], {}), (None, {}), ({}, {})])
def test_a_rank_without_data_adds_nothing(call):
    assert accuracy(call) == {}


def test_case_35_all_labels_ignored():
    assert accuracy(({'labels': torch.full((2, 3), -100)}, {'logits': torch.zeros(2, 3, 4)})) == {}


def test_values_are_floats_and_keep_the_state_that_calculate_resets():
    metric = Accuracy()
    metric.accumulate({'labels': LABELS}, {'logits': LOGITS})
    assert metric.values() == metric.values() == {'accuracy': 0.5, 'correct_tokens': 1.0, 'total_tokens': 2.0}
    assert metric.calculate() == shown(1, 2)
    assert metric.values() == {}


def test_inputs_are_not_written_to():
    inputs, outputs = BATCHES[0]
    before = [x.clone() for x in (*inputs.values(), *outputs.values())]
    accuracy((inputs, outputs))
    assert all(torch.equal(a, b) for a, b in zip(before, (*inputs.values(), *outputs.values())))


def test_no_graph_is_kept():
    logits = LOGITS.clone().requires_grad_()
    metric = Accuracy()
    metric.accumulate({'labels': LABELS}, {'logits': logits * 2})
    assert not metric.state.packed().requires_grad


def test_keywords_of_the_training_loop_are_taken_and_a_misspelt_one_is_not():
    metric = Accuracy()
    metric.accumulate({'labels': LABELS}, {'logits': LOGITS}, lr=1.0, step=1, grad_norm=1.0, loss_reduction='sum')
    with pytest.raises(ValueError, match=r"Accuracy\.accumulate has no argument 'grad_nrom'; did you mean 'grad_norm'"):
        metric.accumulate({'labels': LABELS}, {'logits': LOGITS}, grad_nrom=1.0)
    assert metric.calculate() == shown(1, 2)
    assert list(inspect.signature(metric.accumulate).parameters) == ['inputs', 'outputs']


@pytest.mark.parametrize(
    ('inputs', 'outputs', 'message'),
    [
        ({'labels': LABELS}, {'logits': torch.zeros(1, 2, 4)}, r"'labels'.*\(1, 2\), got \(1, 3\)"),
        ({'labels': LABELS[0]}, {'logits': LOGITS}, r'\(1, 3\), got \(3,\)'),
        ({'labels': LABELS}, {'token_stats': TokenStats(argmax=LABELS[0])}, r'argmax, \(3,\), got \(1, 3\)'),
        ({'labels': LABELS, 'completion_mask': [1, 1, 1]}, {'logits': LOGITS}, r'_mask.*\(1, 3\), got \(3,\)'),
        ({'labels': LABELS.float()}, {'logits': LOGITS}, r'labels must hold integer ids, got torch\.float32'),
        ({'labels': [[1, 2], [3]]}, {'logits': LOGITS}, 'labels must be .* equally long lists'),
        ({'input_ids': LABELS}, {'logits': LOGITS}, r"must hold labels.*got \['input_ids'\]"),
        ({'labels': LABELS}, {'logps': LABELS}, r"must hold logits.*got \['logps'\]"),
        ({'labels': LABELS}, {'logits': None}, 'must hold logits'),
        (None, {'logits': LOGITS}, 'must hold the labels'),
        ([{'labels': LABELS}] * 2, [{'logits': LOGITS}], 'each of the 2 micro-batches of inputs, got 1'),
        ([{'labels': LABELS}], [], 'each of the 1 micro-batches of inputs, got 0'),
        ([{'labels': LABELS}] * 2, {'logits': [LOGITS]}, 'must hold one entry a micro-batch, 2, got 1'),
        ([{'labels': LABELS}, {'labels': LABELS[:, :2]}], {'logits': LOGITS}, r'equally long.*\[\(1, 3\), \(1, 2\)\]'),
        (LABELS, {'logits': LOGITS}, 'inputs must be a dictionary or a list of dictionaries, got Tensor'),
        ([LABELS], {'logits': LOGITS}, 'got list of Tensor'),
        ({'labels': LABELS}, LOGITS, 'outputs must be a dictionary or a list of dictionaries, got Tensor'),
        ({'labels': LABELS}, {'logits': LOGITS.long()}, 'logits must be float'),
    ],
)  # fmt: skip
def test_a_wrong_call_is_one_error_that_names_the_argument(inputs, outputs, message):
    metric = Accuracy()
    with pytest.raises(ValueError, match=message):
        metric.accumulate(inputs, outputs)
    assert metric.calculate() == {}
