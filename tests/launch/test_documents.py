"""What a line of a person's file may be, and what is said where it is wrong."""

import json
import re

import pytest

from launch.datasets.documents import Turn, python_reference, read_documents
from launch.datasets.lines import DataError


def write(tmp_path, *lines):
    path = tmp_path / 'my.jsonl'
    path.write_bytes(b'\n'.join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_the_three_forms_are_read_in_the_order_of_the_file(tmp_path):
    talk = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    talk.append({'role': 'assistant', 'content': 'Hello'})
    path = write(tmp_path, {'text': 'running text'}, {'messages': talk}, {'prompt': '1+1?', 'response': '2', 'id': 7})
    assert read_documents(path) == [
        (Turn('running text'),),
        (Turn('Be brief.', 'system'), Turn('Hi', 'user'), Turn('Hello', 'assistant')),
        (Turn('1+1?', 'user'), Turn('2', 'assistant')),
    ]


def test_only_running_text_and_the_assistant_are_trained_on():
    assert [Turn('x', role).trained for role in (None, 'assistant', 'user', 'system', 'tool')] == [True, True] + 3 * [
        False
    ]


def test_empty_lines_windows_line_ends_and_a_byte_order_mark_are_no_errors(tmp_path):
    path = tmp_path / 'my.jsonl'
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"text": "b"}\r\n')
    assert read_documents(path) == [(Turn('a'),), (Turn('b'),)]


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        (b'{"text": "a', 'not JSON: Unterminated string starting at at column 10'),
        (b'{"text": "\xff"}', 'not UTF-8: byte 0xff at column 11'),
        ([1, 2], 'must be a JSON object, got a list'),
        (None, 'must be a JSON object, got null'),
        ({}, 'has none of the keys "text", "messages", "prompt" and "response", only no key'),
        ({'txt': 'a'}, 'has none of the keys "text", "messages", "prompt" and "response", only "txt"'),
        ({'text': 3}, '"text" must be a string, got a number'),
        ({'text': ' \n'}, '"text" is empty'),
        ({'text': '\ud800'}, '"text" holds half a surrogate pair at character 1'),
        ({'text': 'a', 'prompt': 'b'}, 'mixes the forms: has "text", "prompt"; keep one of them'),
        ({'prompt': 'a'}, 'has "prompt" but no "response"'),
        ({'response': 'a'}, 'has "response" but no "prompt"'),
        (
            {'input_ids': [1], 'topk_logprobs': []},
            'has "topk_logprobs" of a teacher; train on these with --loss gkd, without --teacher-weights',
        ),
        (
            {'prompt': 'a', 'chosen': 'b', 'rejected': 'c'},
            'has "chosen" and "rejected" as pairs have; train on these with --loss dpo',
        ),
        ({'prompt': 'a', 'response': None}, '"response" must be a string, got null'),
        ({'messages': []}, '"messages" must be a list of messages, got an empty list'),
        ({'messages': {'role': 'user'}}, '"messages" must be a list of messages, got an object'),
        ({'messages': ['hi']}, 'message 1: must be an object with "role" and "content", got a string'),
        ({'messages': [{'content': 'a'}]}, 'message 1: "role" must be one of system, user, assistant, tool, got null'),
        (
            {'messages': [{'role': 'user', 'content': 'a'}, {'role': 'bot', 'content': 'b'}]},
            'message 2: "role" must be one of system, user, assistant, tool, got "bot"',
        ),
        ({'messages': [{'role': 'user'}]}, 'message 1: has no "content"'),
        (
            {'messages': [{'role': 'user', 'content': [{'type': 'text'}]}]},
            'message 1: "content" must be a string, got a list',
        ),
        ({'messages': [{'role': 'user', 'content': 'a'}]}, 'has no message of the assistant, so nothing to train on'),
        (b'[' * 100_000, 'not a document: JSON nested too deeply'),
    ],
)
def test_a_bad_line_is_named_with_file_number_and_fault(tmp_path, line, message):
    path = write(tmp_path, {'text': 'fine'}, b'', line)
    with pytest.raises(DataError, match=f'^{re.escape(f"{path}, line 3: {message}")}\n'):
        read_documents(path)


def test_of_many_bad_lines_the_first_are_shown_and_the_others_counted(tmp_path):
    path = write(tmp_path, *[{'text': 'fine'}, {'txt': 'bad'}] * 8)
    with pytest.raises(DataError) as caught:
        read_documents(path)
    shown = str(caught.value).splitlines()
    assert [line.split(':')[0] for line in shown[:5]] == [f'{path}, line {n}' for n in (2, 4, 6, 8, 10)]
    assert shown[5] == '... and 3 more bad lines'
    assert shown[6].startswith('Each line must be {"text": ...}')


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda path: None, 'does not exist'),
        (lambda path: path.mkdir(), 'is a folder; it must be one file of JSON lines'),
        (lambda path: path.touch(), 'has no line with a document'),
        (lambda path: path.write_text('\n \n'), 'has no line with a document'),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, make, message):
    path = tmp_path / 'my.jsonl'
    make(path)
    with pytest.raises(DataError, match=f'{re.escape(str(path))} {message}'):
        read_documents(path)


def test_no_topic_of_the_reference_is_an_excerpt_of_another():
    documents, about = python_reference()
    paragraphs = [{' '.join(p.split()) for p in d[0].text.split('\n\n')} for d in documents]
    for i, one in enumerate(paragraphs):
        size = sum(map(len, one))
        assert all(sum(map(len, one & other)) <= size / 2 for other in paragraphs[:i])
    assert len(documents) > 40
    assert 'language reference of Python' in about
