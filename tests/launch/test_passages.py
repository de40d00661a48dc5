"""The groups of `make demo-embed`."""

import pytest

from launch.datasets import passages
from launch.datasets.documents import Turn, python_reference

TEXT = """The "one" statement
*******************

   one ::= "one"

It is one of two statements.  The other
one is told about below, in a section of its own.

Both of them have a body, which may be empty, as that of a function may.


The other
=========

Too short.
"""
TOPIC = (Turn(TEXT),)


@pytest.fixture(scope='module')
def material():
    return passages.material()


def test_a_passage_has_its_title_and_paragraphs_are_joined_until_there_is_enough():
    assert list(passages.paragraphs(TOPIC)) == [
        (
            'The one statement',
            'It is one of two statements. The other one is told about below, in a section of its own.',
        ),
        ('The one statement', 'Both of them have a body, which may be empty, as that of a function may.'),
        ('The other', 'Too short.'),
    ]
    ((title, sentences),) = passages.passages(TOPIC)
    assert title == 'The one statement'
    assert [sentence.split()[0] for sentence in sentences] == ['It', 'The', 'Both']


def test_an_anchor_is_title_and_sentence_and_its_positive_the_other_sentences():
    sentences = ['It is so.', 'It is ' + 'very ' * 20 + 'so.', 'No.', 'And so on and ' + 'on ' * 20 + 'it goes.']
    found = passages.groups_of('Title', sentences)
    assert [group.anchor for group in found] == [f'Title: {sentences[i]}' for i in (0, 1, 3)]
    assert found[1].positive == f'{sentences[0]} {sentences[2]} {sentences[3]}'


def test_held_out_groups_are_those_of_topics_that_are_not_trained_on(material):
    train, held_out = (' '.join(' '.join(t[0].text.split()) for t in part) for part in
                       passages.split(python_reference()[0]))  # fmt: skip
    text = ' '.join(material.text)
    for group in material.held_out:
        sentence = group.anchor.split(': ', 1)[1]
        assert sentence in held_out
        assert sentence not in text
        assert not any(part in text for part in passages.sentences_of(group.positive))
    for group in material.groups[:50]:
        assert group.anchor.split(': ', 1)[1] in train
        assert all(part in train for part in passages.sentences_of(group.positive))
    assert all(paragraph in train for paragraph in material.text[:50])


def test_there_are_enough_and_no_anchor_twice_nor_a_held_out_title(material):
    assert len(material.groups) > 1000
    assert len(material.held_out) > 30
    anchors = [group.anchor for group in [*material.groups, *material.held_out]]
    assert len(set(anchors)) == len(anchors)
    titles = [group.anchor.split(': ')[0] for group in material.held_out]
    assert len(set(titles)) == len(titles)
    assert all(len(group.positive.split()) >= passages.WORDS for group in [*material.groups, *material.held_out])
