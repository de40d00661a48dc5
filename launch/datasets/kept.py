"""What a file of data becomes: arrays in a folder named after them, one part of them held out."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from launch.datasets.data import hold_out, made_whole

HELD_OUT_SHARE = 0.1
T = TypeVar('T')


def keep(cache: Path, name: str, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> Path:
    """The folder in `cache` with these arrays and what is to be said about them, made where not yet there."""
    digest = hashlib.sha256(json.dumps(about).encode() + b''.join(array.tobytes() for array in arrays.values()))
    folder = cache / f'{name}-{digest.hexdigest()[:16]}'
    if not folder.exists():
        with made_whole(folder) as made:
            np.savez(made / 'arrays.npz', allow_pickle=False, **arrays)
            (made / 'about.json').write_text(json.dumps(about))
    return folder


def kept(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the rest that `keep` wrote."""
    with np.load(folder / 'arrays.npz') as file:
        arrays = dict(file)
    return arrays, json.loads((folder / 'about.json').read_text())


def split(items: Sequence[T], texts: Sequence[str], most: int) -> tuple[list[T], list[T]] | None:
    """Items to train on and held-out ones, a tenth and at most `most`, by a hash of their texts: whatever their order,
    all of one text on one side. None where all texts are the same."""
    keys = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    sizes = dict(sorted(Counter(keys).items()))
    if len(sizes) < 2:
        return None
    budget = min(HELD_OUT_SHARE * len(items), most)
    chosen = hold_out(sizes, budget, budget)
    train, held_out = ([x for x, key in zip(items, keys) if (key in chosen) is held] for held in (False, True))
    return train, held_out
