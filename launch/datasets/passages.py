"""The groups of `make demo-embed`: title and first sentence of a section of Python's language reference, and the body.

To have more to train on, every passage of the other topics gives some groups, with others of its sentences, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from launch.datasets.data import hold_out
from launch.datasets.documents import Document, python_reference
from launch.datasets.sentences import is_running_text, sentences_of

_HEADING = re.compile(r'\s*(\S.*)\n([*=~^"-])\2+\s*')
HELD_OUT_SHARE = 0.2
WORDS = 20  # of a positive, at least
ANCHORS = 3  # of a passage that is trained on, at most: its first sentence, and then others


class Group(NamedTuple):
    """A title and a sentence, and the sentences around that."""

    anchor: str
    positive: str


class Material(NamedTuple):
    """Paragraphs to train a language model on, groups from these, and groups from topics that neither has seen."""

    text: list[str]
    groups: list[Group]
    held_out: list[Group]


def material() -> Material:
    """All that the language reference gives, in an order that has nothing to do with where it stands there."""
    train, held_out = split(python_reference()[0])
    text = list(dict.fromkeys(paragraph for topic in train for _, paragraph in paragraphs(topic)))
    known = {sentence for paragraph in text for sentence in sentences_of(paragraph)}
    sections: dict[str, list[str]] = {}
    for title, sentences in _passages_of(held_out):
        if not known & set(sentences):
            sections.setdefault(title, sentences)
    groups = [group for passage in _passages_of(train) for group in groups_of(*passage)[:ANCHORS]]
    return Material(text, _mixed(groups), _mixed(groups_of(*section)[0] for section in sections.items()))


def split(topics: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Topics to train on and held-out ones, a fifth of the text, of which none is long."""
    by_hash = {hashlib.sha256(topic[0].text.encode()).hexdigest(): topic for topic in topics}
    sizes = {key: len(by_hash[key][0].text) for key in sorted(by_hash)}
    budget = HELD_OUT_SHARE * sum(sizes.values())
    chosen = hold_out(sizes, budget, budget / 4)
    train, held_out = ([by_hash[key] for key in sizes if (key in chosen) is held] for held in (False, True))
    return train, held_out


def paragraphs(topic: Document) -> Iterator[tuple[str, str]]:
    """The running text of a topic, each paragraph in one line, with the title that it stands under."""
    title = ''
    for block in topic[0].text.split('\n\n'):
        heading = _HEADING.match(block)
        if heading:
            title = heading[1].replace('"', '')
        elif is_running_text(text := ' '.join(block.split())):
            yield title, text


def passages(topic: Document) -> Iterator[tuple[str, list[str]]]:
    """Titles, and under each the sentences of one paragraph after the other; paragraphs that go on for too few words
    after their first sentence are joined with the next ones."""
    at, sentences = '', []
    for title, paragraph in paragraphs(topic):
        if title != at:
            at, sentences = title, []
        sentences = [*sentences, *sentences_of(paragraph)]
        if _words(sentences[1:]) >= WORDS:
            yield title, sentences
            sentences = []


def groups_of(title: str, sentences: list[str]) -> list[Group]:
    """With each sentence as the anchor, unless it or the others are too short."""
    rests = [(sentence, sentences[:i] + sentences[i + 1 :]) for i, sentence in enumerate(sentences)]
    return [
        Group(f'{title}: {sentence}', ' '.join(rest))
        for i, (sentence, rest) in enumerate(rests)
        if i == 0 or (_words([sentence]) >= 4 and _words(rest) >= WORDS)
    ]


def _passages_of(topics: Iterable[Document]) -> Iterator[tuple[str, list[str]]]:
    return (passage for topic in topics for passage in passages(topic))


def _mixed(groups: Iterable[Group]) -> list[Group]:
    by_anchor = {group.anchor: group for group in groups}
    return sorted(by_anchor.values(), key=lambda group: hashlib.sha256(group.anchor.encode()).hexdigest())


def _words(sentences: list[str]) -> int:
    return sum(len(sentence.split()) for sentence in sentences)
