"""What a file of pairs may be, what becomes of it, and what is said where it is wrong."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from launch.datasets import pairs
from launch.datasets.about import About
from launch.datasets.documents import Turn
from launch.datasets.lines import DataError
from launch.datasets.responses import micro_batches
from launch.datasets.tokens import SPECIAL_IDS, train_tokenizer
from tests.launch.tiny_policy import numbers

TOKENIZER: Tokenizer = train_tokenizer([(Turn('one two three four ' * 5),)], vocab_size=300)
ABOUT = About(1, 8, 1, TOKENIZER.get_vocab_size(), TOKENIZER.to_str())
START, END = SPECIAL_IDS['<|start|>'], SPECIAL_IDS['<|end|>']
GOOD = {'prompt': 'one two', 'chosen': ' three four', 'rejected': ' two'}


def ids(text):
    return TOKENIZER.encode(text).ids


def write(path, *lines):
    path.write_text('\n'.join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def prepared(tmp_path, *lines, **more):
    settings = {'held_out': None, 'seq_length': 64, 'least': 1, 'cache': tmp_path / 'cache'} | more
    return pairs.load(pairs.prepare(write(tmp_path / 'p.jsonl', *lines), ABOUT, **settings))


def held_out(tmp_path, *lines):
    return write(tmp_path / 'held.jsonl', *(lines or [GOOD]))


def test_a_pair_becomes_two_responses_to_one_prompt_each_with_its_end(tmp_path):
    data = prepared(tmp_path, GOOD, held_out=held_out(tmp_path)).train
    assert [x.tolist() for x in data.ids] == [
        [START, *ids('one two'), *ids(GOOD[side]), END] for side in ('chosen', 'rejected')
    ]
    assert data.prompt_lengths.tolist() == [1 + len(ids('one two'))] * 2
    assert data.lengths.tolist() == [len(ids(GOOD[side])) + 1 for side in ('chosen', 'rejected')]


def test_only_tokens_of_the_response_and_its_end_are_labels(tmp_path):
    data = prepared(tmp_path, GOOD, held_out=held_out(tmp_path)).train
    for i, side in enumerate(('chosen', 'rejected')):
        inputs, labels = data.sample(i)
        assert inputs.tolist() == [START, *ids('one two'), *ids(GOOD[side])]
        assert labels[labels != -100].tolist() == [*ids(GOOD[side]), END]
        assert (labels[: len(ids('one two'))] == -100).all()  # the last token of the prompt predicts the first one


def test_a_packed_row_holds_what_padded_rows_hold(tmp_path):
    data = prepared(tmp_path, GOOD, {**GOOD, 'chosen': ' one'}, held_out=held_out(tmp_path)).train
    (padded,), (packed,) = (micro_batches(data, [numbers(0, 1, 2, 3)], packed) for packed in (False, True))
    lengths = [len(x) - 1 for x in data.ids]
    assert packed['input_ids'].shape == packed['labels'].shape == (1, sum(lengths))
    assert packed['position_ids'][0].tolist() == [place for length in lengths for place in range(length)]
    for key in ('input_ids', 'labels'):
        rows = packed[key][0].split(lengths)
        assert all(row.tolist() == line[: len(row)].tolist() for row, line in zip(rows, padded[key], strict=True))
    assert all((line[length:] == -100).all() for line, length in zip(padded['labels'], lengths))


def test_text_that_looks_like_a_special_token_is_text(tmp_path):
    data = prepared(tmp_path, {**GOOD, 'chosen': ' <|end|>'}, held_out=held_out(tmp_path)).train
    assert data.ids[0].tolist().count(END) == 1


def test_pairs_stay_in_the_order_of_the_file(tmp_path):
    lines = [{**GOOD, 'chosen': ' one' * (i + 1)} for i in range(4)]
    data = prepared(tmp_path, *lines, held_out=held_out(tmp_path)).train
    assert data.lengths[::2].tolist() == [len(ids(line['chosen'])) + 1 for line in lines]


def test_a_tenth_is_held_out_by_prompt_whatever_the_order_of_the_lines(tmp_path):
    lines = [{**GOOD, 'prompt': f'{n}', 'chosen': f' {m}'} for n in range(100) for m in 'ab']
    one, other = prepared(tmp_path, *lines), prepared(tmp_path, *reversed(lines))
    assert (len(one.train), len(one.held_out)) == (2 * 180, 2 * 20)

    def prompts(data):
        return {tuple(x[:n].tolist()) for x, n in zip(data.ids, data.prompt_lengths)}

    assert not prompts(one.train) & prompts(one.held_out)
    assert prompts(one.held_out) == prompts(other.held_out)


def test_one_prompt_alone_leaves_nothing_to_hold_out(tmp_path):
    with pytest.raises(DataError, match=r'p.jsonl has 1 different prompts .* or name other pairs by --held-out FILE'):
        prepared(tmp_path, GOOD, {**GOOD, 'chosen': ' one'})


def test_pairs_that_are_too_long_are_left_out_whole_and_counted(tmp_path):
    length = 1 + len(ids('one two')) + len(ids(GOOD['chosen'])) + 1
    lines = [GOOD, {**GOOD, 'rejected': ' one' * 20}, {**GOOD, 'prompt': 'one' * 20}]
    data = prepared(tmp_path, *lines, held_out=held_out(tmp_path, GOOD, lines[1]), seq_length=length)
    assert (len(data.train), len(data.held_out)) == (2, 2)
    assert f'1 to train on, 1 held out from {tmp_path}/held.jsonl; 3 left out, longer than --seq-length {length}' in (
        data.summary
    )
    with pytest.raises(DataError, match=r'has 0 pairs to train on, fewer than the 1 of one step; 2 left out, longer'):
        prepared(tmp_path, *lines[1:], held_out=held_out(tmp_path), seq_length=length)
    with pytest.raises(DataError, match=r'held.jsonl has no pair to measure by; 1 left out, longer than'):
        prepared(tmp_path, GOOD, held_out=held_out(tmp_path, lines[1]), seq_length=length)


FAULTS = [
    ({'prompt': None}, '"prompt" must be a string, got null'),
    ({'prompt': [1, 2]}, '"prompt" must be a string, got a list'),
    ({'prompt': ''}, '"prompt" is empty'),
    ({'chosen': 3}, '"chosen" must be a string, got a number'),
    ({'chosen': [{'role': 'assistant', 'content': 'a'}]}, '"chosen" must be a string, got a list'),
    ({'rejected': ''}, '"rejected" is empty'),
    ({'rejected': '\ud800'}, '"rejected" holds half a surrogate pair at character 1'),
    ({'rejected': ' three four'}, '"chosen" and "rejected" are the same, so that none is preferred'),
    ({'completion': 'a'}, 'has a "completion" as rollouts have; train on these with --loss grpo'),
]


@pytest.mark.parametrize(('change', 'message'), FAULTS)
def test_a_bad_line_is_named_with_file_number_and_fault(tmp_path, change, message):
    with pytest.raises(DataError, match=f'^{re.escape(f"{tmp_path}/p.jsonl, line 3: {message}")}\n'):
        prepared(tmp_path, GOOD, '', {**GOOD, **change})


@pytest.mark.parametrize('key', ['prompt', 'chosen', 'rejected'])
def test_a_key_that_is_missing_is_named(tmp_path, key):
    line = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(DataError, match=f'line 2: has no "{key}"\nEach line must be {{"prompt": ...'):
        prepared(tmp_path, GOOD, line)


def test_a_bad_line_among_held_out_pairs_is_named_with_their_file(tmp_path):
    with pytest.raises(DataError, match=f'^{re.escape(str(tmp_path))}/held.jsonl, line 2: has no "rejected"'):
        prepared(tmp_path, GOOD, held_out=held_out(tmp_path, GOOD, {'prompt': 'a', 'chosen': 'b'}))


def test_a_file_with_too_few_pairs_is_refused(tmp_path):
    with pytest.raises(DataError, match='has 1 pairs to train on, fewer than the 4 of one step'):
        prepared(tmp_path, GOOD, held_out=held_out(tmp_path), least=4)


def test_the_example_of_the_documentation_is_read_as_it_says(tmp_path):
    text = (Path(__file__).parents[2] / 'docs/pairs.md').read_text()
    data = prepared(tmp_path, re.findall(r'```\n(\{.*?)```', text, re.S)[0])
    assert len(data.train) == len(data.held_out) == 2
    assert all(x[-1] == END for part in (data.train, data.held_out) for x in part.ids)


def test_the_same_file_is_prepared_once(tmp_path):
    lines = [GOOD, {**GOOD, 'prompt': 'two'}]
    prepared(tmp_path, *lines)
    prepared(tmp_path, *lines)
    assert len(list((tmp_path / 'cache').iterdir())) == 1
    prepared(tmp_path, *lines, {**GOOD, 'prompt': 'three'})
    assert len(list((tmp_path / 'cache').iterdir())) == 2


def test_the_summary_counts(tmp_path):
    lines = prepared(tmp_path, GOOD, held_out=held_out(tmp_path)).summary.splitlines()
    assert lines[1] == f'pairs     1 to train on, 1 held out from {tmp_path}/held.jsonl'
    means = [np.mean(n) for n in (1 + len(ids('one two')), len(ids(' three four')) + 1, len(ids(' two')) + 1)]
    assert lines[2].startswith(
        f'tokens    {means[0]:.1f} of a prompt, {means[1]:.1f} of a chosen response, {means[2]:.1f}'
    )
