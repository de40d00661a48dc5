"""A file that is there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def whole_file(path: Path, mode: str = 'w') -> Iterator[IO[Any]]:
    """A file to write to, text in UTF-8 or bytes by `mode`, which becomes `path` at the end: an interrupted run leaves
    the one that was there before."""
    aside = path.with_name(f'.{path.name}.{os.getpid()}.part')
    try:
        with aside.open(mode, encoding=None if 'b' in mode else 'utf-8') as file:
            yield file
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
