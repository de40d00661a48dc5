"""The rule that `make demo-grpo` scores by."""

import pytest

from launch import task
from launch.datasets.documents import Turn
from launch.datasets.lines import DataError
from launch.datasets.tokens import END, SPECIAL_IDS, START, train_tokenizer

LINES = task.code_lines(400)
TOKENIZER = train_tokenizer([(Turn(line),) for line in LINES], vocab_size=500)


def ids(text):
    return TOKENIZER.encode(text).ids


@pytest.mark.parametrize(
    ('line', 'is_python'),
    [
        ('x = f(1)', True), ('for a in b[0]:', True), ('def f(x):', True), ('x = f(1', False), ('return', True),
        ('for a in', False), ('a b', False), ('x = \0', False), ('(' * 10_000, False), ('print "x"', False),
    ],
)  # fmt: skip
def test_a_line_parses_alone_or_as_the_head_of_a_block(line, is_python):
    assert task.parses(line) is is_python


@pytest.mark.parametrize(
    ('completion', 'ends', 'reward'),
    [('y)', True, 1), ('y)', False, 0), ('y', True, 0), ('y) # anything', True, 0), ('y)\nz', True, 0)],
)
def test_the_reward_is_1_for_one_whole_line_that_parses(completion, ends, reward):
    tokens = [*ids(completion), *([SPECIAL_IDS[END]] if ends else [])]
    assert task.score([SPECIAL_IDS[START], *ids('x = f(')], tokens, TOKENIZER) == reward


def test_special_tokens_in_the_middle_are_no_text():
    assert task.score([0, *ids('x = f(y')], [SPECIAL_IDS['<|user|>'], *ids(')'), SPECIAL_IDS[END]], TOKENIZER) == 0


def test_lines_are_different_and_parse_and_come_in_the_same_order():
    assert len(set(LINES)) == 400
    assert all(task.parses(line) for line in LINES)
    assert task.code_lines(50) == LINES[:50]


def test_prompts_are_different_beginnings_that_do_not_parse_yet():
    prompts = task.prompts_of(LINES, TOKENIZER, 200)
    assert len({tuple(prompt) for prompt in prompts}) == 200
    for start, *beginning in prompts:
        assert start == SPECIAL_IDS[START]
        assert not task.parses(TOKENIZER.decode(beginning))
        assert any(line.startswith(TOKENIZER.decode(beginning)) for line in LINES)
    with pytest.raises(DataError, match=r'the lines give \d+ different prompts, not 500'):
        task.prompts_of(LINES, TOKENIZER, 500)


def test_too_many_lines_are_refused():
    with pytest.raises(DataError, match=r'has \d+ lines to use, not 10000000'):
        task.code_lines(10_000_000)
