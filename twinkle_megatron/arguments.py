"""Checks of keyword arguments that losses, metrics and the model share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def reject_unknown(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """ValueError that names each key of `given` outside `known`, with the nearest known name.

    `where` is the class or function that was called. The values are not looked at.

    >>> reject_unknown({'redution': 'sum'}, ['reduction', 'chunk_size'], 'CrossEntropyLoss')
    Traceback (most recent call last):
    ValueError: CrossEntropyLoss has no argument 'redution'; did you mean 'reduction'? Known: chunk_size, reduction
    """
    names = sorted(known)
    unknown = [name for name in given if name not in names]
    if unknown:
        first, *others = [f'{name!r}{_suggestion(name, names)}' for name in unknown]
        also = ''.join(f' Nor {other}' for other in others)
        raise ValueError(f'{where} has no argument {first}{also} Known: {", ".join(names) or "none"}')


def _suggestion(name: str, known: list[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f'; did you mean {by_lower[near[0]]!r}?' if near else '.'
