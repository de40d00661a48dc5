"""Replies of vLLM and SGLang become a file of best tokens, and what is not understood is named with its place."""

import copy
import json
from pathlib import Path

import pytest

from launch import topk_file
from launch.datasets import best_tokens, tokens
from launch.datasets.documents import Turn

REPLIES = Path(__file__).parent / 'replies'
SEQUENCE = {
    'input_ids': [12, 7, 31, 5],
    'topk_logprobs': [None, [-0.25, -2.5], [-0.5, -1.75], [-0.125, -3.0]],
    'topk_indices': [None, [7, 9], [8, 22], [6, 5]],
}
COMPLETION = {
    'input_ids': [12, 11, 7, 5],
    'prompt_length': 2,
    'topk_logprobs': [None, None, [-0.25, -2.5], [-0.125, -3.0]],
    'topk_indices': [None, None, [7, 9], [6, 5]],
}


def converted(capsys, *argv):
    """The lines that it writes."""
    topk_file.main([str(one) for one in argv])
    shown = capsys.readouterr()
    assert shown.err == ''
    return [json.loads(line) for line in shown.out.splitlines()]


def recorded(name):
    """A reply that can be changed."""
    reply = json.loads((REPLIES / name).read_text())
    return copy.deepcopy(reply[0] if isinstance(reply, list) else reply)


def test_vllm_gives_a_line_for_each_prompt_without_the_prompts_own_token_where_that_is_none_of_the_best(capsys):
    first, second = converted(capsys, REPLIES / 'vllm-completion-prompt.json')
    assert first == SEQUENCE
    assert second['input_ids'] == [12, 9]
    assert second['topk_indices'] == [None, [7, 9]]


def test_a_chat_of_vllm_tells_of_its_prompt_beside_the_choices_and_minus_infinity_is_left_out(capsys):
    (line,) = converted(capsys, REPLIES / 'vllm-chat-prompt.json')
    assert line['topk_logprobs'] == [None, [-0.0625, -4.0], [-0.75]]
    assert line['topk_indices'] == [None, [3, 4], [4]]


def test_sglang_gives_the_same_line(capsys):
    assert converted(capsys, REPLIES / 'sglang-generate.json') == [SEQUENCE]


@pytest.mark.parametrize('name', ['vllm-completion.json', 'vllm-chat.json'])
def test_completions_with_ids_for_names_are_told_too(capsys, name):
    assert converted(capsys, REPLIES / name) == [COMPLETION]


def test_echo_leaves_the_prompt_among_the_tokens(capsys, tmp_path):
    reply = recorded('vllm-completion.json')
    told = reply['choices'][0]['logprobs']
    told['tokens'] = ['token_id:12', 'token_id:11', *told['tokens']]
    told['top_logprobs'] = [None, {'token_id:11': -0.5}, *told['top_logprobs']]
    (tmp_path / 'r.json').write_text(json.dumps(reply))
    assert converted(capsys, tmp_path / 'r.json') == [COMPLETION]


def test_the_completion_of_a_reply_that_tells_of_both_is_asked_for(capsys):
    (line,) = converted(capsys, '--of=completion', REPLIES / 'sglang-generate.json')
    assert line['input_ids'] == [12, 7, 31, 5, 13]
    assert line['prompt_length'] == 4
    assert line['topk_indices'] == [None] * 4 + [[13, 10]]


def test_sglang_from_a_later_token_on_needs_the_ids_before(capsys, tmp_path):
    reply = recorded('sglang-generate.json')
    for key in ('input_token_logprobs', 'input_top_logprobs'):
        reply['meta_info'][key] = reply['meta_info'][key][1:]
    reply |= {'prompt_token_ids': [12, 7, 31, 5], 'prompt_length': 2}
    (tmp_path / 'r.json').write_text(json.dumps(reply))
    assert converted(capsys, tmp_path / 'r.json') == [SEQUENCE | {'prompt_length': 2}]


def test_files_hold_one_reply_a_list_or_one_a_line_and_the_best_few_can_be_kept(capsys, tmp_path):
    one = recorded('sglang-generate.json')
    (tmp_path / 'lines.jsonl').write_text(f'{json.dumps(one)}\n\n{json.dumps(one | {"prompt_length": 3})}\n')
    lines = converted(capsys, '--topk=1', tmp_path / 'lines.jsonl', REPLIES / 'vllm-completion.json')
    assert [line['topk_indices'] for line in lines] == [
        [None, [7], [8], [6]],
        [None, [7], [8], [6]],
        [None, None, [7], [6]],
    ]
    assert [line.get('prompt_length') for line in lines] == [None, 3, 2]


def at(*path, to):
    """A change of a reply: puts something at a path, or takes away what is there."""

    def change(reply):
        for key in path[:-1]:
            reply = reply[key]
        if to is None:
            del reply[path[-1]]
        else:
            reply[path[-1]] = to

    return change


CHOICE, META = ('choices', 0), ('meta_info',)


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        ('vllm-completion-prompt.json', at(*CHOICE, 'prompt_token_ids', to=None),
         'choice 0, has no "prompt_token_ids"; ask with "return_token_ids": true, or add them'),
        ('vllm-completion-prompt.json', at(*CHOICE, 'prompt_token_ids', to=[12, 7, 31]),
         'choice 0, "prompt_logprobs" must have an entry for each of the 3 tokens, got 4'),
        ('vllm-completion-prompt.json', at(*CHOICE, 'prompt_token_ids', to=[12, 7, 30, 5]),
         'choice 0, token 2: 30 of the prompt is not among its own log-probs; is it this prompt?'),
        ('vllm-completion-prompt.json', at(*CHOICE, 'prompt_logprobs', 1, '7', 'logprob', to='-1'),
         'token 1: the log-prob of id 7 must be a number, got "-1"'),
        ('vllm-completion-prompt.json', at(*CHOICE, 'prompt_logprobs', 2, to={'31': {'logprob': -6.75, 'rank': 17}}),
         'token 2: has no log-prob of a best token; ask for at least 1'),
        ('vllm-completion.json', at(*CHOICE, 'logprobs', 'tokens', 1, to='.'),
         'token 3: must be told by its id, got "."; ask with "return_tokens_as_token_ids": true'),
        ('vllm-chat.json', at(*CHOICE, 'logprobs', 'content', 0, 'top_logprobs', 1, 'token', to=' 2'),
         'token 2: must be told by its id, got " 2"; ask with "return_tokens_as_token_ids": true'),
        ('vllm-chat.json', at(*CHOICE, 'logprobs', to=None),
         'has log-probs neither of its prompt nor of its completion; ask with "prompt_logprobs": 20'),
        ('vllm-chat.json', at(*CHOICE, 'logprobs', 'content', 1, 'top_logprobs', to=None),
         'token 3: has no log-prob of a best token; ask for at least 1'),
        ('vllm-completion.json', at(*CHOICE, 'logprobs', 'tokens', to=None), '"tokens" must be a list, got null'),
        ('vllm-completion.json', at(*CHOICE, 'prompt_token_ids', to='a b'), '"prompt_token_ids" must be a list of ids'),
        ('vllm-completion.json', at(*CHOICE, to=7), '"choices" must hold objects, got a number'),
        ('sglang-generate.json', at(*META, 'input_top_logprobs', 2, 1, to=[-0.5]),
         'token 2: must be [log-prob, id, text], got [-0.5]'),
        ('sglang-generate.json', at(*META, 'input_top_logprobs', 2, 1, 1, to=8),
         'token 2: an id occurs twice among its log-probs'),
        ('sglang-generate.json', at(*META, 'prompt_tokens', to=9),
         'has ids of 4 of the 9 prompt tokens; ask with "logprob_start_len": 0, or add "prompt_token_ids"'),
        ('sglang-generate.json', at('meta_info', to=None),
         'has neither "choices", as replies of vLLM, nor "meta_info", as those of SGLang'),
        ('sglang-generate.json', at('meta_info', to=7), '"meta_info" must be an object, got a number'),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_file_reply_and_token_and_nothing_is_written(name, change, message, capsys, tmp_path):
    good, bad = recorded(name), recorded(name)
    change(bad)
    path = tmp_path / 'r.json'
    path.write_text(json.dumps([good, bad]))
    with pytest.raises(SystemExit) as caught:
        topk_file.main([str(path)])
    said = str(caught.value)
    assert said.startswith(f'{path}, reply 2')
    assert message in said
    assert capsys.readouterr().out == ''


def test_files_that_are_none_and_errors_of_the_server_are_named(tmp_path):
    (tmp_path / 'a.json').write_text('{"object": "error", "message": "too long", "code": 400}')
    (tmp_path / 'b.jsonl').write_text('{"choices": []}\n{half')
    with pytest.raises(SystemExit) as caught:
        topk_file.main([str(tmp_path / name) for name in ('a.json', 'b.jsonl', 'c.json')])
    first, second, third = str(caught.value).splitlines()
    assert first == f'{tmp_path}/a.json, reply 1: is an error of the server: "too long"'
    assert second.startswith(f'{tmp_path}/b.jsonl, line 2: not JSON: ')
    assert third.startswith(f'{tmp_path}/c.json cannot be read: ')


def test_the_lines_are_a_file_to_train_on(capsys, tmp_path):
    topk_file.main([str(REPLIES / name) for name in ('vllm-completion-prompt.json', 'vllm-chat.json')])
    (tmp_path / 'topk.jsonl').write_text(capsys.readouterr().out)
    tokenizer = tokens.train_tokenizer([(Turn('one two'),)], vocab_size=300).to_str()
    folder = best_tokens.prepare(tmp_path / 'topk.jsonl', tokenizer, seq_length=8, least=1, cache=tmp_path)
    found = best_tokens.load(folder)
    told = [part.indices[i].tolist() for part in (found.train, found.held_out) for i in range(len(part))]
    assert sorted(told) == [[[7, 9]], [[7, 9], [6, 5]], [[7, 9], [8, 22], [6, 5]]]
