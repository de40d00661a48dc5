"""Documents become samples: split into train and held-out, a BPE vocabulary, rows of token ids and shifted labels."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from launch.datasets.documents import Document, python_reference, read_documents
from launch.datasets.lines import DataError
from launch.datasets.texts import Texts
from launch.datasets.tokens import END, SPECIAL_IDS, encode, train_tokenizer

Encode = Callable[[Document], tuple[list[int], list[bool]]]
"""The token ids of a document, and which are trained on."""
IGNORE = -100
HELD_OUT_SHARE, HELD_OUT_CHARACTERS, HELD_OUT_SAMPLES = 0.1, 40_000, 128  # the smallest of the three limits holds
FORMAT = 1  # raise it when the same documents would give other samples: the old ones are then made anew


@dataclass(frozen=True)
class Samples:
    """`inputs` and `labels`, int32 `[n, s]`: `labels[:, i]` follows `inputs[:, i]`, -100 is not trained."""

    inputs: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Dataset:
    """What training reads. `unigram_nats`: the held-out loss of a model that only knows token frequencies;
    `tokenizer`: the text of its tokenizer.json."""

    train: Samples
    held_out: Samples
    vocab_size: int
    unigram_nats: float
    summary: str
    tokenizer: str


def prepare(data: Path | None, *, vocab_size: int, seq_length: int, cache: Path, texts: Texts | None = None) -> Path:
    """The folder in `cache` with the samples of a JSON-lines file (None: Python's reference), made where not yet there.

    It holds `tokenizer.json`, `samples.npz` and `about.json`, and is named after all that it depends on. `texts`: how
    the model has them; None: a tokenizer of `vocab_size` entries is trained. DataError for data that cannot be used.
    """
    if data is None:
        documents, source = python_reference()
    else:
        documents, source = read_documents(data), str(data)
    known = vocab_size if texts is None else texts.key
    recipe = repr([FORMAT, tokenizers.__version__, source, known, seq_length, documents])
    folder = cache / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    if not folder.exists():
        _build(documents, source, texts or vocab_size, seq_length, folder)
    return folder


def load(folder: Path) -> Dataset:
    """The dataset that `prepare` made."""
    about = json.loads((folder / 'about.json').read_text())
    with np.load(folder / 'samples.npz') as arrays:
        train, held_out = (
            Samples(arrays[f'{part}_inputs'], arrays[f'{part}_labels']) for part in ('train', 'held_out')
        )
    tokenizer = (folder / 'tokenizer.json').read_text()
    return Dataset(train, held_out, about['vocab_size'], about['unigram_nats'], about['summary'], tokenizer)


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Train and held-out documents, by a hash of the text: whatever the order of the lines, equal texts on one side."""
    by_hash: dict[str, list[Document]] = {}
    for document in documents:
        by_hash.setdefault(hashlib.sha256(repr(document).encode()).hexdigest(), []).append(document)
    if len(by_hash) < 2:
        raise DataError('needs at least 2 different documents, one of them to hold out, and there is only 1')
    sizes = {key: sum(len(turn.text) for d in same for turn in d) for key, same in sorted(by_hash.items())}
    budget = min(HELD_OUT_SHARE * sum(sizes.values()), HELD_OUT_CHARACTERS)
    chosen = hold_out(sizes, budget, budget / 4)  # text of several documents says more than one long one
    parts = ([d for key in sizes if (key in chosen) is held_out for d in by_hash[key]] for held_out in (False, True))
    train, held_out = parts
    return train, held_out


def hold_out(sizes: Mapping[str, int], budget: float, largest: float) -> set[str]:
    """Which of the keys to hold out: the first that fit, each of a size of at most `largest`, together of `budget`; at
    least the smallest one."""
    chosen = set()
    for key, size in sizes.items():
        if size <= min(budget, largest):
            chosen.add(key)
            budget -= size
    return chosen or {min(sizes, key=lambda key: sizes[key])}


def windows(ids: list[int], trained: list[bool], length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and shifted labels, cut after every `length` tokens: each token but the first is a label exactly once."""
    labels = [token if keep else IGNORE for token, keep in zip(ids, trained)]
    for i in range(0, len(ids) - 1, length):
        yield ids[i : min(i + length, len(ids) - 1)], labels[i + 1 : i + 1 + length]


@dataclass(frozen=True)
class _Part:
    """One side of the split as rows: `cut` documents gave several, `untrained` rows without a label are left out."""

    documents: int
    rows: list[tuple[list[int], list[int]]]
    cut: int
    untrained: int

    @classmethod
    def of(cls, documents: list[Document], encode: Encode, length: int) -> _Part:
        cuts = [list(windows(*encode(d), length)) for d in documents]
        rows = [row for rows in cuts for row in rows]
        kept = [row for row in rows if any(label != IGNORE for label in row[1])]
        return cls(len(documents), kept, sum(len(rows) > 1 for rows in cuts), len(rows) - len(kept))

    @property
    def labels(self) -> np.ndarray:
        labels = np.array([label for row in self.rows for label in row[1]])
        return labels[labels != IGNORE]

    def samples(self, length: int) -> Samples:
        def pad(row: list[int], value: int) -> list[int]:
            return row + [value] * (length - len(row))

        inputs = np.array([pad(inputs, SPECIAL_IDS[END]) for inputs, _ in self.rows], dtype=np.int32)
        return Samples(inputs, np.array([pad(labels, IGNORE) for _, labels in self.rows], dtype=np.int32))

    def __str__(self) -> str:
        counts = ((self.documents, 'document'), (len(self.labels), 'token'), (len(self.rows), 'sample'))
        text = ', '.join(_plural(*count) for count in counts)
        left_out = f'; {_plural(self.untrained, "sample")} without a token of a response left out'
        return f'{text} ({_plural(self.cut, "document")} cut into several{left_out if self.untrained else ""})'


def _plural(n: int, noun: str) -> str:
    return f'{n:,} {noun}' if n == 1 else f'{n:,} {noun}s'


def _build(documents: list[Document], source: str, vocabulary: int | Texts, seq_length: int, folder: Path) -> None:
    try:
        parts = split(documents)
        if isinstance(vocabulary, int):
            tokenizer, name = train_tokenizer(parts[0], vocabulary), 'byte-level BPE'
            size, encode_one = tokenizer.get_vocab_size(), partial(encode, tokenizer=tokenizer)
        else:
            tokenizer, name, size = vocabulary.tokenizer, vocabulary.name, vocabulary.vocab_size
            encode_one = vocabulary.document
        train, held_out = (_Part.of(part, encode_one, seq_length) for part in parts)
    except DataError as e:
        raise DataError(f'{source}: {e}') from None
    lines = [f'data      {source}', f'train     {train}', f'held out  {held_out}']
    if len(held_out.rows) > HELD_OUT_SAMPLES:
        lines.append(f'          of which the first {HELD_OUT_SAMPLES} samples are used')
        held_out = _Part(held_out.documents, held_out.rows[:HELD_OUT_SAMPLES], held_out.cut, held_out.untrained)
    longest = max(len(row[0]) for part in (train, held_out) for row in part.rows)
    length = -(-longest // 8) * 8
    lines.append(f'tokens    {name} with {size:,} entries, samples of up to {min(length, seq_length)} tokens')
    unigram = unigram_nats(train.labels, held_out.labels, size)
    about = {'vocab_size': size, 'unigram_nats': unigram, 'summary': '\n'.join(lines)}

    _write(folder, tokenizer, {'train': train.samples(length), 'held_out': held_out.samples(length)}, about)


def unigram_nats(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Nats per held-out token of add-one smoothed token frequencies: `-mean log((count + 1) / (tokens + V))`."""
    counts = np.bincount(train, minlength=vocab_size) + 1
    return float(-np.log(counts[held_out] / counts.sum()).mean())


def _write(folder: Path, tokenizer: Tokenizer, parts: dict[str, Samples], about: dict[str, Any]) -> None:
    with made_whole(folder) as made:
        tokenizer.save(str(made / 'tokenizer.json'))
        arrays = {f'{part}_{name}': array for part, samples in parts.items() for name, array in vars(samples).items()}
        np.savez(made / 'samples.npz', allow_pickle=False, **arrays)
        (made / 'about.json').write_text(json.dumps(about))


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` at the end: an interrupted run leaves no half-made one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        made = Path(aside, folder.name)
        made.mkdir()
        yield made
        if not folder.exists():  # another run may have been quicker
            made.replace(folder)
