"""Means with their intervals."""

from __future__ import annotations

import numpy as np

INTERVAL = 1.96
"""Standard errors on both sides of a mean: an interval of 95%."""

WHEN = ('before', 'after')
Interval = dict[str, float]


def interval(values: np.ndarray) -> Interval:
    """The mean, and 1.96 standard errors of it."""
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return {'mean': float(values.mean()), 'plus_or_minus': INTERVAL * spread / len(values) ** 0.5}


def compared(before: np.ndarray, after: np.ndarray) -> dict[str, Interval]:
    """Intervals before, after, and of the difference that each value has made."""
    return {'before': interval(before), 'after': interval(after), 'difference': interval(after - before)}


def as_text(of: Interval, sign: bool = False, digits: int = 3) -> str:
    """`0.123 ± 0.045`"""
    mean = f'{of["mean"]:+.{digits}f}' if sign else f'{of["mean"]:.{digits}f}'
    return f'{mean} ± {of["plus_or_minus"]:.{digits}f}'


def row(name: str, of: dict[str, Interval], width: int = 11, digits: int = 3) -> str:
    """A line of a table: the name, before, after, difference."""
    before, after, more = (of[key] for key in (*WHEN, 'difference'))
    return (
        f'{name:{width}}{as_text(before, digits=digits):>15}  {as_text(after, digits=digits):>15}  '
        f'{as_text(more, True, digits):>16}'
    )


def head(width: int = 11) -> str:
    """The line above such lines."""
    return f'{"":{width}}{"before":>15}  {"after":>15}  {"difference":>16}'
