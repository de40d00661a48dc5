"""Conversations as the chat template of a Hugging Face checkpoint writes them."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from launch.datasets.about import Checkpoint
from launch.datasets.documents import Document
from launch.datasets.lines import DataError
from twinkle_megatron.megatron.hf_config import package


class Template:
    """Writes conversations, and finds in them what the assistant says, with the end of its turn."""

    def __init__(self, about: Checkpoint) -> None:
        self._tokenizer = Tokenizer.from_str(about.tokenizer)
        self._tokenizer.encode_special_tokens = False  # a template writes them as text
        self._template, self._words = about.chat_template, dict(about.special_words)

    def encode(self, document: Document) -> tuple[list[int], list[bool]]:
        """Token ids, and which are trained on.

        An earlier answer that the template writes otherwise once more messages follow, as templates do that drop
        thoughts, is not trained on; the last one always is.
        """
        messages = [{'role': turn.role, 'content': turn.text} for turn in document]
        whole, parts, at = self._written(messages), [], 0
        last = max(i for i, turn in enumerate(document) if turn.role == 'assistant')
        for i, turn in enumerate(document):
            if turn.role != 'assistant':
                continue
            before, after = self._written(messages[:i], True), self._written(messages[: i + 1])
            if after.startswith(before) and whole.startswith(after) and at <= len(before):
                parts += [(whole[at : len(before)], False), (whole[len(before) : len(after)], True)]
                at = len(after)
            elif i == last:
                raise DataError(
                    'has an answer that the chat template of the model does not write after the prompt for it, so it '
                    'cannot be told where it begins; give texts'
                )
        pairs = [(token, trained) for text, trained in [*parts, (whole[at:], False)] for token in self._ids(text)]
        return [token for token, _ in pairs], [trained and i > 0 for i, (_, trained) in enumerate(pairs)]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _written(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        if not messages:
            return ''
        templates = package('transformers.utils.chat_template_utils')
        try:
            texts, _ = templates.render_jinja_template(
                conversations=[messages],
                chat_template=self._template,
                add_generation_prompt=prompt,
                **self._words,
            )
        except Exception as error:  # of jinja, or what a template raises
            raise DataError(f'has a conversation that the chat template of the model refuses: {error}') from None
        return texts[0]
