"""What has to be known of a model beside its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class About:
    """The model that a file holds. `tokenizer`: the text of its tokenizer.json."""

    layers: int
    hidden_size: int
    heads: int
    vocab_size: int
    tokenizer: str


@dataclass(frozen=True)
class Checkpoint(About):
    """A Hugging Face checkpoint in `folder`. Sequences begin with the ids in `start`, if any, and end with `end`;
    `chat_template` writes conversations, with the texts of special tokens in `special_words`."""

    folder: Path
    start: tuple[int, ...]
    end: int
    chat_template: str
    special_words: tuple[tuple[str, str], ...]
