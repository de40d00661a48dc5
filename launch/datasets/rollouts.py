"""Rollouts: completions that a policy sampled, with its log-probs and their rewards. docs/rollouts.md: the format."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.datasets.about import About
from launch.datasets.kept import keep, kept
from launch.datasets.lines import DataError, kind_of, quoted, read_lines, text_of
from launch.datasets.responses import Responses
from launch.datasets.texts import Texts

FORMS = (
    '{"prompt": ..., "completion": ..., "old_logps": [...], "reward": ..., "group": ...}, the first one '
    '{"temperature": ...}; docs/rollouts.md tells more'
)
ROUNDING = 1e-3  # nats that a log-prob may lie above 0


@dataclass(frozen=True)
class Rollouts(Responses):
    """`n` rollouts: responses for which `old_logps[i]` has one number a token, nats at `temperature`. `rewards` are
    `[n, k]`, named where the file names them; rollouts of one prompt have the same number in `groups` `[n]`."""

    old_logps: list[np.ndarray]
    rewards: np.ndarray
    reward_names: tuple[str, ...]
    groups: np.ndarray
    temperature: float
    summary: str

    @property
    def totals(self) -> np.ndarray:
        """What each rollout is judged by, `[n]`: the reward named `total`, or the sum of all."""
        return _totals(self.rewards, self.reward_names)


def _totals(rewards: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    if 'total' in names:
        return rewards[:, names.index('total')]
    return np.array([math.fsum(row) for row in rewards])


@dataclass(frozen=True)
class _Rollout:
    prompt: list[int]
    completion: list[int]
    old_logps: list[float]
    rewards: dict[str, float]
    group: int | str


class _Reader:
    """Reads the lines one after the other; what must be the same on all of them is taken from the first."""

    def __init__(self, about: About, seq_length: int) -> None:
        self.temperature: float | None = None
        self._num_generations: int | None = None
        self._vocab_size, self._seq_length = about.vocab_size, seq_length
        self._texts = Texts(about)
        self._names: list[str] | None = None
        self._by_id: bool | None = None
        self._first: tuple[int, Any] = (0, None)  # line and prompt of the first rollout of the group
        self._seen = 0

    @property
    def left_over(self) -> int:
        """How many rollouts a last group has that is not whole."""
        return self._seen % self._num_generations if self._num_generations and self._by_id is False else 0

    def __call__(self, record: dict[str, Any], number: int) -> _Rollout | None:
        if 'temperature' in record:
            self._take_temperature(record['temperature'])
        if self._seen == 0 and not {'prompt', 'completion', 'old_logps', 'reward'} & set(record):
            return self._header(record)
        group = self._group(record, number)
        prompt, completion = (self._tokens(record, key) for key in ('prompt', 'completion'))
        if isinstance(record['prompt'], str):
            prompt = self._texts.begin(prompt)
        old_logps = _log_probs(record)
        if isinstance(record['completion'], str) and len(old_logps) == len(completion) + 1:
            completion = [*completion, *self._texts.end]
        if len(old_logps) != len(completion):
            hint = '; give the ids that were sampled' if isinstance(record['completion'], str) else ''
            raise DataError(f'"old_logps" has {len(old_logps)} numbers for {len(completion)} completion tokens{hint}')
        length = len(prompt) + len(completion)
        if length > self._seq_length:
            raise DataError(f'prompt and completion have {length} tokens, more than --seq-length {self._seq_length}')
        return _Rollout(prompt, completion, old_logps, self._rewards(record), group)

    def _header(self, record: dict[str, Any]) -> None:
        if 'num_generations' in record:
            n = record['num_generations']
            if not isinstance(n, int) or isinstance(n, bool) or n < 1:
                raise DataError(f'"num_generations" must be a whole number of at least 1, got {json.dumps(n)[:40]}')
            self._num_generations = n
        elif 'temperature' not in record:
            raise DataError(
                f'has neither a rollout nor a setting of the file, only {quoted(list(record)[:6]) or "no key"}'
            )

    def _take_temperature(self, value: Any) -> None:
        if not _is_number(value) or value <= 0:
            raise DataError(f'"temperature" must be a number above 0, got {json.dumps(value)[:40]}')
        if self.temperature not in (None, value):
            raise DataError(f'"temperature" is {value:g}, but {self.temperature:g} before; a file has one temperature')
        self.temperature = value

    def _group(self, record: dict[str, Any], number: int) -> int | str:
        by_id = 'group' in record
        if self._by_id is None:
            self._by_id = by_id
        place, n = self._seen, self._num_generations
        self._seen += 1
        if self._by_id != by_id:
            raise DataError(f'has {"a" if by_id else "no"} "group", unlike the rollouts before')
        if by_id:
            group = record['group']
            if not isinstance(group, int | str) or isinstance(group, bool):
                raise DataError(f'"group" must be a whole number or a string, got {kind_of(group)}')
            return group
        if n is None:
            raise DataError('has no "group", and the first line of the file no "num_generations"')
        if place % n == 0:
            self._first = (number, record.get('prompt'))
        elif record.get('prompt') != self._first[1]:
            raise DataError(f'"prompt" is not that of line {self._first[0]}, the first of its group of {n}')
        return place // n

    def _tokens(self, record: dict[str, Any], key: str) -> list[int]:
        value = record.get(key)
        if not isinstance(value, list):
            if key in record and not isinstance(value, str):
                raise DataError(f'"{key}" must be a text or a list of token ids, got {kind_of(value)}')
            return self._texts.ids(text_of(record, key, blank=True))
        if not value:
            raise DataError(f'"{key}" is empty')
        for place, token in enumerate(value, start=1):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocab_size:
                what = json.dumps(token)[:40]
                raise DataError(
                    f'"{key}" must hold token ids from 0 to {self._vocab_size - 1}, got {what} as its {place}.'
                )
        return value

    def _rewards(self, record: dict[str, Any]) -> dict[str, float]:
        if 'reward' not in record:
            raise DataError('has no "reward"')
        rewards = record['reward'] if isinstance(record['reward'], dict) else {'': record['reward']}
        for name, value in rewards.items():
            if not _is_number(value):
                where = f'"reward" "{name}"' if name else '"reward"'
                raise DataError(f'{where} must be a finite number, got {json.dumps(value)[:40]}')
        self._names = self._names or sorted(rewards)
        if not rewards or sorted(rewards) != self._names:
            known = quoted(self._names) if self._names != [''] else 'one number'
            got = 'one number' if '' in rewards else quoted(sorted(rewards)) or 'none'
            raise DataError(f'"reward" must have the names that the rollouts before have, {known or "some"}, got {got}')
        return rewards


def _log_probs(record: dict[str, Any]) -> list[float]:
    if 'old_logps' not in record:
        raise DataError('has no "old_logps", the log-probs that its tokens were sampled with')
    values = record['old_logps']
    if not isinstance(values, list):
        raise DataError(f'"old_logps" must be a list of numbers, got {kind_of(values)}')
    for place, value in enumerate(values, start=1):
        if not _is_number(value) or value > ROUNDING:
            raise DataError(
                f'"old_logps" must hold finite numbers of at most 0, got {json.dumps(value)[:40]} as its {place}.'
            )
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def prepare(path: Path, about: About, *, seq_length: int, least: int, cache: Path) -> Path:
    """The folder in `cache` with the rollouts of the file as arrays, named after them, made where not yet there.

    `about` is the policy that they came from, whose tokenizer reads text. DataError, which names the file, for one that
    cannot be used: with bad lines, without a temperature, with fewer than `least` rollouts.
    """
    reader = _Reader(about, seq_length)
    rollouts = [found for found in read_lines(path, reader, 'rollout', FORMS) if found is not None]
    if len(rollouts) < least:
        raise DataError(f'{path} has {len(rollouts)} rollouts, fewer than the {least} of one step')
    if reader.temperature is None:
        raise DataError(f'{path} must say the temperature it was sampled at: {{"temperature": 1.0}} as its first line')
    if reader.left_over:
        raise DataError(
            f'{path} ends with {reader.left_over} rollouts, which are not a whole group of "num_generations"'
        )
    arrays, names = _arrays(rollouts)
    text = {'reward_names': names, 'temperature': reader.temperature, 'summary': _summary(path, arrays, names, reader)}
    return keep(cache, 'rollouts', arrays, text)


def load(folder: Path) -> Rollouts:
    """The rollouts that `prepare` wrote."""
    a, about = kept(folder)
    completions = a['lengths'] - a['prompt_lengths']
    return Rollouts(
        ids=np.split(a['ids'], a['lengths'].cumsum()[:-1]),
        prompt_lengths=a['prompt_lengths'],
        old_logps=np.split(a['old_logps'], completions.cumsum()[:-1]),
        rewards=a['rewards'],
        reward_names=tuple(about['reward_names']),
        groups=a['groups'],
        temperature=about['temperature'],
        summary=about['summary'],
    )


def _arrays(rollouts: list[_Rollout]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    numbers: dict[int | str, int] = {}
    names = tuple(rollouts[0].rewards)
    return {
        'ids': np.array([token for r in rollouts for token in (*r.prompt, *r.completion)], dtype=np.int32),
        'lengths': np.array([len(r.prompt) + len(r.completion) for r in rollouts], dtype=np.int64),
        'prompt_lengths': np.array([len(r.prompt) for r in rollouts], dtype=np.int64),
        'old_logps': np.array([x for r in rollouts for x in r.old_logps], dtype=np.float64),
        'rewards': np.array([[r.rewards[name] for name in names] for r in rollouts], dtype=np.float64),
        'groups': np.array([numbers.setdefault(r.group, len(numbers)) for r in rollouts], dtype=np.int64),
    }, tuple(name for name in names if name)


def _summary(path: Path, arrays: dict[str, np.ndarray], names: tuple[str, ...], reader: _Reader) -> str:
    groups, totals = arrays['groups'], _totals(arrays['rewards'], names)
    count = int(groups.max()) + 1
    least, most = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(least, groups, totals)
    np.maximum.at(most, groups, totals)
    unequal = int((most > least).sum())
    named = ', '.join(f'{name} {mean:.4g}' for name, mean in zip(names, arrays['rewards'].mean(0)))
    tokens = len(arrays['old_logps'])
    lines = (
        f'data      {path}',
        f'rollouts  {len(totals):,} in {count:,} groups, at temperature {reader.temperature:g}; {tokens:,} completion '
        f'tokens, {tokens / len(totals):.1f} each',
        f'reward    {totals.mean():.4g} on average{f" ({named})" if named else ""}; {unequal:,} groups have unequal '
        'rewards, the others give no gradient',
    )
    return '\n'.join(lines)
