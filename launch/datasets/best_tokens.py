"""Sequences with the best tokens of a teacher elsewhere. docs/distillation.md tells the format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from launch.datasets.data import IGNORE
from launch.datasets.kept import keep, kept, split
from launch.datasets.lines import DataError, kind_of, read_lines

FORMS = (
    '{"input_ids": [...], "topk_logprobs": [[...], ...], "topk_indices": [[...], ...]}; docs/distillation.md tells more'
)
HELD_OUT = 128  # sequences, at most
ROUNDING = 1e-3  # nats that a log-prob may lie above 0


@dataclass(frozen=True)
class Sequences:
    """`n` sequences: of `ids[i]` those tokens are trained on for which `trained[i]` is True, and of each of these in
    order `log_probs[i]` and `indices[i]`, `[tokens, k]`, are what the teacher thinks of its place: −inf fills up."""

    ids: list[np.ndarray]
    trained: list[np.ndarray]
    log_probs: list[np.ndarray]
    indices: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.ids)

    def inputs_and_labels(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """A sequence as inputs and shifted labels."""
        return self.ids[i][:-1], np.where(self.trained[i][1:], self.ids[i][1:], IGNORE)


@dataclass(frozen=True)
class BestTokens:
    """Sequences to train on and held-out ones. `tokenizer`: the text of its tokenizer.json."""

    train: Sequences
    held_out: Sequences
    vocab_size: int
    tokenizer: str
    summary: str


@dataclass(frozen=True)
class _Sequence:
    ids: list[int]
    trained: list[bool]
    log_probs: list[list[float]]  # of trained tokens
    indices: list[list[int]]


def read_tokenizer(path: Path) -> str:
    """The text of a tokenizer.json. DataError for a file that is none."""
    try:
        text = path.read_text(encoding='utf-8')
        Tokenizer.from_str(text)
    except OSError as e:
        raise DataError(f'{path} cannot be read: {e.strerror}') from None
    except Exception as e:  # the library has no class of its own
        raise DataError(f'{path} is no tokenizer.json: {e}') from None
    return text


def prepare(
    path: Path, tokenizer: str, *, seq_length: int, least: int, cache: Path, vocab_size: int | None = None
) -> Path:
    """The folder in `cache` with the sequences of the file as arrays, named after them, made where not yet there.

    `tokenizer` is the text of the teacher's tokenizer.json, which says how many ids there are, unless `vocab_size`
    does. DataError, which names the file, for one that cannot be used: with bad lines, or with fewer than `least`
    sequences to train on.
    """
    vocab_size = vocab_size or Tokenizer.from_str(tokenizer).get_vocab_size()
    everything = read_lines(path, lambda record, _: _sequence(record, vocab_size, seq_length), 'sequence', FORMS)
    train, held_out = _split(everything, path)
    if len(train) < least:
        raise DataError(f'{path} has {len(train)} sequences to train on, fewer than the {least} of one step')
    arrays = {
        f'{name}_{key}': x for name, part in (('train', train), ('held_out', held_out)) for key, x in _arrays(part)
    }
    text = {'summary': _summary(path, train, held_out), 'vocab_size': vocab_size, 'tokenizer': tokenizer}
    return keep(cache, 'best-tokens', arrays, text)


def load(folder: Path) -> BestTokens:
    """The sequences that `prepare` wrote."""
    arrays, about = kept(folder)
    train, held_out = (_from_arrays({k: arrays[f'{part}_{k}'] for k in KEYS}) for part in ('train', 'held_out'))
    return BestTokens(train, held_out, about['vocab_size'], about['tokenizer'], about['summary'])


KEYS = ('ids', 'trained', 'lengths', 'log_probs', 'indices')


def _arrays(sequences: list[_Sequence]) -> Iterable[tuple[str, np.ndarray]]:
    rows = [(row, ids) for s in sequences for row, ids in zip(s.log_probs, s.indices)]
    log_probs = np.full((len(rows), max(len(ids) for _, ids in rows)), -np.inf)
    indices = np.zeros(log_probs.shape, dtype=np.int64)
    for i, (row, ids) in enumerate(rows):
        log_probs[i, : len(row)], indices[i, : len(ids)] = row, ids
    values = (
        np.array([token for s in sequences for token in s.ids], dtype=np.int64),
        np.array([trained for s in sequences for trained in s.trained], dtype=bool),
        np.array([len(s.ids) for s in sequences], dtype=np.int64),
        log_probs,
        indices,
    )
    return zip(KEYS, values)


def _from_arrays(a: dict[str, np.ndarray]) -> Sequences:
    ends = a['lengths'].cumsum()[:-1]
    trained = np.split(a['trained'], ends)
    told = np.cumsum([part.sum() for part in trained])[:-1]
    return Sequences(np.split(a['ids'], ends), trained, np.split(a['log_probs'], told), np.split(a['indices'], told))


def _split(sequences: list[_Sequence], path: Path) -> tuple[list[_Sequence], list[_Sequence]]:
    """Sequences to train on and held-out ones, by a hash of what comes before the first trained token: all answers to
    one prompt on one side."""
    parts = split(sequences, [repr(s.ids[: max(s.trained.index(True), 2)]) for s in sequences], HELD_OUT)
    if parts is None:
        raise DataError(f'{path} needs at least 2 sequences that begin differently, one of them to hold out')
    return parts


def _summary(path: Path, train: list[_Sequence], held_out: list[_Sequence]) -> str:
    def count(part: list[_Sequence]) -> str:
        return f'{len(part):,} sequences, {sum(map(len, (s.log_probs for s in part))):,} trained tokens'

    told = [sum(map(math.exp, row)) for s in train + held_out for row in s.log_probs]
    k = [len(row) for s in train + held_out for row in s.log_probs]
    many = f'{min(k)}' if min(k) == max(k) else f'{min(k)} to {max(k)}'
    lines = (
        f'data      {path}',
        f'train     {count(train)}',
        f'held out  {count(held_out)}',
        f'teacher   {many} best tokens at each, with {np.mean(told):.1%} of its probability on average',
    )
    return '\n'.join(lines)


def _sequence(record: dict[str, Any], vocab_size: int, seq_length: int) -> _Sequence:
    ids = _list(record, 'input_ids')
    for place, token in enumerate(ids):
        _check_id(token, vocab_size, f'"input_ids" must hold token ids from 0 to {vocab_size - 1}', f'at {place}')
    if not 2 <= len(ids) <= seq_length + 1:
        raise DataError(f'"input_ids" must have 2 to --seq-length + 1 = {seq_length + 1} tokens, got {len(ids)}')
    log_probs, indices = (_list(record, key) for key in ('topk_logprobs', 'topk_indices'))
    if len(log_probs) != len(indices):
        raise DataError(f'"topk_logprobs" has {len(log_probs)} entries and "topk_indices" {len(indices)}')
    trained = _trained(record, ids, log_probs)
    places = [place for place, keep in enumerate(trained) if keep]
    if len(log_probs) == len(ids):
        log_probs, indices = ([of[place] for place in places] for of in (log_probs, indices))
    elif len(log_probs) != len(places):
        raise DataError(
            f'"topk_logprobs" must have {len(ids)} entries, one for each token, or {len(places)}, one for each trained '
            f'token, got {len(log_probs)}'
        )
    told = [_told(row, best, vocab_size, place) for row, best, place in zip(log_probs, indices, places)]
    return _Sequence(ids, trained, [row for row, _ in told], [best for _, best in told])


def _list(record: dict[str, Any], key: str) -> list[Any]:
    if key not in record:
        raise DataError(f'has no "{key}"')
    if not isinstance(record[key], list) or not record[key]:
        raise DataError(f'"{key}" must be a list, got {kind_of(record[key])}')
    return record[key]


def _check_id(token: Any, vocab_size: int, what: str, where: str) -> None:
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise DataError(f'{what}, got {json.dumps(token)[:40]} {where}')


def _trained(record: dict[str, Any], ids: list[int], log_probs: list[Any]) -> list[bool]:
    """Which tokens are trained on; never the first, before which there is nothing."""
    given = [key for key in ('labels', 'prompt_length') if key in record]
    if len(given) > 1:
        raise DataError('has "labels" and "prompt_length"; keep one of them')
    if given == ['labels']:
        labels = _list(record, 'labels')
        if len(labels) != len(ids):
            raise DataError(f'"labels" must have an entry for each of the {len(ids)} tokens, got {len(labels)}')
        for place, (label, token) in enumerate(zip(labels, ids)):
            if label not in (IGNORE, token):
                raise DataError(
                    f'"labels" must hold the token of the same place (they are not shifted) or {IGNORE}, got '
                    f'{json.dumps(label)[:40]} for {token} at {place}'
                )
        trained = [label != IGNORE for label in labels]
    elif given:
        length = record['prompt_length']
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length < len(ids):
            raise DataError(
                f'"prompt_length" must be a whole number from 0 to {len(ids) - 1}, got {json.dumps(length)[:40]}'
            )
        trained = [place >= length for place in range(len(ids))]
    elif len(log_probs) == len(ids):
        trained = [row is not None for row in log_probs]
    else:
        raise DataError('needs "labels" or "prompt_length", as "topk_logprobs" has no entry for some tokens')
    trained[0] = False
    if not any(trained):
        raise DataError('has no token to train on')
    return trained


def _told(row: Any, best: Any, vocab_size: int, place: int) -> tuple[list[float], list[int]]:
    """Log-probs and ids for the token at a place, without those of probability 0."""
    where = f'for the trained token at {place}'
    if not isinstance(row, list) or not isinstance(best, list) or len(row) != len(best) or not row:
        raise DataError(f'"topk_logprobs" and "topk_indices" must be lists of the same length {where}')
    for x in row:
        if not isinstance(x, int | float) or isinstance(x, bool) or not x <= ROUNDING:
            raise DataError(f'"topk_logprobs" must hold numbers of at most 0, got {json.dumps(x)[:40]} {where}')
    for token in best:
        _check_id(token, vocab_size, f'"topk_indices" must hold token ids from 0 to {vocab_size - 1}', where)
    if len(set(best)) != len(best):
        raise DataError(f'"topk_indices" must differ {where}')
    if (total := math.fsum(map(math.exp, row))) > 1 + len(row) * ROUNDING:
        raise DataError(f'"topk_logprobs" must be log-probs in nats, got probabilities of {total:.4g} together {where}')
    kept = [(x, token) for x, token in zip(row, best) if x > -math.inf]
    if not kept:
        raise DataError(f'"topk_logprobs" must be above -Infinity at least once {where}')
    return [x for x, _ in kept], [token for _, token in kept]
