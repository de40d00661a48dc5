"""The pairs of `make demo-dpo`: sentences of Python's language reference, and the same with their words shuffled."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from launch.datasets.data import split
from launch.datasets.documents import Document, python_reference

_PARAGRAPH = re.compile(r'["*A-Z].*[.:]')  # no heading, no code, no grammar
_END = re.compile(r'(?<=[.?!:]) (?=["*A-Z])')
_SENTENCE = re.compile(r'["*A-Z].*[^.]\.')
_WORD = re.compile(r'[("*]*[A-Za-z][A-Za-z’\'-]*[)"*]*[,;:.]?')
WORDS = range(5, 26)
PROMPT_WORDS = 12


class Pair(NamedTuple):
    """The last words of a sentence, the sentence that follows it, and that one with its words shuffled."""

    prompt: str
    chosen: str
    rejected: str


class Material(NamedTuple):
    """Paragraphs to train a language model on, pairs from these, and pairs from documents that neither has seen."""

    text: list[str]
    pairs: list[Pair]
    held_out: list[Pair]


def material() -> Material:
    """All that the language reference gives, in an order that has nothing to do with where it stands there."""
    train, held_out = ([list(paragraphs(document)) for document in part] for part in split(python_reference()[0]))
    text = list(dict.fromkeys(paragraph for document in train for paragraph in document))
    known = {sentence for paragraph in text for sentence in sentences_of(paragraph)}
    return Material(text, pairs_of(train), [p for p in pairs_of(held_out) if p.chosen.strip() not in known])


def paragraphs(document: Document) -> Iterator[str]:
    """The running text of a document, each paragraph in one line."""
    for block in ''.join(turn.text for turn in document).split('\n\n'):
        text = ' '.join(block.split())
        if is_running_text(text):
            yield text


def is_running_text(text: str) -> bool:
    """Whether a paragraph is one of words, of which most are plain."""
    return bool(_PARAGRAPH.fullmatch(text)) and _share_of_words(text) > 0.75


def sentences_of(paragraph: str) -> list[str]:
    """Its sentences."""
    return _END.split(paragraph)


def pairs_of(documents: Iterable[Iterable[str]]) -> list[Pair]:
    """A pair of each sentence of these paragraphs that has another one before it, no sentence twice."""
    found: dict[str, Pair] = {}
    for document in documents:
        sentences = [sentence for paragraph in document for sentence in sentences_of(paragraph)]
        for before, sentence in itertools.pairwise(sentences):
            if _is_plain(sentence):
                prompt = ' '.join(before.split()[-PROMPT_WORDS:])
                found.setdefault(sentence, Pair(prompt, f' {sentence}', f' {shuffled(sentence)}'))
    return sorted(found.values(), key=lambda pair: hashlib.sha256(pair.chosen.encode()).hexdigest())


def shuffled(sentence: str) -> str:
    """Its words in another order, the same on every call. The full stop stays at the end."""
    words = sentence.removesuffix('.').split()
    order = random.Random(sentence)
    mixed = words
    while mixed == words:
        mixed = order.sample(words, len(words))
    return ' '.join(mixed) + '.'


def _is_plain(sentence: str) -> bool:
    return bool(_SENTENCE.fullmatch(sentence)) and len(sentence.split()) in WORDS and _share_of_words(sentence) > 0.75


def _share_of_words(text: str) -> float:
    words = text.split()
    return sum(bool(_WORD.fullmatch(word)) for word in words) / len(words)
