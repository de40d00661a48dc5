"""Rewards and lengths of sampled completions, and the time that sampling them took."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..advantage import summed_rewards
from ..arguments import reject_unknown
from ..groups import group_device, group_size
from .base import Metric, checked_keywords
from .state import as_scalar

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Moments:
    """Number, mean and sum of squared deviations of some values.

    The mean is kept as a difference from one of the values, so that a large common offset costs no precision.
    """

    n: int
    origin: float
    above: float
    squares: float

    @classmethod
    def of(cls, values: Any) -> Moments:
        """Those of `values`, at least one; exact where all are equal. NaN or infinity gives NaN."""
        array = np.asarray(values, dtype=np.float64)
        with np.errstate(invalid='ignore'):
            differences = array - array[0]
            above = differences.mean()
            return cls(len(array), float(array[0]), float(above), float(np.square(differences - above).sum()))

    def merged(self, other: Moments) -> Moments:
        """Those of both sets of values (Chan, Golub and LeVeque 1979)."""
        n = self.n + other.n
        apart = (other.origin - self.origin) + (other.above - self.above)
        squares = self.squares + other.squares + apart * apart * self.n * other.n / n
        return Moments(n, self.origin, self.above + apart * other.n / n, squares)

    @property
    def mean(self) -> float:
        """The mean."""
        return self.origin + self.above

    @property
    def std(self) -> float:
        """The unbiased standard deviation, 0 for one value."""
        return (self.squares / (self.n - 1)) ** 0.5 if self.n > 1 else 0.0


Statistics = dict[tuple[str, str], Moments]
"""By ('time' | 'reward' | 'total' | 'length', name): a reward may have any name."""


class CompletionRewardMetric(Metric):
    """Mean rewards, completion lengths and times of sampling over calls and data parallel ranks, as of one process.

    Rewards and lengths are means over samples, however unequal the calls and ranks are; times are means over calls.
    Deviations are the unbiased ones, 0 for a single sample. What nobody gave is left out; the keys are the same on
    every rank, one that gave nothing or other reward names included.

    Keys, as strings with 4 decimals: `generation_time`, `weight_sync_time` (in the unit given, as a rule seconds),
    `mean_reward`, `reward_std`, `mean_completion_length`, `completion_length_std`. Twinkle's keys, as floats:
    `train/<name>_reward` and `train/<name>_reward_std` for rewards given by name, `train/completion_length`,
    `profiling/Time taken: generate`, `profiling/Time taken: move_model_to_sampler`.

    With several rewards by name `mean_reward` is the mean over samples of their sum; but where one is named `total`,
    as Twinkle's recipes have it, it is that sum already and stands alone.

    Args:
        device_mesh, process_group: as of every metric. A sample counts once: with tensor and context parallel replicas
            the first rank's numbers count, with a pipeline the last stage's, and all ranks are told those. Context
            parallel replicas in `process_group` (as in the DP×CP group) are known from `device_mesh`: `Groups`, or a
            torch `DeviceMesh` with a dim named 'cp'. Without it `process_group` must hold no replicas.
        tokenizer: counts the tokens of completions given as texts. It has `encode(text)`, or is called with a text, and
            gives tokens, something with a length, or a dictionary with `input_ids`; it is asked for no special tokens
            where it can be. None: their characters are counted.
        total: the name of the reward that is the sum of the others, or None where there is no such name.

    `calculate` and `values` are collective: one gather of a few pickled numbers over `process_group`, then a broadcast
    each along the pipeline, the tensor parallel group, and the context parallel one if it was not gathered over.
    Groups of one rank take none. `accumulate` is not collective.
    """

    def __init__(
        self,
        device_mesh: Any = None,
        process_group: ProcessGroup | None = None,
        tokenizer: Any = None,
        total: str | None = 'total',
        **kwargs: Any,
    ):
        reject_unknown(kwargs, ('device_mesh', 'process_group', 'tokenizer', 'total'), type(self).__name__)
        super().__init__(device_mesh, process_group)
        if tokenizer is not None and (isinstance(tokenizer, str) or not callable(_encoder(tokenizer))):
            raise ValueError(f'tokenizer must have encode(text), or be called with a text, got {tokenizer!r}')
        self._tokenizer, self._total = tokenizer, total
        self._seen: Statistics = {}

    @checked_keywords
    def accumulate(
        self,
        inputs: Any = None,
        outputs: Any = None,
        *,
        generation_time: Any = None,
        weight_sync_time: Any = None,
        rewards: Any = None,
        completions: Any = None,
        generate_time: Any = None,
        completion_lengths: Any = None,
    ) -> None:
        """Takes in what is not None, of some samples of this rank; `inputs` and `outputs` are not looked at.

        Args:
            generation_time, weight_sync_time: one number each.
            rewards: a list, an array or a tensor of one number a sample (`[n, k]` components are summed), or a
                dictionary of such by name. All rewards of a sample come in one call.
            completions: one entry a sample: a text, a list or 1-D tensor of token ids without padding, or a length. A
                1-D tensor or array holds lengths.
            generate_time, completion_lengths: Twinkle's names for `generation_time` and `completions`.

        Rewards by name whose lists differ in length count for themselves, but not for `mean_reward`. ValueError, and
        nothing is taken in, where an entry cannot be read.
        """
        time = _either('generation_time', generation_time, 'generate_time', generate_time)
        texts = _either('completions', completions, 'completion_lengths', completion_lengths)
        given: dict[tuple[str, str], Any] = {
            ('time', name): [as_scalar(value, name, torch.device('cpu')).item()]
            for name, value in (('generation_time', time), ('weight_sync_time', weight_sync_time))
            if value is not None
        }
        samples = _rewards(rewards)
        if texts is not None:
            samples['length', ''] = _lengths(texts, self._tokenizer)
        _add_total(samples, self._total)
        self._seen = _merged([self._seen, {k: Moments.of(v) for k, v in (given | samples).items() if len(v)}])

    def values(self) -> dict[str, float]:
        """The statistics as floats, the same on every rank, without a reset. Collective."""
        return self.totals()

    def reset(self) -> None:
        """Forgets what was accumulated."""
        self._seen = {}

    def state_dict(self) -> dict[str, Any]:
        return {'seen': [[*key, *astuple(moments)] for key, moments in self._seen.items()]}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        self._seen = {(kind, name): Moments(*numbers) for kind, name, *numbers in kept['seen']}

    def display(self, totals: Mapping[str, float]) -> dict[str, Any]:
        """4 decimals for the documented keys; Twinkle's own stay floats."""
        return {name: value if '/' in name else f'{value:.4f}' for name, value in totals.items()}

    def totals(self) -> dict[str, float]:
        """The statistics of all ranks by key."""
        seen = _merged(self.gather_results([self._seen] if self._counts() else []))
        for name in ('cp', 'tp'):
            seen = self._from_first(seen, name)
        return _figures(seen)

    def _counts(self) -> bool:
        """Whether this rank stands for its context parallel replicas within the group that is gathered over."""
        replicas = set(_ranks(self.mesh_group('cp'))).intersection(_ranks(self._reduced_over()))
        return not replicas or min(replicas) == dist.get_rank()

    def _from_first(self, seen: Statistics, name: str) -> Statistics:
        """What the first rank of the group 'tp' or 'cp' has, where its ranks were not in one gather.

        They hold replicas, but each has measured its own times.
        """
        group = self.mesh_group(name)
        members = _ranks(group)
        if group_size(group) == 1 or set(members).issubset(_ranks(self._reduced_over())):
            return seen
        box = [seen]
        dist.broadcast_object_list(box, src=members[0], group=group, device=group_device(group))
        return box[0]


def _ranks(group: ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


def _merged(parts: Sequence[Statistics]) -> Statistics:
    merged: Statistics = {}
    for part in parts:
        merged |= {key: merged[key].merged(m) if key in merged else m for key, m in part.items()}
    return merged


def _figures(seen: Statistics) -> dict[str, float]:
    generation, sync = seen.get(('time', 'generation_time')), seen.get(('time', 'weight_sync_time'))
    total, length = seen.get(('total', '')), seen.get(('length', ''))
    named = {name: moments for (kind, name), moments in seen.items() if kind == 'reward'}
    figures = [
        ('generation_time', generation and generation.mean),
        ('weight_sync_time', sync and sync.mean),
        ('mean_reward', total and total.mean),
        ('reward_std', total and total.std),
        ('mean_completion_length', length and length.mean),
        ('completion_length_std', length and length.std),
        ('profiling/Time taken: move_model_to_sampler', sync and sync.mean),
        ('profiling/Time taken: generate', generation and generation.mean),
        *((f'train/{n}_reward{end}', x) for n, m in named.items() for end, x in (('', m.mean), ('_std', m.std))),
        ('train/completion_length', length and length.mean),
    ]
    return {key: figure for key, figure in figures if figure is not None}


def _either(name: str, value: Any, alias: str, other: Any) -> Any:
    if value is not None and other is not None:
        raise ValueError(f'{alias} is another name of {name}; give one of them')
    return other if value is None else value


def _rewards(rewards: Any) -> dict[tuple[str, str], Any]:
    if rewards is None:
        return {}
    if not isinstance(rewards, Mapping):
        return {('total', ''): summed_rewards(rewards)}
    if odd := [name for name in rewards if not isinstance(name, str)]:
        raise ValueError(f'rewards must have names that are strings, got {odd[0]!r}')
    return {('reward', name): summed_rewards(value, f'rewards[{name!r}]') for name, value in rewards.items()}


def _add_total(samples: dict[tuple[str, str], Any], total: str | None) -> None:
    parts = {name: values for (kind, name), values in samples.items() if kind == 'reward'}
    if total in parts:
        samples['total', ''] = parts[total]
    elif len({len(values) for values in parts.values()}) == 1:  # of others the sum of a sample is not known
        samples['total', ''] = summed_rewards(torch.stack(list(parts.values()), dim=1))


def _lengths(completions: Any, tokenizer: Any) -> list[float]:
    items = completions
    if isinstance(completions, Tensor | np.ndarray):
        if completions.ndim != 1:
            raise ValueError(
                f'completions must be a list of token lists without padding, or lengths of shape [n], got a '
                f'{type(completions).__name__} of shape {list(completions.shape)}'
            )
        items = completions.tolist()
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise ValueError(f'completions must be a list with one entry a sample, got a {type(completions).__name__}')
    return [_length(item, f'completions[{i}]', tokenizer) for i, item in enumerate(items)]


def _length(item: Any, name: str, tokenizer: Any) -> float:
    if isinstance(item, str):
        return len(item) if tokenizer is None else _token_count(tokenizer, item)
    if isinstance(item, Tensor | np.ndarray | np.generic):
        if item.ndim == 1:
            return len(item)
        item = item.item() if item.ndim == 0 else item
    if isinstance(item, Real) and float(item).is_integer() and float(item) >= 0:
        return float(item)
    tokens = item if isinstance(item, Sequence) and not isinstance(item, bytes) else [None]
    if all(isinstance(token, Integral | Tensor | np.ndarray) for token in tokens):
        return len(tokens)
    raise ValueError(f'{name} must be a text, token ids or a length in tokens, got {reprlib.repr(item)}')


def _encoder(tokenizer: Any) -> Any:
    return getattr(tokenizer, 'encode', tokenizer)


def _token_count(tokenizer: Any, text: str) -> int:
    encode = _encoder(tokenizer)
    plainly = {'add_special_tokens': False} if 'add_special_tokens' in inspect.signature(encode).parameters else {}
    tokens = encode(text, **plainly)
    return len(tokens['input_ids'] if isinstance(tokens, Mapping) else tokens)
