"""The pairs of `make demo-dpo`."""

from collections import Counter

import pytest

from launch.datasets import sentences
from launch.datasets.data import split
from launch.datasets.documents import python_reference


@pytest.fixture(scope='module')
def material():
    return sentences.material()


def test_rejected_are_the_same_words_in_another_order(material):
    for pair in [*material.pairs, *material.held_out]:
        assert pair.chosen != pair.rejected
        chosen, rejected = (Counter(text.removesuffix('.').split()) for text in (pair.chosen, pair.rejected))
        assert chosen == rejected
        assert pair.rejected.endswith('.')


def test_sentences_stand_in_the_text_behind_their_prompts(material):
    everything = ' '.join(' '.join(d[0].text.split()) for d in python_reference()[0])
    for pair in material.held_out[:50]:
        assert pair.chosen in everything
        assert pair.prompt in everything


def test_held_out_sentences_come_from_held_out_documents_and_stand_nowhere_else(material):
    train, held_out = (' '.join(' '.join(d[0].text.split()) for d in part) for part in split(python_reference()[0]))
    assert all(pair.chosen in held_out for pair in material.held_out)
    text = '\n'.join(material.text)
    assert not any(pair.chosen in text for pair in material.held_out)
    assert all(pair.chosen in train for pair in material.pairs[:50])


def test_there_are_enough_and_no_sentence_twice(material):
    assert len(material.pairs) > 1000
    assert len(material.held_out) > 100
    chosen = [pair.chosen for pair in [*material.pairs, *material.held_out]]
    assert len(set(chosen)) == len(chosen)


def test_words_are_shuffled_the_same_way_on_every_call():
    assert sentences.shuffled('One of two things.') == sentences.shuffled('One of two things.') != 'One of two things.'
    assert sentences.shuffled('A b.') == 'b A.'
