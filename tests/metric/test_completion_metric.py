"""CompletionRewardMetric: its definitions on one process, what it takes and what it refuses."""

import math
from statistics import stdev
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from twinkle_megatron.metric import CompletionRewardMetric

GENERATE, MOVE = 'profiling/Time taken: generate', 'profiling/Time taken: move_model_to_sampler'


def result_of(*calls: dict[str, Any], **init: Any) -> dict[str, Any]:
    metric = CompletionRewardMetric(**init)
    for call in calls:
        metric.accumulate(None, None, **call)
    return metric.calculate()


def test_the_documented_call():
    metric = CompletionRewardMetric(device_mesh=None, process_group=None)
    metric.accumulate(
        {'labels': [1]}, {'logits': None}, generation_time=2.5, weight_sync_time=0.5, rewards=[1.0, 0.0, 0.5],
        completions=['ab', 'abcd', 'é'],
    )  # fmt: skip
    floats = metric.values()
    assert metric.calculate() == {
        'generation_time': '2.5000', 'weight_sync_time': '0.5000', 'mean_reward': '0.5000', 'reward_std': '0.5000',
        'mean_completion_length': '2.3333', 'completion_length_std': f'{stdev([2, 4, 1]):.4f}', MOVE: 0.5,
        GENERATE: 2.5, 'train/completion_length': pytest.approx(7 / 3, rel=1e-15),
    }  # fmt: skip
    assert floats['mean_completion_length'] == pytest.approx(7 / 3, rel=1e-15)
    assert metric.calculate() == metric.values() == {}


def test_the_numbers_that_twinkle_records():
    """Its recorded run, with its keywords; lists that differ in length come in calls of their own here."""
    calls = [
        {'rewards': {'a': [1.0, 0.0, 0.5]}, 'generate_time': 1.0, 'weight_sync_time': 0.5},
        {'rewards': {'b': [2.0]}},
        {'completion_lengths': [3, 5]},
        {'rewards': {'a': [0.0]}, 'completion_lengths': [8], 'generate_time': 3.0},
    ]
    result = result_of(*calls)
    assert {key: value for key, value in result.items() if '/' in key} == {
        MOVE: 0.5, GENERATE: 2.0, 'train/a_reward': 0.375,
        'train/a_reward_std': pytest.approx(0.47871355387816905, rel=1e-15), 'train/b_reward': 2.0,
        'train/b_reward_std': 0.0, 'train/completion_length': pytest.approx(5.333333333333333, rel=1e-15),
    }  # fmt: skip
    assert {key: value for key, value in result.items() if '/' not in key and 'std' not in key} == {
        'generation_time': '2.0000', 'weight_sync_time': '0.5000', 'mean_reward': '0.7000',
        'mean_completion_length': '5.3333',
    }  # fmt: skip


def test_several_rewards_are_summed_for_each_sample():
    result = result_of({'rewards': {'accuracy': [1.0, 0.0], 'format': [0.5, 0.5]}})
    assert (result['mean_reward'], result['reward_std']) == ('1.0000', f'{0.5**0.5:.4f}')
    assert result['train/accuracy_reward'] == result['train/format_reward'] == 0.5
    assert result['train/format_reward_std'] == 0.0
    assert result_of({'rewards': torch.tensor([[1.0, 0.5], [0.0, 0.5]])})['mean_reward'] == '1.0000'


def test_a_reward_named_total_is_the_sum_already():
    rewards = {'total': [1.5, 0.5], 'accuracy': [1.0, 0.0], 'format': [0.5, 0.5]}
    result = result_of({'rewards': rewards})
    assert (result['mean_reward'], result['train/total_reward']) == ('1.0000', 1.0)
    assert result_of({'rewards': rewards}, total=None)['mean_reward'] == '2.0000'
    assert result_of({'rewards': rewards}, total='accuracy')['mean_reward'] == '0.5000'


def test_what_was_not_given_is_absent():
    assert result_of() == result_of({}) == result_of({'rewards': {}}) == {}
    assert result_of({'rewards': [], 'completions': []}) == result_of({'rewards': {'a': []}}) == {}
    assert set(result_of({'generation_time': 0.0})) == {'generation_time', GENERATE}
    assert set(result_of({'completions': [0]})) == {
        'mean_completion_length', 'completion_length_std', 'train/completion_length',
    }  # fmt: skip
    assert set(result_of({'rewards': [0.0]})) == {'mean_reward', 'reward_std'}


def test_keywords_of_other_metrics_are_dropped_and_unknown_ones_refused():
    assert result_of({'lr': 1.0, 'grad_norm': 2.0}) == {}
    with pytest.raises(ValueError, match="no argument 'reward'; did you mean 'rewards'"):
        result_of({'reward': [1.0]})
    with pytest.raises(ValueError, match="no argument 'tokeniser'; did you mean 'tokenizer'"):
        CompletionRewardMetric(tokeniser=None)


@pytest.mark.parametrize('rewards', [
    [0.5, 1], (0.5, 1.0), np.array([0.5, 1.0], dtype=np.float16), torch.tensor([0.5, 1.0], dtype=torch.bfloat16),
    [torch.tensor(0.5), torch.tensor(1)], [np.float32(0.5), 1.0], torch.tensor([0.5, 1.0]).requires_grad_(),
])  # fmt: skip
def test_every_form_of_rewards(rewards):
    for given_ in (rewards, {'a': rewards}):
        assert result_of({'rewards': given_})['mean_reward'] == '0.7500'


@pytest.mark.parametrize('completions', [
    [2, 4, 0], (2, 4.0, np.int64(0)), ['ab', 'abcd', ''], [[7, 8], (1, 2, 3, 4), []], torch.tensor([2, 4, 0]),
    [torch.tensor([7, 8]), torch.arange(4), torch.tensor([])], [torch.tensor(2), np.arange(4), range(0)],
    np.array([2, 4, 0]), np.array(['ab', 'abcd', '']), ['ab', [1, np.int64(2), torch.tensor(3), 4], 0],
])  # fmt: skip
def test_every_form_of_completions(completions):
    result = result_of({'completions': completions})
    assert (result['mean_completion_length'], result['completion_length_std']) == ('2.0000', '2.0000')


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({'<s>': 0, 'a': 1, 'b': 2}, unk_token='<s>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single='<s> $0', special_tokens=[('<s>', 0)])
    return tokenizer


class Encodes:
    def encode(self, text: str) -> list[str]:
        return text.split()


@pytest.mark.parametrize('tokenizer', [
    words(), Encodes(), str.split, lambda text, add_special_tokens=True: {'input_ids': text.split()},
    lambda text, add_special_tokens=True: ['<s>'] * add_special_tokens + text.split(),
])  # fmt: skip
def test_a_tokenizer_counts_the_tokens_of_texts_only(tokenizer):
    result = result_of({'completions': ['a b a', 'b', [1, 2], 6]}, tokenizer=tokenizer)
    assert result['mean_completion_length'] == '3.0000'


def test_rewards_by_name_of_unequal_lengths_count_for_themselves_only():
    result = result_of({'rewards': {'a': [1.0, 2.0], 'b': [4.0]}, 'completions': [3]})
    assert (result['train/a_reward'], result['train/b_reward']) == (1.5, 4.0)
    assert 'mean_reward' not in result
    assert result['mean_completion_length'] == '3.0000'


@pytest.mark.parametrize(('call', 'message'), [
    ({'rewards': 1.0}, r'rewards must have shape \[n\]'),
    ({'rewards': {'a': None}}, r"rewards\['a'\] must be numbers"),
    ({'rewards': {1: [1.0]}}, 'rewards must have names that are strings, got 1'),
    ({'completions': 'abc'}, 'completions must be a list with one entry a sample, got a str'),
    ({'completions': 3}, 'completions must be a list with one entry a sample, got a int'),
    ({'completions': torch.zeros(2, 3).long()}, r'without padding, or lengths of shape \[n\], got a Tensor of shape'),
    ({'completions': ['a', None]}, r'completions\[1\] must be a text, token ids or a length in tokens, got None'),
    ({'completions': [1.5]}, r'completions\[0\] must be .* got 1.5'),
    ({'completions': [-1]}, r'completions\[0\] must be .* got -1'),
    ({'completions': [math.nan]}, r'completions\[0\] must be .* got nan'),
    ({'completions': [[{'role': 'assistant', 'content': 'a'}]]}, r'completions\[0\] must be'),
    ({'completions': [torch.zeros(1, 3)]}, r'completions\[0\] must be'),
    ({'completions': [1], 'completion_lengths': [1]}, 'completion_lengths is another name of completions'),
    ({'generation_time': 1.0, 'generate_time': 1.0}, 'generate_time is another name of generation_time'),
    ({'generation_time': [1.0, 2.0]}, 'generation_time must be one number'),
])  # fmt: skip
def test_a_wrong_call_says_what_is_wrong_and_takes_nothing_in(call, message):
    metric = CompletionRewardMetric()
    with pytest.raises(ValueError, match=message):
        metric.accumulate(None, None, **{'weight_sync_time': 1.0, **call})
    assert metric.values() == {}


def test_a_wrong_tokenizer():
    with pytest.raises(ValueError, match='tokenizer must have encode'):
        CompletionRewardMetric(tokenizer='gpt2')


def test_a_far_offset_costs_no_precision():
    calls = [{'rewards': [1e9 + k for k in part]} for part in ([0.0, 1.0], [0.0], [3.0])]
    metric = CompletionRewardMetric()
    for call in calls:
        metric.accumulate(None, None, **call)
    values = metric.values()
    assert values['reward_std'] == pytest.approx(math.sqrt(2), rel=1e-14)
    assert values['mean_reward'] == 1e9 + 1


def test_equal_rewards_deviate_by_exactly_0():
    metric = CompletionRewardMetric()
    for n in (3, 7, 1):
        metric.accumulate(None, None, rewards=[0.1] * n)
    assert metric.values() == {'mean_reward': 0.1, 'reward_std': 0.0}


@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_a_reward_that_is_not_finite_shows(bad):
    assert result_of({'rewards': [1.0, bad]}, {'rewards': [1.0]})['mean_reward'] == 'nan'
