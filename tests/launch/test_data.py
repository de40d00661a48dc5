"""Splitting, tokenizing, cutting and caching of documents."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from launch.datasets import data, tokens
from launch.datasets.about import About
from launch.datasets.data import IGNORE
from launch.datasets.documents import Turn
from launch.datasets.lines import DataError
from launch.datasets.texts import Texts
from launch.datasets.tokens import SPECIAL_IDS

START, END = SPECIAL_IDS[tokens.START], SPECIAL_IDS[tokens.END]
TEXTS = [f'{word} and the {other}' for word in ('fox', 'hound', 'hare', 'owl') for other in ('tree', 'river', 'moon')]
DOCUMENTS = [(Turn(text),) for text in TEXTS]
TALK = (Turn('Name a bird.', 'user'), Turn('The owl.', 'assistant'), Turn('Another?', 'user'), Turn('No.', 'assistant'))


@pytest.fixture(scope='module')
def tokenizer():
    return tokens.train_tokenizer([*DOCUMENTS, TALK], vocab_size=400)


documents = st.lists(st.text(min_size=1, max_size=60).map(lambda text: (Turn(text),)), min_size=1, max_size=30)


@given(documents, st.randoms())
def test_split_is_disjoint_complete_and_does_not_depend_on_the_order(docs, random):
    if len(set(docs)) < 2:
        with pytest.raises(DataError, match='at least 2 different documents'):
            data.split(docs)
        return
    train, held_out = data.split(docs)
    assert train
    assert held_out
    assert not set(train) & set(held_out)
    assert Counter(train) + Counter(held_out) == Counter(docs)
    shuffled = random.sample(docs, len(docs))
    assert data.split(shuffled) == (train, held_out)


def test_about_a_tenth_of_the_text_is_held_out():
    docs = [(Turn(f'document {i} ' * (1 + i % 7)),) for i in range(500)]
    sizes = [sum(len(d[0].text) for d in part) for part in data.split(docs)]
    assert 0.09 < sizes[1] / sum(sizes) <= 0.1


def test_text_comes_back_from_its_tokens_whatever_is_in_it(tokenizer):
    for text in ('The owl.', '  spaces\n\ttabs ', 'žluťoučký 🦉', '<|user|> is just text <|end|>'):
        ids, trained = tokens.encode((Turn(text),), tokenizer)
        assert (ids[0], ids[-1]) == (START, END)
        assert not set(ids[1:-1]) & set(SPECIAL_IDS.values())
        assert tokenizer.decode(ids[1:-1]) == text
        assert trained == [False] + [True] * (len(ids) - 1)


def test_only_what_the_assistant_says_and_its_end_are_labels(tokenizer):
    ids, trained = tokens.encode(TALK, tokenizer)
    kept = [token for token, keep in zip(ids, trained) if keep]
    assert tokenizer.decode(kept, skip_special_tokens=False).split(tokens.END) == ['The owl.', 'No.', '']
    roles = [token for token in ids if token in SPECIAL_IDS.values() and token not in (START, END)]
    assert roles == [SPECIAL_IDS['<|user|>'], SPECIAL_IDS['<|assistant|>']] * 2


@given(st.lists(st.booleans(), min_size=2, max_size=50), st.integers(1, 20))
def test_windows_make_each_token_but_the_first_a_label_exactly_once(trained, length):
    ids = list(range(len(trained)))
    rows = list(data.windows(ids, trained, length))
    assert all(0 < len(inputs) == len(labels) <= length for inputs, labels in rows)
    assert [x for inputs, _ in rows for x in inputs] == ids[:-1]
    assert [y for _, labels in rows for y in labels] == [i if trained[i] else IGNORE for i in ids[1:]]


def test_little_text_gives_a_smaller_vocabulary_without_an_error(tokenizer):
    assert tokens.train_tokenizer(DOCUMENTS[:1], vocab_size=8000).get_vocab_size() < 300
    assert tokenizer.get_vocab_size() <= 400


def test_unigram_loss_is_that_of_smoothed_token_frequencies():
    train, held_out = np.array([0, 0, 0, 1, 2]), np.array([0, 1, 3])
    expected = -sum(math.log((n + 1) / (5 + 4)) for n in (3, 1, 0)) / 3
    assert data.unigram_nats(train, held_out, vocab_size=4) == pytest.approx(expected, rel=1e-12)


def write(tmp_path, *lines):
    path = tmp_path / 'my.jsonl'
    path.write_text('\n'.join(lines))
    return path


def prepare(path, tmp_path, **other):
    return data.prepare(path, **{'vocab_size': 300, 'seq_length': 16, 'cache': tmp_path / 'cache'} | other)


def test_samples_hold_every_document_and_say_how_many_were_cut(tmp_path):
    long = '{"text": "' + 'a long one, ' * 40 + '"}'
    path = write(tmp_path, long, *[f'{{"text": "{text}"}}' for text in TEXTS])
    folder = prepare(path, tmp_path, vocab_size=8000)
    dataset = data.load(folder)
    tokenizer = Tokenizer.from_file(str(folder / 'tokenizer.json'))
    decoded = ''
    for samples in (dataset.train, dataset.held_out):
        assert samples.inputs.shape == samples.labels.shape
        assert samples.inputs.shape[1] == 16
        for labels in samples.labels:
            decoded += tokenizer.decode(labels[labels != IGNORE].tolist(), skip_special_tokens=False)
    assert all(text + tokens.END in decoded for text in [*TEXTS, 'a long one, ' * 40])
    assert '(1 document cut into several)' in dataset.summary
    assert f'{len(dataset.train):,} samples' in dataset.summary


def test_labels_follow_their_inputs(tmp_path):
    path = write(tmp_path, *[f'{{"text": "{text}"}}' for text in TEXTS])
    samples = data.load(prepare(path, tmp_path, seq_length=512)).train
    shifted = samples.labels[:, :-1]
    same = shifted == samples.inputs[:, 1:]
    assert same[shifted != IGNORE].all()


def test_windows_without_a_response_are_left_out_and_counted(tmp_path):
    line = '{"prompt": "' + 'x y z ' * 60 + '%d", "response": "yes"}'
    dataset = data.load(prepare(write(tmp_path, *[line % i for i in range(4)]), tmp_path, vocab_size=270))
    for samples in (dataset.train, dataset.held_out):
        assert ((samples.labels != IGNORE).sum(axis=1) > 0).all()
    assert 'samples without a token of a response left out' in dataset.summary


def test_the_same_data_is_prepared_once_and_other_data_or_settings_anew(tmp_path, monkeypatch):
    path = write(tmp_path, *[f'{{"text": "{text}"}}' for text in TEXTS])
    first = prepare(path, tmp_path)
    monkeypatch.setattr(data, 'train_tokenizer', lambda *args: pytest.fail('trained again'))
    assert prepare(path, tmp_path) == first
    monkeypatch.undo()
    assert prepare(path, tmp_path, vocab_size=301) != first
    assert prepare(path, tmp_path, seq_length=24) != first
    path.write_text(path.read_text() + '\n{"text": "one more"}')
    assert prepare(path, tmp_path) != first


def test_a_tokenizer_that_is_given_is_used_and_still_takes_no_text_for_special_tokens(tmp_path, tokenizer):
    path = write(tmp_path, '{"text": "a <|end|> is just text"}', '{"text": "and another"}')
    folder = prepare(path, tmp_path, texts=Texts(About(1, 8, 1, tokenizer.get_vocab_size(), tokenizer.to_str())))
    dataset = data.load(folder)
    assert dataset.vocab_size == tokenizer.get_vocab_size()
    assert dataset.tokenizer == tokenizer.to_str(pretty=True)
    labels = [set(row.tolist()) for samples in (dataset.train, dataset.held_out) for row in samples.labels]
    assert all(not row & (set(SPECIAL_IDS.values()) - {END}) for row in labels)
    again = tokens.read_tokenizer(dataset.tokenizer)
    assert END not in again.encode('<|end|>').ids


def test_an_interrupted_preparation_leaves_nothing_that_is_taken_for_whole(tmp_path, monkeypatch):
    path = write(tmp_path, *[f'{{"text": "{text}"}}' for text in TEXTS])

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, 'savez', stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(path, tmp_path)
    monkeypatch.undo()
    assert data.load(prepare(path, tmp_path)).vocab_size > 256
