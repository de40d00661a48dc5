"""Files of JSON lines that a person made: one object a line, and every bad line named with its number and fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

SHOWN_BAD_LINES = 5
T = TypeVar('T')


class DataError(ValueError):
    """The training data cannot be used; the message is written for the person who made it."""


def read_lines(path: Path, read: Callable[[dict[str, Any], int], T], noun: str, forms: str) -> list[T]:
    """What `read(object, line number)` makes of each line of the file, in order; empty lines are skipped.

    DataError for a file that cannot be read or holds no line, and one that names the first lines for which `read`
    raised DataError and counts the others. `noun` says what a line is, `forms` what it must look like.
    """
    found: list[T] = []
    bad: list[str] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            found.append(read(_object(line, noun), number))
        except DataError as e:
            bad.append(f'{path}, line {number}: {e}')
    if bad:
        more = [f'... and {len(bad) - SHOWN_BAD_LINES} more bad lines'] if len(bad) > SHOWN_BAD_LINES else []
        raise DataError('\n'.join(bad[:SHOWN_BAD_LINES] + more + [f'Each line must be {forms}.']))
    if not found:
        raise DataError(f'{path} has no line with a {noun}; each line must be {forms}')
    return found


def text_of(record: dict[str, Any], key: str, where: str = '', blank: bool = False) -> str:
    """The text under `key`, of more than white space unless `blank`. DataError where there is none; `where` begins its
    message."""
    if key not in record:
        raise DataError(f'{where}has no "{key}"')
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f'{where}"{key}" must be a string, got {kind_of(value)}')
    if not (value if blank else value.strip()):
        raise DataError(f'{where}"{key}" is empty')
    try:
        value.encode('utf-8')
    except UnicodeEncodeError as e:
        raise DataError(f'{where}"{key}" holds half a surrogate pair at character {e.start + 1}') from None
    return value


def kind_of(value: Any) -> str:
    """What a JSON value is, for a message."""
    if value is None:
        return 'null'
    if value == []:
        return 'an empty list'
    names = {bool: 'true or false', int: 'a number', float: 'a number', str: 'a string', list: 'a list'}
    return names.get(type(value), 'an object')


def quoted(keys: list[str]) -> str:
    """Keys, for a message."""
    return ', '.join(json.dumps(key)[:42] for key in keys)


def _lines(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        raise DataError(f'{path} is a folder; it must be one file of JSON lines')
    try:
        with path.open('rb') as file:
            for i, line in enumerate(file):
                yield line.removeprefix(b'\xef\xbb\xbf') if i == 0 else line
    except FileNotFoundError:
        raise DataError(f'{path} does not exist (looked from {Path.cwd()})') from None
    except OSError as e:
        raise DataError(f'{path} cannot be read: {e.strerror}') from None


def _object(line: bytes, noun: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode('utf-8'))
    except UnicodeDecodeError as e:
        raise DataError(f'not UTF-8: byte {line[e.start]:#04x} at column {e.start + 1}') from None
    except json.JSONDecodeError as e:
        raise DataError(f'not JSON: {e.msg} at column {e.colno}') from None
    except RecursionError:
        raise DataError(f'not a {noun}: JSON nested too deeply') from None
    except ValueError as e:  # a number of thousands of digits
        raise DataError(f'not JSON: {e}') from None
    if not isinstance(record, dict):
        raise DataError(f'must be a JSON object, got {kind_of(record)}')
    return record
