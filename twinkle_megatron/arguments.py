"""Checks of keyword arguments that losses, metrics and the model share."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ALIASES: Mapping[str, tuple[str, ...]] = {
    'epsilon': ('clip_range',),
    'epsilon_high': ('clip_range_high',),
    'tau': ('tau_pos', 'tau_neg'),
}
"""Twinkle's other names of constructor arguments, and the arguments that each of them sets."""


def checked_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that knows `ALIASES`, and refuses keywords that neither it nor a class above or below it names.

    It ends in `**unknown`, which it never receives.
    """
    own = [p.name for p in inspect.signature(init).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        by_position = own[: len(args)]
        for alias, names in ALIASES.items():
            if alias in given and alias not in own and set(names) <= set(own):
                value = given.pop(alias)
                for name in names:
                    if name in given or name in by_position:
                        raise ValueError(f'{alias} is another name of {name}: give one of them')
                    given[name] = value
        unknown = {name: value for name, value in given.items() if name not in own}
        if unknown:
            reject_unknown(unknown, _argument_names(type(self)), type(self).__name__)
        init(self, *args, **given)

    return checked


def _argument_names(cls: type) -> set[str]:
    """What the constructors of a class and its bases take."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        if '__init__' in vars(base):
            parameters = list(inspect.signature(vars(base)['__init__']).parameters.values())[1:]
            names |= {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    return names | {alias for alias, targets in ALIASES.items() if set(targets) <= names}


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
