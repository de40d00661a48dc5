"""A check before training: layout, versions, packages, machine and network. `python -m twinkle_megatron.doctor`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .examine import check, require
    from .layout import Layout
    from .report import Line, Report

__all__ = ['Layout', 'Line', 'Report', 'check', 'require']

_WHERE = {'Layout': 'layout', 'Line': 'report', 'Report': 'report', 'check': 'examine', 'require': 'examine'}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f'.{_WHERE[name]}', __name__), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
