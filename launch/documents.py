"""Documents to train on: Python's own reference text, or the lines of a person's JSON-lines file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = ('system', 'user', 'assistant', 'tool')
FORMS = '{"text": ...}, {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "response": ...}'
SHOWN_BAD_LINES = 5


class DataError(ValueError):
    """The training data cannot be used; the message is written for the person who made it."""


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
    documents: list[Document] = []
    bad: list[str] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            documents.append(_document(line))
        except DataError as e:
            bad.append(f'{path}, line {number}: {e}')
    if bad:
        more = [f'... and {len(bad) - SHOWN_BAD_LINES} more bad lines'] if len(bad) > SHOWN_BAD_LINES else []
        raise DataError('\n'.join(bad[:SHOWN_BAD_LINES] + more + [f'Each line must be {FORMS}.']))
    if not documents:
        raise DataError(f'{path} has no line with a document; each line must be {FORMS}')
    return documents


def _lines(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        raise DataError(f'{path} is a folder; DATA must name one file of JSON lines')
    try:
        with path.open('rb') as file:
            for i, line in enumerate(file):
                yield line.removeprefix(b'\xef\xbb\xbf') if i == 0 else line
    except FileNotFoundError:
        raise DataError(f'{path} does not exist (looked from {Path.cwd()})') from None
    except OSError as e:
        raise DataError(f'{path} cannot be read: {e.strerror}') from None


def _document(line: bytes) -> Document:
    try:
        record = json.loads(line.decode('utf-8'))
    except UnicodeDecodeError as e:
        raise DataError(f'not UTF-8: byte {line[e.start]:#04x} at column {e.start + 1}') from None
    except json.JSONDecodeError as e:
        raise DataError(f'not JSON: {e.msg} at column {e.colno}') from None
    except RecursionError:
        raise DataError('not a document: JSON nested too deeply') from None
    if not isinstance(record, dict):
        raise DataError(f'must be a JSON object, got {_kind(record)}')
    forms = [key for key in ('text', 'messages', 'prompt', 'response') if key in record]
    if forms == ['text']:
        return (Turn(_text(record, 'text')),)
    if forms == ['messages']:
        return _conversation(record['messages'])
    if forms == ['prompt', 'response']:
        return (Turn(_text(record, 'prompt'), 'user'), Turn(_text(record, 'response'), 'assistant'))
    if forms in (['prompt'], ['response']):
        other = 'response' if forms == ['prompt'] else 'prompt'
        raise DataError(f'has "{forms[0]}" but no "{other}"')
    if forms:
        raise DataError(f'mixes the forms: has {_quoted(forms)}; keep one of them')
    keys = _quoted(list(record)[:6]) if record else 'no key'
    raise DataError(f'has none of the keys "text", "messages", "prompt" and "response", only {keys}')


def _conversation(messages: Any) -> Document:
    if not isinstance(messages, list) or not messages:
        raise DataError(f'"messages" must be a list of messages, got {_kind(messages)}')
    turns = []
    for i, message in enumerate(messages, start=1):
        where = f'message {i}: '
        if not isinstance(message, dict):
            raise DataError(f'{where}must be an object with "role" and "content", got {_kind(message)}')
        role = message.get('role')
        if role not in ROLES:
            raise DataError(f'{where}"role" must be one of {", ".join(ROLES)}, got {json.dumps(role)[:40]}')
        turns.append(Turn(_text(message, 'content', where), role))
    if not any(turn.trained for turn in turns):
        raise DataError('has no message of the assistant, so nothing to train on')
    return tuple(turns)


def _text(record: dict[str, Any], key: str, where: str = '') -> str:
    if key not in record:
        raise DataError(f'{where}has no "{key}"')
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f'{where}"{key}" must be a string, got {_kind(value)}')
    if not value.strip():
        raise DataError(f'{where}"{key}" is empty')
    try:
        value.encode('utf-8')
    except UnicodeEncodeError as e:
        raise DataError(f'{where}"{key}" holds half a surrogate pair at character {e.start + 1}') from None
    return value


def _kind(value: Any) -> str:
    if value is None:
        return 'null'
    if value == []:
        return 'an empty list'
    names = {bool: 'true or false', int: 'a number', float: 'a number', str: 'a string', list: 'a list'}
    return names.get(type(value), 'an object')


def _quoted(keys: list[str]) -> str:
    return ', '.join(json.dumps(key)[:42] for key in keys)
