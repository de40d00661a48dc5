"""How texts become token ids: as `tokens.py` trains tokenizers, or as a Hugging Face checkpoint has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launch.datasets.about import About, Checkpoint
from launch.datasets.chat import Template
from launch.datasets.documents import Document
from launch.datasets.lines import DataError
from launch.datasets.tokens import END, SPECIAL_IDS, START, encode, read_tokenizer


class Texts:
    """The tokenizer of a model, and the ids that stand around a text.

    `key` names all that it does, `vocab_size` says how many ids the model has, and `name` what the tokenizer is.
    """

    def __init__(self, about: About) -> None:
        self.vocab_size = about.vocab_size
        self.tokenizer = read_tokenizer(about.tokenizer)
        self._template: Template | None = None
        self._start, self.end = [SPECIAL_IDS[START]], [SPECIAL_IDS[END]]
        self.is_own = not isinstance(about, Checkpoint)
        self.key, self.name = about.tokenizer, 'byte-level BPE'
        if isinstance(about, Checkpoint):
            self.key, self.name = repr(replace(about, folder=Path())), f'tokenizer of {about.folder}'
            self._start, self.end = list(about.start), [about.end]
            self.tokenizer.encode_special_tokens = False  # as everybody has it who uses that tokenizer
            self._template = Template(about) if about.chat_template else None

    def ids(self, text: str) -> list[int]:
        """The ids of a text alone. What looks like a special token is text, but to a checkpoint's tokenizer is one."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def begin(self, ids: list[int]) -> list[int]:
        """A sequence that begins with these ids. It is never empty: its first token has to be told by something."""
        return (ids if self._start and ids[:1] == self._start else [*self._start, *ids]) or self.end

    def ended(self, ids: list[int]) -> list[int]:
        """These ids and the end of a text, where they have none."""
        return ids if ids[-1:] == self.end else [*ids, *self.end]

    def document(self, document: Document) -> tuple[list[int], list[bool]]:
        """Token ids, and which are trained on: running text, or what the assistant says and the end of its turn."""
        if self.is_own:
            return encode(document, self.tokenizer)
        if document[0].role is None:
            ids = self.ended(self.begin(self.ids(document[0].text)))
            return ids, [False, *[True] * (len(ids) - 1)]
        if self._template is not None:
            return self._template.encode(document)
        if [turn.role for turn in document] != ['user', 'assistant']:
            raise DataError(
                'has a conversation, and the tokenizer of the model has no chat template to write it with; give texts, '
                'or a prompt and a response'
            )
        prompt, response = (self.ids(turn.text) for turn in document)
        prompt, response = self.begin(prompt), self.ended(response)
        return [*prompt, *response], [False] * len(prompt) + [True] * len(response)
