"""Pairs of responses to one prompt, one chosen and one rejected. docs/pairs.md tells the format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.datasets.about import About
from launch.datasets.kept import keep, kept, split
from launch.datasets.lines import DataError, read_lines, text_of
from launch.datasets.responses import Responses
from launch.datasets.texts import Texts

FORMS = '{"prompt": ..., "chosen": ..., "rejected": ...}, all three of them texts; docs/pairs.md tells more'
HELD_OUT = 256  # pairs, at most


@dataclass(frozen=True)
class Pairs:
    """Pairs to train on and held-out ones, their responses in the order chosen₀, rejected₀, chosen₁, …"""

    train: Responses
    held_out: Responses
    summary: str


@dataclass(frozen=True)
class _Pair:
    text: str  # of the prompt
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def prepare(path: Path, about: About, *, held_out: Path | None, seq_length: int, least: int, cache: Path) -> Path:
    """The folder in `cache` with the pairs of the file as arrays, named after them, made where not yet there.

    `about` is the policy to train, whose tokenizer reads the texts. `held_out` is a file of held-out pairs; None: they
    are taken from the same one. DataError, which names the file, for one that cannot be used: with bad lines, or with
    fewer than `least` pairs to train on.
    """
    texts = Texts(about)
    all_of_them = _read(path, texts)
    long = _Long(seq_length)
    if held_out is None:
        train, measured = _split(long.left_out(all_of_them), path, long)
    else:
        train, measured = long.left_out(all_of_them), long.left_out(_read(held_out, texts))
    if len(train) < least:
        raise DataError(f'{path} has {len(train)} pairs to train on, fewer than the {least} of one step{long}')
    if not measured:
        raise DataError(f'{held_out} has no pair to measure by{long}')
    parts = (('train', train), ('held_out', measured))
    arrays = {f'{name}_{key}': x for name, part in parts for key, x in _arrays(part)}
    return keep(cache, 'pairs', arrays, {'summary': _summary(path, held_out, train, measured, long)})


def load(folder: Path) -> Pairs:
    """The pairs that `prepare` wrote."""
    arrays, about = kept(folder)
    train, held_out = (
        Responses(
            np.split(arrays[f'{part}_ids'], arrays[f'{part}_lengths'].cumsum()[:-1]), arrays[f'{part}_prompt_lengths']
        )
        for part in ('train', 'held_out')
    )
    return Pairs(train, held_out, about['summary'])


def _read(path: Path, texts: Texts) -> list[_Pair]:
    def read(record: dict[str, Any], _: int) -> _Pair:
        if 'completion' in record:
            raise DataError('has a "completion" as rollouts have; train on these with --loss grpo')
        prompt, chosen, rejected = (text_of(record, key, blank=True) for key in ('prompt', 'chosen', 'rejected'))
        if chosen == rejected:
            raise DataError('"chosen" and "rejected" are the same, so that none is preferred')
        ids = [texts.ids(text) for text in (prompt, chosen, rejected)]
        return _Pair(prompt, texts.begin(ids[0]), texts.ended(ids[1]), texts.ended(ids[2]))

    return read_lines(path, read, 'pair', FORMS)


class _Long:
    """Leaves out pairs that are too long, and counts them; as text what there is to say of them."""

    def __init__(self, seq_length: int) -> None:
        self.count, self._seq_length = 0, seq_length

    def left_out(self, pairs: list[_Pair]) -> list[_Pair]:
        """The other pairs."""
        kept = [pair for pair in pairs if pair.length <= self._seq_length]
        self.count += len(pairs) - len(kept)
        return kept

    def __str__(self) -> str:
        return f'; {self.count:,} left out, longer than --seq-length {self._seq_length}' if self.count else ''


def _split(pairs: list[_Pair], path: Path, long: _Long) -> tuple[list[_Pair], list[_Pair]]:
    """Pairs to train on and held-out ones, by a hash of the prompt: all pairs of one prompt on one side."""
    parts = split(pairs, [pair.text for pair in pairs], HELD_OUT)
    if parts is None:
        raise DataError(
            f'{path} has {len(pairs[:1])} different prompts short enough to use, and needs 2, one of them to hold out; '
            f'or name other pairs by --held-out FILE{long}'
        )
    return parts


def _arrays(pairs: list[_Pair]) -> Iterable[tuple[str, np.ndarray]]:
    sides = [(pair.prompt, response) for pair in pairs for response in (pair.chosen, pair.rejected)]
    yield 'ids', np.array([token for side in sides for part in side for token in part], dtype=np.int32)
    yield 'lengths', np.array([len(prompt) + len(response) for prompt, response in sides], dtype=np.int64)
    yield 'prompt_lengths', np.array([len(prompt) for prompt, _ in sides], dtype=np.int64)


def _summary(path: Path, held_out: Path | None, train: list[_Pair], kept: list[_Pair], long: _Long) -> str:
    everything = train + kept
    prompt, chosen, rejected = (
        np.mean([len(getattr(pair, name)) for pair in everything]) for name in ('prompt', 'chosen', 'rejected')
    )
    where = '' if held_out is None else f' from {held_out}'
    lines = (
        f'data      {path}',
        f'pairs     {len(train):,} to train on, {len(kept):,} held out{where}{long}',
        f'tokens    {prompt:.1f} of a prompt, {chosen:.1f} of a chosen response, {rejected:.1f} of a rejected one',
    )
    return '\n'.join(lines)
