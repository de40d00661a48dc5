"""Documents to train on: Python's own reference text, or the lines of a person's JSON-lines file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.datasets.lines import DataError, kind_of, quoted, read_lines, text_of

ROLES = ('system', 'user', 'assistant', 'tool')
FORMS = '{"text": ...}, {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "response": ...}'


@dataclass(frozen=True)
class Turn:
    """A stretch of text. `role` is None for running text; only text and the assistant's turns are trained on."""

    text: str
    role: str | None = None

    @property
    def trained(self) -> bool:
        return self.role in (None, 'assistant')


Document = tuple[Turn, ...]


def python_reference() -> tuple[list[Document], str]:
    """The language reference behind Python's `help()`, and a line that says what it is.

    Some topics are excerpts of longer ones. They are left out, so that nothing held out was also trained on.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            'this Python has no pydoc_data.topics, the text of the demo; use another Python, or train on a file of '
            'your own: DATA=my.jsonl make demo'
        ) from None
    seen: set[str] = set()
    documents: list[Document] = []
    for text in sorted(topics.values(), key=lambda text: (-len(text), text)):
        paragraphs = [' '.join(p.split()) for p in text.split('\n\n')]
        known = sum(len(p) for p in paragraphs if p in seen)
        if known <= sum(map(len, paragraphs)) / 2:
            documents.append((Turn(text),))
        seen.update(paragraphs)
    version = f'{sys.version_info.major}.{sys.version_info.minor}'
    left_out = len(topics) - len(documents)
    return documents, f'the language reference of Python {version} ({left_out} excerpts of longer topics left out)'


def read_documents(path: Path) -> list[Document]:
    """The documents of a JSON-lines file, one a line; empty lines are skipped.

    DataError for a file that cannot be read, and one that names the first bad lines and counts the others.
    """
    return read_lines(path, lambda record, _: _document(record), 'document', FORMS)


def _document(record: dict[str, Any]) -> Document:
    if 'completion' in record:
        raise DataError('has a "completion" as rollouts have; train on these with --loss grpo')
    if 'chosen' in record and 'rejected' in record:
        raise DataError('has "chosen" and "rejected" as pairs have; train on these with --loss dpo')
    if 'anchor' in record:
        raise DataError('has an "anchor" as groups of texts have; train on these with --loss infonce')
    if 'topk_logprobs' in record:
        raise DataError('has "topk_logprobs" of a teacher; train on these with --loss gkd, without --teacher-weights')
    forms = [key for key in ('text', 'messages', 'prompt', 'response') if key in record]
    if forms == ['text']:
        return (Turn(text_of(record, 'text')),)
    if forms == ['messages']:
        return _conversation(record['messages'])
    if forms == ['prompt', 'response']:
        return (Turn(text_of(record, 'prompt'), 'user'), Turn(text_of(record, 'response'), 'assistant'))
    if forms in (['prompt'], ['response']):
        other = 'response' if forms == ['prompt'] else 'prompt'
        raise DataError(f'has "{forms[0]}" but no "{other}"')
    if forms:
        raise DataError(f'mixes the forms: has {quoted(forms)}; keep one of them')
    keys = quoted(list(record)[:6]) if record else 'no key'
    raise DataError(f'has none of the keys "text", "messages", "prompt" and "response", only {keys}')


def _conversation(messages: Any) -> Document:
    if not isinstance(messages, list) or not messages:
        raise DataError(f'"messages" must be a list of messages, got {kind_of(messages)}')
    turns = []
    for i, message in enumerate(messages, start=1):
        where = f'message {i}: '
        if not isinstance(message, dict):
            raise DataError(f'{where}must be an object with "role" and "content", got {kind_of(message)}')
        role = message.get('role')
        if role not in ROLES:
            raise DataError(f'{where}"role" must be one of {", ".join(ROLES)}, got {json.dumps(role)[:40]}')
        turns.append(Turn(text_of(message, 'content', where), role))
    if not any(turn.trained for turn in turns):
        raise DataError('has no message of the assistant, so nothing to train on')
    return tuple(turns)
