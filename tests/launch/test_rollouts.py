"""What a file of rollouts may be, and what is said where it is wrong."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from launch.datasets import rollouts
from launch.datasets.about import About
from launch.datasets.documents import Turn
from launch.datasets.lines import DataError
from launch.datasets.tokens import SPECIAL_IDS, train_tokenizer
from twinkle_megatron.advantage import group_advantages

TOKENIZER: Tokenizer = train_tokenizer([(Turn('1 + 1 = 2 3 ' * 5),)], vocab_size=300)
ABOUT = About(1, 8, 1, TOKENIZER.get_vocab_size(), TOKENIZER.to_str())
LAST = ABOUT.vocab_size - 1
START, END = SPECIAL_IDS['<|start|>'], SPECIAL_IDS['<|end|>']
GOOD = {'prompt': [0, 5], 'completion': [6, 7], 'old_logps': [-1, -0.5], 'reward': 1, 'group': 'a'}
HEADER = {'temperature': 1.5}


def prepared(tmp_path, *lines, **more):
    path = tmp_path / 'r.jsonl'
    path.write_text('\n'.join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    settings = {'seq_length': 8, 'least': 1, 'cache': tmp_path / 'cache'} | more
    return rollouts.load(rollouts.prepare(path, ABOUT, **settings))


def test_ids_and_texts_are_read_alike(tmp_path):
    ids = TOKENIZER.encode('1 +').ids, TOKENIZER.encode(' 2').ids
    text = {**GOOD, 'prompt': '1 +', 'completion': ' 2', 'old_logps': [-1] * len(ids[1])}
    data = prepared(tmp_path, HEADER, text, {**text, 'prompt': [START, *ids[0]], 'completion': ids[1]})
    assert data.ids[0].tolist() == data.ids[1].tolist() == [START, *ids[0], *ids[1]]
    assert data.prompt_lengths.tolist() == [len(ids[0]) + 1] * 2
    assert data.temperature == 1.5


def test_a_text_ends_with_the_end_token_where_there_is_one_number_more(tmp_path):
    n = len(TOKENIZER.encode(' 2').ids)
    text = {**GOOD, 'completion': ' 2', 'old_logps': [-1] * (n + 1)}
    assert prepared(tmp_path, HEADER, text).ids[0].tolist() == [0, 5, *TOKENIZER.encode(' 2').ids, END]


def test_everything_stays_in_the_order_of_the_file(tmp_path):
    lines = [
        {**GOOD, 'prompt': [0] * (1 + i % 3), 'completion': list(range(5, 6 + i)), 'old_logps': [-i] * (i + 1)}
        | {'reward': i, 'group': i // 2}
        for i in range(4)
    ]
    data = prepared(tmp_path, HEADER, *lines)
    assert [ids.tolist() for ids in data.ids] == [line['prompt'] + line['completion'] for line in lines]
    assert [logps.tolist() for logps in data.old_logps] == [line['old_logps'] for line in lines]
    assert data.rewards.tolist() == [[0], [1], [2], [3]]
    assert data.groups.tolist() == [0, 0, 1, 1]


def test_groups_go_by_id_wherever_they_stand_or_by_position(tmp_path):
    by_id = prepared(tmp_path, HEADER, *({**GOOD, 'group': g} for g in ('x', 3, 'x', '3')))
    assert by_id.groups.tolist() == [0, 1, 0, 2]
    plain = {key: value for key, value in GOOD.items() if key != 'group'}
    others = {**plain, 'prompt': [0, 9]}
    by_position = prepared(tmp_path, {**HEADER, 'num_generations': 2}, plain, plain, others, others)
    assert by_position.groups.tolist() == [0, 0, 1, 1]


def test_the_temperature_may_stand_on_any_line(tmp_path):
    assert prepared(tmp_path, GOOD, '', {**GOOD, 'temperature': 0.5}, GOOD).temperature == 0.5


def test_named_rewards_are_summed_unless_one_is_the_total(tmp_path):
    named = prepared(tmp_path, HEADER, *({**GOOD, 'reward': {'b': 0.1 * i, 'a': i}} for i in range(3)))
    assert named.reward_names == ('b', 'a')
    np.testing.assert_allclose(named.totals, [0, 1.1, 2.2])
    assert 'reward    1.1 on average (b 0.1, a 1); 1 groups have unequal rewards' in named.summary
    total = prepared(tmp_path, HEADER, *({**GOOD, 'reward': {'a': i, 'total': -i}} for i in range(3)))
    assert total.totals.tolist() == [0, -1, -2]
    assert group_advantages(total.totals, 1, group_ids=total.groups)[0] > 0


def test_the_summary_counts(tmp_path):
    equal, unequal = [{**GOOD, 'group': 1}] * 3, [{**GOOD, 'reward': i} for i in range(2)]
    lines = prepared(tmp_path, HEADER, *equal, *unequal).summary.splitlines()
    assert lines[1] == 'rollouts  5 in 2 groups, at temperature 1.5; 10 completion tokens, 2.0 each'
    assert lines[2].startswith('reward    0.8 on average; 1 groups have unequal rewards, the others give no gradient')


FAULTS = [
    ({'prompt': None}, '"prompt" must be a text or a list of token ids, got null'),
    ({'prompt': []}, '"prompt" is empty'),
    ({'prompt': ''}, '"prompt" is empty'),
    ({'prompt': '\ud800'}, '"prompt" holds half a surrogate pair at character 1'),
    ({'completion': [1, 2.5]}, f'"completion" must hold token ids from 0 to {LAST}, got 2.5 as its 2.'),
    ({'completion': [LAST + 1, 1]}, f'"completion" must hold token ids from 0 to {LAST}, got {LAST + 1} as its 1.'),
    ({'completion': [6, -1]}, f'"completion" must hold token ids from 0 to {LAST}, got -1 as its 2.'),
    ({'completion': [True, 6]}, f'"completion" must hold token ids from 0 to {LAST}, got true as its 1.'),
    ({'old_logps': [-1]}, '"old_logps" has 1 numbers for 2 completion tokens'),
    ({'completion': '1 + 1 + 1'}, 'completion tokens; give the ids that were sampled'),
    ({'old_logps': -1}, '"old_logps" must be a list of numbers, got a number'),
    ({'old_logps': [-1, None]}, '"old_logps" must hold finite numbers of at most 0, got null as its 2.'),
    ({'old_logps': [float('nan'), -1]}, '"old_logps" must hold finite numbers of at most 0, got NaN as its 1.'),
    ({'old_logps': [-1, float('-inf')]}, '"old_logps" must hold finite numbers of at most 0, got -Infinity as its 2.'),
    ({'old_logps': [0.5, -1]}, '"old_logps" must hold finite numbers of at most 0, got 0.5 as its 1.'),
    ({'reward': '1'}, '"reward" must be a finite number, got "1"'),
    ({'reward': True}, '"reward" must be a finite number, got true'),
    ({'reward': 10**400}, '"reward" must be a finite number, got 1000'),
    ({'reward': {}}, '"reward" must have the names that the rollouts before have, one number, got none'),
    ({'reward': {'a': 1}}, '"reward" must have the names that the rollouts before have, one number, got "a"'),
    ({'reward': {'a': float('inf')}}, '"reward" "a" must be a finite number, got Infinity'),
    ({'group': 1.5}, '"group" must be a whole number or a string, got a number'),
    ({'group': None}, '"group" must be a whole number or a string, got null'),
    ({'temperature': 0}, '"temperature" must be a number above 0, got 0'),
    ({'temperature': 1.0}, '"temperature" is 1, but 1.5 before; a file has one temperature'),
    ({'prompt': [0] * 7}, 'prompt and completion have 9 tokens, more than --seq-length 8'),
]


@pytest.mark.parametrize(('change', 'message'), FAULTS)
def test_a_bad_line_is_named_with_file_number_and_fault(tmp_path, change, message):
    with pytest.raises(DataError, match=f'^{re.escape(str(tmp_path))}/r.jsonl, line 4: .*{re.escape(message)}'):
        prepared(tmp_path, HEADER, GOOD, '', {**GOOD, **change})


@pytest.mark.parametrize('key', ['prompt', 'completion', 'old_logps', 'reward', 'group'])
def test_a_key_that_is_missing_is_named(tmp_path, key):
    line = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(DataError, match=f'line 3: has no "{key}"'):
        prepared(tmp_path, HEADER, GOOD, line)


def test_faults_of_groups_by_position_are_named_once(tmp_path):
    plain = {key: value for key, value in GOOD.items() if key != 'group'}
    header = {**HEADER, 'num_generations': 2}
    with pytest.raises(DataError, match=r'line 1: has no "group", and the first line of the file no "num_generations"'):
        prepared(tmp_path, plain)
    with pytest.raises(DataError, match=r'line 3: "prompt" is not that of line 2, the first of its group of 2') as e:
        prepared(tmp_path, header, plain, {**plain, 'prompt': [0, 9]}, plain, plain)
    assert 'line 4' not in str(e.value)
    with pytest.raises(DataError, match='line 3: "reward"') as e:  # a bad line does not shift the groups after it
        prepared(tmp_path, header, plain, {**plain, 'reward': None}, *[{**plain, 'prompt': [0, 9]}] * 2)
    assert 'line 4' not in str(e.value)
    with pytest.raises(DataError, match='ends with 1 rollouts, which are not a whole group'):
        prepared(tmp_path, header, plain, plain, plain)


@pytest.mark.parametrize('n', [0, True, 'two', 1.5])
def test_a_wrong_number_of_generations_is_named(tmp_path, n):
    message = f'line 1: "num_generations" must be a whole number of at least 1, got {json.dumps(n)}'
    with pytest.raises(DataError, match=re.escape(message)):
        prepared(tmp_path, {**HEADER, 'num_generations': n}, GOOD)


def test_a_file_without_temperature_or_with_too_few_rollouts_is_refused(tmp_path):
    with pytest.raises(DataError, match='must say the temperature it was sampled at'):
        prepared(tmp_path, GOOD)
    with pytest.raises(DataError, match='has 1 rollouts, fewer than the 4 of one step'):
        prepared(tmp_path, HEADER, GOOD, least=4)
    with pytest.raises(DataError, match='line 1: has neither a rollout nor a setting of the file, only "temprature"'):
        prepared(tmp_path, {'temprature': 1}, GOOD)


def test_the_example_of_the_documentation_is_read_as_it_says(tmp_path):
    text = (Path(__file__).parents[2] / 'docs/rollouts.md').read_text()
    (tmp_path / 'r.jsonl').write_text(re.findall(r'```\n(\{.*?)```', text, re.S)[0])
    folder = rollouts.prepare(tmp_path / 'r.jsonl', ABOUT, seq_length=32, least=1, cache=tmp_path / 'cache')
    data = rollouts.load(folder)
    assert data.temperature == 1
    assert [ids[-1] for ids in data.ids] == [END, END]
    assert data.groups.tolist() == [0, 0]


def test_the_same_file_is_prepared_once(tmp_path):
    prepared(tmp_path, HEADER, GOOD)
    prepared(tmp_path, HEADER, GOOD)
    assert len(list((tmp_path / 'cache').iterdir())) == 1
    prepared(tmp_path, HEADER, {**GOOD, 'reward': 2})
    assert len(list((tmp_path / 'cache').iterdir())) == 2
