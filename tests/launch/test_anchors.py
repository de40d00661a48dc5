"""What a file of groups may be, what becomes of it, and what is said where it is wrong."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from launch.datasets import anchors
from launch.datasets.about import About
from launch.datasets.documents import Turn, read_documents
from launch.datasets.lines import DataError
from launch.datasets.tokens import SPECIAL_IDS, train_tokenizer

TOKENIZER: Tokenizer = train_tokenizer([(Turn('one two three four ' * 5),)], vocab_size=300)
ABOUT = About(1, 8, 1, TOKENIZER.get_vocab_size(), TOKENIZER.to_str())
START, END = SPECIAL_IDS['<|start|>'], SPECIAL_IDS['<|end|>']
GOOD = {'anchor': 'one two', 'positive': 'three four'}
MORE = {**GOOD, 'negatives': ['two', 'four one']}


def ids(text):
    return TOKENIZER.encode(text).ids


def write(path, *lines):
    path.write_text('\n'.join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def prepared(tmp_path, *lines, **more):
    settings = {'seq_length': 64, 'negatives': False, 'least': 1} | more
    if 'held_out' not in settings:
        settings['held_out'] = held_out(tmp_path)
    return anchors.load(
        anchors.prepare(write(tmp_path / 'g.jsonl', *lines), ABOUT, cache=tmp_path / 'cache', **settings)
    )


def held_out(tmp_path, *lines):
    return write(tmp_path / 'held.jsonl', *(lines or [GOOD, MORE]))


def test_each_text_of_a_group_stands_between_start_and_end(tmp_path):
    data = prepared(tmp_path, GOOD, MORE).train
    texts = ['one two', 'three four'] * 2 + ['two', 'four one']
    assert [x.tolist() for x in data.ids] == [[START, *ids(text), END] for text in texts]
    assert data.starts.tolist() == [0, 2, 6]
    assert len(data) == 2
    assert data.texts([1, 0]) == [2, 3, 4, 5, 0, 1]
    assert data.tokens([1]) == sum(len(x) for x in data.ids[2:])


def test_held_out_groups_have_no_negatives(tmp_path):
    data = prepared(tmp_path, GOOD).held_out
    assert data.starts.tolist() == [0, 2, 4]
    assert [x.tolist() for x in data.ids] == [[START, *ids(text), END] for text in ('one two', 'three four')] * 2


def test_text_that_looks_like_a_special_token_is_text(tmp_path):
    data = prepared(tmp_path, {**GOOD, 'positive': '<|end|>'}).train
    assert data.ids[1].tolist().count(END) == 1


def test_texts_that_are_too_long_are_cut_before_their_end_token_and_counted(tmp_path):
    line = {'anchor': 'one ' * 6, 'positive': 'one ' * 7, 'negatives': ['one ' * 30]}
    length = len(ids(line['anchor'])) + 2
    data = prepared(tmp_path, line, seq_length=length)
    assert [len(x) for x in data.train.ids] == [length] * 3
    assert data.train.ids[2].tolist() == [START, *ids(line['negatives'][0])[: length - 2], END]
    assert f'; 2 of 9 texts cut at --seq-length {length}' in data.summary  # 3 and 6 held-out ones


def test_a_tenth_is_held_out_by_anchor_whatever_the_order_of_the_lines(tmp_path):
    lines = [{'anchor': f'{n}', 'positive': f'{n} {m}'} for n in range(100) for m in 'ab']
    one, other = (prepared(tmp_path, *of, held_out=None) for of in (lines, lines[::-1]))
    assert (len(one.train), len(one.held_out)) == (180, 20)

    def first(data):
        return {tuple(data.ids[i].tolist()) for i in data.starts[:-1]}

    assert not first(one.train) & first(one.held_out)
    assert first(one.held_out) == first(other.held_out)


def test_fewer_than_two_held_out_groups_are_refused(tmp_path):
    with pytest.raises(DataError, match=r'g.jsonl gives 0 held-out groups, and needs 2, .* others by --held-out FILE$'):
        prepared(tmp_path, GOOD, MORE, held_out=None)  # both of one anchor
    with pytest.raises(DataError, match=r'g\.jsonl gives 1 held-out groups'):
        prepared(tmp_path, GOOD, {**GOOD, 'anchor': 'two'}, held_out=None)
    with pytest.raises(
        DataError, match=r'held\.jsonl gives 1 held-out groups, and needs 2, to compare them; add more$'
    ):
        prepared(tmp_path, GOOD, held_out=held_out(tmp_path, GOOD))


FAULTS = [
    ({'anchor': None}, '"anchor" must be a string, got null'),
    ({'anchor': ' '}, '"anchor" is empty'),
    ({'positive': 3}, '"positive" must be a string, got a number'),
    ({'positive': '\ud800'}, '"positive" holds half a surrogate pair at character 1'),
    ({'positive': 'one two'}, '"anchor" and "positive" are the same, so that there is nothing to learn'),
    ({'negatives': 'two'}, '"negatives" must be a list of texts, got a string'),
    ({'negatives': None}, '"negatives" must be a list of texts, got null'),
    ({'negatives': ['two', '']}, '"negatives[1]" is empty'),
    ({'negatives': [['two']]}, '"negatives[0]" must be a string, got a list'),
    ({'negatives': ['two', 'three four']}, 'the "positive" stands among the "negatives", too'),
    ({'completion': 'a'}, 'has "completion", which a group does not have; is it for --loss grpo?'),
    ({'chosen': 'a'}, 'has "chosen", which a group does not have; is it for --loss dpo?'),
]


@pytest.mark.parametrize(('change', 'message'), FAULTS)
def test_a_bad_line_is_named_with_file_number_and_fault(tmp_path, change, message):
    with pytest.raises(DataError, match=f'^{re.escape(f"{tmp_path}/g.jsonl, line 3: {message}")}\n'):
        prepared(tmp_path, GOOD, '', {**GOOD, **change})


@pytest.mark.parametrize('key', ['anchor', 'positive'])
def test_a_key_that_is_missing_is_named(tmp_path, key):
    line = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(DataError, match=f'line 2: has no "{key}"\nEach line must be {{"anchor": ...'):
        prepared(tmp_path, GOOD, line)


def test_a_bad_line_among_held_out_groups_is_named_with_their_file(tmp_path):
    with pytest.raises(DataError, match=f'^{re.escape(str(tmp_path))}/held.jsonl, line 2: has no "positive"'):
        prepared(tmp_path, GOOD, held_out=held_out(tmp_path, GOOD, {'anchor': 'a'}))


def test_hard_negatives_need_a_negative_in_each_group_to_train_on(tmp_path):
    assert len(prepared(tmp_path, MORE, negatives=True).train) == 1  # held-out ones do without
    for without in (GOOD, {**GOOD, 'negatives': []}):
        with pytest.raises(DataError, match='line 2: has no "negatives", which --hard-negatives takes some from'):
            prepared(tmp_path, MORE, without, negatives=True)


def test_a_file_with_too_few_groups_is_refused(tmp_path):
    with pytest.raises(DataError, match='has 1 groups to train on, fewer than the 4 of one step'):
        prepared(tmp_path, GOOD, least=4)


def test_groups_among_text_are_told_which_loss_is_theirs(tmp_path):
    with pytest.raises(DataError, match=r'line 1: has an "anchor" as groups of texts have; .* with --loss infonce'):
        read_documents(write(tmp_path / 'g.jsonl', GOOD))


def test_the_example_of_the_documentation_is_read_as_it_says(tmp_path):
    text = (Path(__file__).parents[2] / 'docs/embeddings.md').read_text()
    data = prepared(tmp_path, re.findall(r'```\n(\{.*?)```', text, re.S)[0], held_out=held_out(tmp_path)).train
    assert data.starts.tolist() == [0, 2, 6]


def test_the_same_file_is_prepared_once(tmp_path):
    for lines in ([GOOD, MORE], [GOOD, MORE], [MORE, GOOD]):
        prepared(tmp_path, *lines)
    assert len(list((tmp_path / 'cache').iterdir())) == 2


def test_the_summary_counts(tmp_path):
    lines = prepared(tmp_path, GOOD, MORE).summary.splitlines()
    assert lines[1] == f'groups    2 to train on, with 2 negatives of their own; 2 held out from {tmp_path}/held.jsonl'
    anchor, positive = (len(ids(GOOD[key])) + 2 for key in ('anchor', 'positive'))
    negative = np.mean([len(ids(text)) + 2 for text in MORE['negatives']])
    assert lines[2] == (
        f'tokens    {anchor:.1f} of an anchor, {positive:.1f} of a positive, {negative:.1f} of a negative; 0 of 12 '
        'texts cut at --seq-length 64'
    )
