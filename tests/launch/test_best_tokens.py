"""A file of a teacher's best tokens is read as docs/distillation.md tells, and every bad line is named."""

import json
import math

import numpy as np
import pytest

from launch.datasets import best_tokens, tokens
from launch.datasets.documents import Turn
from launch.datasets.lines import DataError

_trained = tokens.train_tokenizer([(Turn('one two three'),)], vocab_size=300)
TOKENIZER, VOCAB = _trained.to_str(), _trained.get_vocab_size()
LINE = {
    'input_ids': [0, 11, 12, 13],
    'topk_logprobs': [None, [-0.1, -3.0], [-0.2], [-0.5, -1.5]],
    'topk_indices': [None, [11, 20], [12], [30, 13]],
}


def prepared(tmp_path, *records, least=1, seq_length=8):
    """What becomes of these lines, and of another one that can be held out or trained on."""
    (tmp_path / 'b.jsonl').write_text('\n'.join(json.dumps(record) for record in records))
    settings = {'seq_length': seq_length, 'least': least, 'cache': tmp_path}
    return best_tokens.load(best_tokens.prepare(tmp_path / 'b.jsonl', TOKENIZER, **settings))


def parts(found):
    return [
        (part.ids[i].tolist(), *(x.tolist() for x in part.inputs_and_labels(i)), part.log_probs[i], part.indices[i])
        for part in (found.train, found.held_out)
        for i in range(len(part))
    ]


def of(ids, found):
    return next(part[1:] for part in parts(found) if part[0] == ids)


OTHER = LINE | {'input_ids': [0, 40, 41, 42]}


def test_every_token_with_log_probs_is_trained_and_short_lists_are_filled_up(tmp_path):
    found = prepared(tmp_path, LINE, OTHER)
    assert (len(found.train), len(found.held_out)) == (1, 1)
    inputs, labels, log_probs, indices = of(LINE['input_ids'], found)
    assert (inputs, labels) == ([0, 11, 12], [11, 12, 13])
    np.testing.assert_array_equal(log_probs, [[-0.1, -3.0], [-0.2, -math.inf], [-0.5, -1.5]])
    np.testing.assert_array_equal(indices, [[11, 20], [12, 0], [30, 13]])
    assert found.tokenizer == TOKENIZER


@pytest.mark.parametrize(
    'what',
    [
        {'prompt_length': 2},
        {'labels': [-100, -100, 12, 13]},
        {'prompt_length': 2, **{key: LINE[key][2:] for key in ('topk_logprobs', 'topk_indices')}},
        {key: [None, None, *LINE[key][2:]] for key in ('topk_logprobs', 'topk_indices')},
    ],
)
def test_the_prompt_is_told_by_its_length_by_labels_or_by_where_the_log_probs_begin(tmp_path, what):
    inputs, labels, log_probs, indices = of(LINE['input_ids'], prepared(tmp_path, LINE | what, OTHER))
    assert (inputs, labels) == ([0, 11, 12], [-100, 12, 13])
    np.testing.assert_array_equal(log_probs, [[-0.2, -math.inf], [-0.5, -1.5]])
    np.testing.assert_array_equal(indices, [[12, 0], [30, 13]])


def test_answers_to_one_prompt_are_on_one_side(tmp_path):
    both = {'topk_logprobs': [[-0.5], [-0.5]], 'topk_indices': [[1], [2]], 'prompt_length': 2}
    lines = [both | {'input_ids': [0, 50 + i // 3, 100 + i, 7]} for i in range(60)]
    found = prepared(tmp_path, *lines)
    train, held_out = ({int(ids[1]) for ids in part.ids} for part in (found.train, found.held_out))
    assert not train & held_out
    assert len(found.held_out) == 6  # a tenth


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'input_ids': None}, '"input_ids" must be a list, got null'),
        ({'input_ids': [0, 999, 1, 1]}, f'"input_ids" must hold token ids from 0 to {VOCAB - 1}, got 999 at 1'),
        ({'input_ids': [0] * 10}, '"input_ids" must have 2 to --seq-length + 1 = 9 tokens, got 10'),
        ({'topk_logprobs': [None, [-0.1, -3.0], [-0.2]]}, '"topk_logprobs" has 3 entries and "topk_indices" 4'),
        ({'labels': [0, 11, 12]}, '"labels" must have an entry for each of the 4 tokens, got 3'),
        (
            {'labels': [11, 12, 13, -100]},
            '"labels" must hold the token of the same place (they are not shifted) or -100, got 11 for 0 at 0',
        ),
        ({'labels': [-100] * 4}, 'has no token to train on'),
        ({'prompt_length': 4}, '"prompt_length" must be a whole number from 0 to 3, got 4'),
        ({'prompt_length': 1, 'labels': [0]}, 'has "labels" and "prompt_length"; keep one of them'),
        (
            {'topk_logprobs': [[-1.0]], 'topk_indices': [[3]]},
            'needs "labels" or "prompt_length", as "topk_logprobs" has no entry for some tokens',
        ),
        (
            {'topk_logprobs': [[-1.0]], 'topk_indices': [[3]], 'prompt_length': 1},
            '"topk_logprobs" must have 4 entries, one for each token, or 3, one for each trained token, got 1',
        ),
        (
            {'topk_logprobs': [None, None, [-0.2], [-1]], 'prompt_length': 0},
            '"topk_logprobs" and "topk_indices" must be lists of the same length for the trained token at 1',
        ),
        (
            {'topk_logprobs': [None, [0.9, 0.1], [-1], [-1, -2]]},
            '"topk_logprobs" must hold numbers of at most 0, got 0.9 for the trained token at 1',
        ),
        (
            {'topk_logprobs': [None, [-0.1, -0.2], [-1], [-1, -2]]},
            '"topk_logprobs" must be log-probs in nats, got probabilities of 1.724 together for the trained token at 1',
        ),
        (
            {'topk_logprobs': [None, [-math.inf, -math.inf], [-1], [-1, -2]]},
            '"topk_logprobs" must be above -Infinity at least once for the trained token at 1',
        ),
        (
            {'topk_indices': [None, [11, 11], [12], [30, 13]]},
            '"topk_indices" must differ for the trained token at 1',
        ),
        (
            {'topk_indices': [None, [11, 400], [12], [30, 13]]},
            f'"topk_indices" must hold token ids from 0 to {VOCAB - 1}, got 400 for the trained token at 1',
        ),
    ],
)
def test_a_bad_line_is_named_with_its_fault(tmp_path, change, message):
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, OTHER, LINE | change)
    assert str(caught.value).splitlines()[0] == f'{tmp_path}/b.jsonl, line 2: {message}'


def test_too_few_sequences_are_told(tmp_path):
    with pytest.raises(DataError, match='needs at least 2 sequences that begin differently, one of them to hold out'):
        prepared(tmp_path, LINE, LINE)
    with pytest.raises(DataError, match='has 1 sequences to train on, fewer than the 8 of one step'):
        prepared(tmp_path, LINE, OTHER, least=8)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / 't.json').write_text('{}')
    for name, message in (('t.json', 'is no tokenizer.json'), ('none.json', 'cannot be read')):
        with pytest.raises(DataError, match=message):
            best_tokens.read_tokenizer(tmp_path / name)
