"""Groups of texts: an anchor, a text that belongs to it, and others that do not. docs/embeddings.md: the format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.datasets.about import About
from launch.datasets.kept import keep, kept, split
from launch.datasets.lines import DataError, kind_of, read_lines, text_of
from launch.datasets.texts import Texts

FORMS = (
    '{"anchor": ..., "positive": ..., "negatives": [..., ...]}, all of them texts, with negatives or without; '
    'docs/embeddings.md tells more'
)
HELD_OUT = 256  # groups, at most


@dataclass(frozen=True)
class Groups:
    """`n` groups of texts: `ids[i]` are the tokens of a text, `starts[k]` the number of the text that is the anchor of
    group k; its positive and its negatives follow it. `starts` is `[n + 1]` and ends with the number of texts."""

    ids: list[np.ndarray]
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def texts(self, groups: Iterable[int]) -> list[int]:
        """The numbers of the texts of these groups, one group after the other."""
        return [i for k in groups for i in range(self.starts[k], self.starts[k + 1])]

    def tokens(self, groups: Iterable[int]) -> int:
        """How many tokens these groups have."""
        return sum(len(self.ids[i]) for i in self.texts(groups))


@dataclass(frozen=True)
class TrainAndHeldOut:
    """Groups to train on, and held-out ones, which have no negatives."""

    train: Groups
    held_out: Groups
    summary: str


@dataclass(frozen=True)
class _Group:
    text: str  # of the anchor
    texts: list[list[int]]


def prepare(
    path: Path, about: About, *, held_out: Path | None, seq_length: int, negatives: bool, least: int, cache: Path
) -> Path:
    """The folder in `cache` with the groups of the file as arrays, named after them, made where not yet there.

    `about` is the model to start from, whose tokenizer reads the texts; longer ones are cut at `seq_length`.
    `held_out` is a file of held-out groups; None: they are taken from the same one. `negatives`: each group to train on
    must have some. DataError, which names the file, for one that cannot be used: with bad lines, with fewer than
    `least` groups to train on, or fewer than 2 to compare.
    """
    reader = _Reader(Texts(about), seq_length)
    found = reader.groups(path, negatives)
    if held_out is None:
        parts = split(found, [group.text for group in found], HELD_OUT)
        train, measured = (found, []) if parts is None else parts
    else:
        train, measured = found, reader.groups(held_out, False)
    if len(measured) < 2:
        where = path if held_out is None else held_out
        raise DataError(
            f'{where} gives {len(measured)} held-out groups, and needs 2, to compare them; add more'
            + ('' if held_out else ', or name others by --held-out FILE')
        )
    if len(train) < least:
        raise DataError(f'{path} has {len(train)} groups to train on, fewer than the {least} of one step')
    texts = {'train': [group.texts for group in train], 'held_out': [group.texts[:2] for group in measured]}
    arrays = {f'{part}_{key}': x for part, groups in texts.items() for key, x in _arrays(groups)}
    return keep(cache, 'groups', arrays, {'summary': _summary(path, held_out, texts, reader)})


def load(folder: Path) -> TrainAndHeldOut:
    """The groups that `prepare` wrote."""
    arrays, about = kept(folder)
    train, held_out = (
        Groups(np.split(arrays[f'{part}_ids'], arrays[f'{part}_lengths'].cumsum()[:-1]), arrays[f'{part}_starts'])
        for part in ('train', 'held_out')
    )
    return TrainAndHeldOut(train, held_out, about['summary'])


class _Reader:
    """Reads files of groups, cuts what is too long, and counts that."""

    def __init__(self, texts: Texts, seq_length: int) -> None:
        self.seq_length, self.seen, self.cut = seq_length, 0, 0
        self._texts = texts

    def groups(self, path: Path, negatives: bool) -> list[_Group]:
        """The groups of a file."""
        return read_lines(path, lambda record, _: self._group(record, negatives), 'group', FORMS)

    def _group(self, record: dict[str, Any], negatives: bool) -> _Group:
        for key, loss in (('completion', 'grpo'), ('chosen', 'dpo')):
            if key in record:
                raise DataError(f'has "{key}", which a group does not have; is it for --loss {loss}?')
        anchor, positive = (text_of(record, key) for key in ('anchor', 'positive'))
        others = _negatives(record)
        if negatives and not others:
            raise DataError('has no "negatives", which --hard-negatives takes some from')
        if anchor == positive:
            raise DataError('"anchor" and "positive" are the same, so that there is nothing to learn')
        if positive in others:
            raise DataError('the "positive" stands among the "negatives", too')
        return _Group(anchor, [self._tokens(text) for text in (anchor, positive, *others)])

    def _tokens(self, text: str) -> list[int]:
        ids = self._texts.begin(self._texts.ids(text))
        most = self.seq_length - 1
        self.seen += 1
        self.cut += len(ids) > most
        return self._texts.ended(ids[:most])


def _negatives(record: dict[str, Any]) -> list[str]:
    value = record.get('negatives', [])
    if not isinstance(value, list):
        raise DataError(f'"negatives" must be a list of texts, got {kind_of(value)}')
    named = {f'negatives[{i}]': text for i, text in enumerate(value)}
    return [text_of(named, name) for name in named]


def _arrays(groups: list[list[list[int]]]) -> Iterable[tuple[str, np.ndarray]]:
    texts = [text for group in groups for text in group]
    yield 'ids', np.array([token for text in texts for token in text], dtype=np.int32)
    yield 'lengths', np.array([len(text) for text in texts], dtype=np.int64)
    yield 'starts', np.cumsum([0, *(len(group) for group in groups)], dtype=np.int64)


def _summary(path: Path, held_out: Path | None, texts: dict[str, list[list[list[int]]]], reader: _Reader) -> str:
    groups = [group for part in texts.values() for group in part]
    negatives = [text for group in groups for text in group[2:]]
    anchor, positive = (np.mean([len(group[i]) for group in groups]) for i in (0, 1))
    of_negatives = f', {np.mean(list(map(len, negatives))):.1f} of a negative' if negatives else ''
    train, measured = map(len, texts.values())
    lines = (
        f'data      {path}',
        f'groups    {train:,} to train on, with {len(negatives):,} negatives of their own; {measured:,} held out'
        + (f' from {held_out}' if held_out else ''),
        f'tokens    {anchor:.1f} of an anchor, {positive:.1f} of a positive{of_negatives}; {reader.cut:,} of '
        f'{reader.seen:,} texts cut at --seq-length {reader.seq_length}',
    )
    return '\n'.join(lines)
