"""Checks of keyword arguments that losses, metrics and the model share."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ALIASES: Mapping[str, tuple[str, ...]] = {
    'epsilon': ('clip_range',),
    'epsilon_high': ('clip_range_high',),
    'tau': ('tau_pos', 'tau_neg'),
    'bc_coef': ('cpo_alpha',),
    'ORPOLoss.lambda_orpo': ('beta',),
}
"""Twinkle's other names of constructor arguments, and the arguments that each of them sets; of every class that has
these, or of the class that is named."""


def checked_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that knows `ALIASES`, and refuses keywords that neither it nor a class above or below it names.

    It ends in `**unknown`, which it never receives.
    """
    own = [p.name for p in inspect.signature(init).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        if len(args) == 2 and all(isinstance(one, Mapping) for one in args):
            name = type(self).__name__
            raise ValueError(
                f'{name} must be made before it is called, {name}(...), but the class was called with a micro-batch; '
                f"twinkle-kit's set_loss makes only classes of its own: give it twinkle_megatron.inside_twinkle.{name}"
            )
        by_position = own[: len(args)]
        for alias, names in _aliases_of(type(self)).items():
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


def _aliases_of(cls: type) -> dict[str, tuple[str, ...]]:
    classes = {base.__name__ for base in cls.__mro__}
    split = ((*key.rpartition('.')[::2], names) for key, names in ALIASES.items())
    return {alias: names for owner, alias, names in split if not owner or owner in classes}


def _argument_names(cls: type) -> set[str]:
    """What the constructors of a class and its bases take."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        if '__init__' in vars(base):
            parameters = list(inspect.signature(vars(base)['__init__']).parameters.values())[1:]
            names |= {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    return names | {alias for alias, targets in _aliases_of(cls).items() if set(targets) <= names}


class Keywords(frozenset[str]):
    """Names of keywords; `takes_any`: and whatever else."""

    takes_any = False


def keywords_of(loss: Callable[..., Any]) -> Keywords:
    """The keywords of a loss `(inputs, outputs, **keywords)`."""
    try:
        parameters = list(inspect.signature(loss).parameters.values())
    except ValueError:  # a builtin without a signature
        parameters = []
    found = Keywords(p.name for p in parameters[2:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
    found.takes_any = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
    return found


def by_name(name: str, classes: Mapping[str, type], kind: str) -> type:
    """The class of that name: 'GRPOLoss', or 'grpo', 'dr_grpo', 'chunked-cross-entropy' for short. ValueError for an
    unknown one, with the nearest known name.

    `classes` by their names; `kind` is what they are: 'loss' or 'metric'.
    """
    short = {_short(known): known for known in classes}
    known = name if name in classes else short.get(_short(name))
    if known is None:
        names = sorted(classes)
        raise ValueError(f'there is no {kind} {name!r}{_suggestion(name, names)} Known: {", ".join(names)}')
    return classes[str(known)]


def _short(name: str) -> str:
    plain = re.sub(r'[-_\s]', '', name).lower()
    return plain.removesuffix('loss').removesuffix('metric') or plain


def above_0(name: str, value: Any) -> Any:
    """`value`; ValueError unless it is a finite number > 0."""
    if not _is_number(value) or not value > 0:
        raise ValueError(f'{name} must be a finite number > 0, got {value!r}')
    return value


def at_least_1(name: str, value: Any) -> Any:
    """`value`; ValueError unless it is a whole number >= 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f'{name} must be a whole number of at least 1, got {value!r}')
    return value


def at_least_0(name: str, value: Any) -> Any:
    """`value`; ValueError unless it is a finite number >= 0."""
    if not _is_number(value) or not value >= 0:
        raise ValueError(f'{name} must be a finite number >= 0, got {value!r}')
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


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
