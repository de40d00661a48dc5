"""Distillation: a student's distributions are drawn to those of a teacher."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..arguments import above_0, checked_arguments
from ..batch import CONSTANT, HEADS, VECTORS, TokenBatch
from ..data_format import InputFeature, LossOutput, ModelOutput
from ..groups import tensor_parallel_group
from ..vocab_parallel import (
    LinearHead,
    Logits,
    TokenStats,
    VocabShard,
    gather,
    generalized_jsd,
    log_probs_and_tail,
)
from ..vocab_parallel import (
    topk as best_of,
)
from ..vocab_parallel.logits import local_size
from .base import SweepLoss

MODES = ('full', 'topk_local', 'topk_remote')
TAILS = ('renormalize', 'bucket')


class TeacherHead(NamedTuple):
    """A teacher's linear head for one micro-batch of this rank, and which ids its columns are."""

    head: LinearHead
    shard: VocabShard


class GKDLoss(SweepLoss):
    """Generalised knowledge distillation (Agarwal et al., arXiv 2306.13649): the mean over the trained tokens of the
    global batch of the generalised Jensen-Shannon divergence of student S and teacher T, see `generalized_jsd`:

        beta·KL(T‖M) + (1 − beta)·KL(S‖M), M = beta·T + (1 − beta)·S; KL(T‖S) for beta 0, KL(S‖T) for beta 1

    Args:
        teacher_mode: 'full': the teacher's whole distribution. 'topk_local': its k best tokens, found here, exactly and
            over all shards. 'topk_remote': the best tokens of a teacher elsewhere, as its API gives them. None: what
            the call's keywords say. A mode that does not fit them is a ValueError.
        beta: weight of the teacher in the mixture, in [0, 1].
        temperature: logits of both are divided by it, and log-probs from an API, which are then renormalised; > 0.
        topk: k of 'topk_local'.
        topk_tail: of the best k tokens. 'renormalize': both distributions are renormalised over them, as in Twinkle and
            TRL; what the student does elsewhere is free. 'bucket': all other tokens are one more, whose probability is
            summed over them, for student and local teacher alike; a lower bound of the whole divergence. Not with
            'topk_remote' at a temperature other than 1: the teacher's other tokens, of which nothing is known, would
            change theirs.
        ignore_index: label of tokens that do not count.
        chunk_size: tokens handled at once, at most, where that takes memory; values do not depend on it.

    Call keywords, one teacher:
        teacher_logits: `[b, s, V/tp]` for each micro-batch, this rank's columns, cut like the student's (on one process
            the whole vocabulary); or for each sequence, see `align_vectors`.
        teacher: for each micro-batch a `LinearHead`, as `MegatronModel.teacher(...).heads(inputs)` gives them, or
            outputs with `logits` (and their `vocab_shard`).
        teacher_topk_logprobs, teacher_topk_indices: log-probs in nats and global ids of the best tokens `[b, s, k]`, or
            for each sequence lists for each token, ragged or filled up with −inf.
        topk: as the constructor's, for one call.

    Vocabularies of different sizes are compared over the ids that both have. Without a teacher training is a
    ValueError; `forward_only` gives 0.

    Logits are sharded over TP, all else is replicated over it. Collectives and memory: those of the sweep over the
    student's logits and of `generalized_jsd`, or of `topk` and `gather` (`log_probs_and_tail` with a bucket).
    """

    extras: ClassVar[Mapping[str, str]] = {
        'teacher_logits': VECTORS, 'teacher': HEADS, 'teacher_topk_logprobs': VECTORS, 'teacher_topk_indices': VECTORS,
        'topk': CONSTANT,
    }  # fmt: skip
    reads_logits: ClassVar[bool] = True

    @checked_arguments
    def __init__(
        self,
        teacher_mode: str | None = None,
        beta: float = 0.5,
        temperature: float = 1.0,
        topk: int | None = None,
        topk_tail: str = 'renormalize',
        ignore_index: int = -100,
        chunk_size: int | None = 512,
        **unknown: Any,
    ) -> None:
        super().__init__(ignore_index)
        if teacher_mode is not None and teacher_mode not in MODES:
            raise ValueError(f"teacher_mode must be 'full', 'topk_local', 'topk_remote' or None, got {teacher_mode!r}")
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 <= beta <= 1:
            raise ValueError(f'beta must be a number in [0, 1], got {beta!r}')
        if topk_tail not in TAILS:
            raise ValueError(f"topk_tail must be 'renormalize' or 'bucket', got {topk_tail!r}")
        if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise ValueError(f'chunk_size must be an int >= 1 (tokens), or None, got {chunk_size!r}')
        self.teacher_mode, self.beta, self.topk_tail = teacher_mode, beta, topk_tail
        self.temperature, self.topk = above_0('temperature', temperature), _checked_k(topk)
        self.tokens_at_once = chunk_size
        self._shards: dict[int, VocabShard] = {}
        if teacher_mode == 'topk_remote':
            self._check_bucket('topk_remote')

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def check_call(self, given: Collection[str], training: bool) -> None:
        remote = [key for key in ('teacher_topk_logprobs', 'teacher_topk_indices') if key in given]
        if len(remote) == 1:
            raise ValueError(f'teacher_topk_logprobs and teacher_topk_indices must be given together, got {remote[0]}')
        ways = [key for key in ('teacher_logits', 'teacher', 'teacher_topk_logprobs') if key in given]
        if len(ways) > 1:
            raise ValueError(f'the teacher must be given in one way, got {" and ".join(ways)}')
        if training and not ways:
            raise ValueError(
                'GKDLoss must be given a teacher: teacher=model.teacher(chunks).heads(inputs), or teacher_logits, or '
                'teacher_topk_logprobs and teacher_topk_indices'
            )
        if ways:
            self._mode(given)

    def _mode(self, given: Collection[str]) -> str:
        """What the keywords ask for. ValueError where the constructor asked for something else."""
        remote = 'teacher_topk_logprobs' in given
        found = 'topk_remote' if remote else 'topk_local' if 'topk' in given or self.topk is not None else 'full'
        asked = self.teacher_mode or found
        if asked == 'topk_local' and found == 'full':
            raise ValueError("teacher_mode='topk_local' must be told topk: GKDLoss(topk=64), or topk=64 at the call")
        if asked != found and not (asked == 'full' and found == 'topk_local' and 'topk' not in given):
            got = 'teacher_topk_logprobs' if remote else 'topk' if found == 'topk_local' else 'the whole teacher'
            raise ValueError(f'teacher_mode={asked!r} does not fit what is passed: {got}')
        self._check_bucket(asked)
        return asked

    def _check_bucket(self, mode: str) -> None:
        if mode == 'topk_remote' and self.topk_tail == 'bucket' and self.temperature != 1:
            raise ValueError(
                "topk_tail='bucket' with log-probs from an API must be at temperature 1, got "
                f"{self.temperature!r}: the teacher's other tokens cannot be tempered; use 'renormalize'"
            )

    def contribution(
        self,
        batch: TokenBatch,
        stats: TokenStats,
        logits: Logits | None = None,
        shard: VocabShard | None = None,
        **extra: Any,
    ) -> Tensor:
        assert logits is not None
        assert shard is not None
        given = {key: value for key, value in extra.items() if value is not None}
        if not {'teacher_logits', 'teacher', 'teacher_topk_logprobs'} & given.keys():
            return torch.zeros((), dtype=torch.float32, device=logits.device)
        return batch.mean(self.divergence(logits, shard, batch.mask, given))

    def divergence(self, logits: Logits, shard: VocabShard, mask: Tensor, given: Mapping[str, Any]) -> Tensor:
        """Of each token `[b, s]`, 0 where `mask` is False."""
        mode, mask = self._mode(given), mask.to(logits.device)
        if mode == 'topk_remote':
            ids, scores = (given[key].to(logits.device) for key in ('teacher_topk_indices', 'teacher_topk_logprobs'))
            ids, scores = _sound(ids, scores, mask, shard.vocab_size)
            return self._over_best(logits, shard, mask, ids, scores, self._remote_tail(scores))
        teacher, teacher_shard = self._teacher(given, shard)
        if mode == 'full':
            return generalized_jsd(
                logits, teacher, shard=shard, teacher_shard=None if teacher_shard == shard else teacher_shard,
                beta=self.beta, temperature=self.temperature, mask=mask, chunk_size=self.tokens_at_once,
            )  # fmt: skip
        common = min(shard.vocab_size, teacher_shard.vocab_size)
        shard, teacher_shard = (replace(one, vocab_size=common) for one in (shard, teacher_shard))
        with torch.no_grad():
            ids, scores, tail = self._best(teacher, teacher_shard, given)
        return self._over_best(logits, shard, mask, ids, scores, tail)

    def _remote_tail(self, scores: Tensor) -> Tensor | None:
        """The log-prob of all tokens that an API did not tell of: what is left to 1."""
        if self.topk_tail == 'renormalize':
            return None
        told = scores.logsumexp(-1)
        return torch.where(told < 0, torch.log(-torch.expm1(torch.where(told < 0, told, -1.0))), -torch.inf)

    def _best(
        self, teacher: Logits, shard: VocabShard, given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids of the teacher's best tokens, and its logits there; with a bucket its log-probs, and that of all other
        tokens."""
        k = _checked_k(given.get('topk', self.topk)) or 1
        values, ids = best_of(teacher, min(k, shard.vocab_size), shard=shard)
        if self.topk_tail == 'renormalize':
            return ids, values, None
        return ids, *log_probs_and_tail(teacher, ids, shard=shard, temperature=self.temperature)

    def _over_best(
        self, logits: Logits, shard: VocabShard, mask: Tensor, ids: Tensor, scores: Tensor, tail: Tensor | None
    ) -> Tensor:
        """From the teacher's scores at `ids` `[b, s, k]`, −inf where there is no token: logits or log-probs that are
        renormalised, or log-probs beside that of all other tokens."""
        none = scores == -torch.inf
        if tail is None:
            mine = gather(logits, ids.masked_fill(none, 0), shard=shard).masked_fill(none, -torch.inf)
            temperature = self.temperature
        else:
            at, rest = log_probs_and_tail(logits, ids.masked_fill(none, -1), shard=shard, temperature=self.temperature)
            mine, scores = (torch.cat([x, y[..., None]], -1) for x, y in ((at, rest), (scores, tail)))
            temperature = 1.0
        mine = mine.to(torch.promote_types(mine.dtype, torch.float32))
        k = mine.shape[-1]
        return generalized_jsd(
            mine, scores, shard=VocabShard(0, k, k), beta=self.beta, temperature=temperature, mask=mask
        )

    def _teacher(self, given: Mapping[str, Any], shard: VocabShard) -> tuple[Logits, VocabShard]:
        """The teacher's logits or head, and which ids they are."""
        teacher, told = given.get('teacher', given.get('teacher_logits')), None
        if isinstance(teacher, Mapping):
            teacher, told = teacher.get('logits'), teacher.get('vocab_shard')
        if isinstance(teacher, TeacherHead):
            teacher, told = teacher.head, teacher.shard
        if not isinstance(teacher, (Tensor, LinearHead)):
            raise ValueError(
                f"teacher must be a LinearHead, or outputs with 'logits', for each micro-batch, got "
                f'{type(teacher).__name__}'
            )
        size = local_size(teacher)
        if told is None and size == shard.local_size:
            told = shard
        if told is None:
            if size not in self._shards:
                self._shards[size] = VocabShard.from_group(size, shard.group)
            told = self._shards[size]
        return teacher, told

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, **extra: Any) -> LossOutput:
        logits = outputs.get('logits')
        if logits is None:
            raise ValueError(
                f"outputs must hold 'logits', of which GKDLoss compares all, got the keys {sorted(outputs)}"
            )
        batch, given = self.aligned(inputs, extra, training=torch.is_grad_enabled())
        batch = replace(batch, labels=batch.labels.to(logits.device))
        shard = outputs.get('vocab_shard') or VocabShard.from_group(local_size(logits), tensor_parallel_group())
        loss = self.contribution(batch, TokenStats(), logits=logits, shard=shard, **given)
        return LossOutput(loss=loss, num_tokens=0)


def _checked_k(k: Any) -> int | None:
    if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
        raise ValueError(f'topk must be an int >= 1, or None, got {k!r}')
    return k


def _sound(ids: Tensor, scores: Tensor, mask: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of an API at every token `[b, s, k]`, −inf where they do not count. ValueError for ids that are
    none, occur twice or are missing at a token that counts. One host read."""
    if ids.shape != scores.shape or ids.dim() != mask.dim() + 1 or ids.shape[-1] == 0:
        raise ValueError(
            'teacher_topk_indices and teacher_topk_logprobs must both be [b, s, k] with k >= 1, got '
            f'{tuple(ids.shape)} and {tuple(scores.shape)}'
        )
    scores = scores.masked_fill(~mask[..., None], -torch.inf)
    told = scores > -torch.inf
    if ids.dtype.is_floating_point and told.any():  # of nothing they have no dtype
        raise ValueError(f'teacher_topk_indices must be integer ids, got {ids.dtype}')
    ids = torch.where(told, ids, 0).long()
    ordered = torch.where(told, ids, -1 - torch.arange(ids.shape[-1], device=ids.device)).sort(-1).values
    faults = torch.stack([
        (told & ((ids < 0) | (ids >= vocab_size))).any(),
        (ordered[..., 1:] == ordered[..., :-1]).any(),
        (mask & ~told.any(-1)).any(),
        (scores.isnan() | (scores == torch.inf)).any(),
    ]).tolist()  # fmt: skip
    said = (
        f'teacher_topk_indices must lie in [0, {vocab_size}), the ids that the student knows',
        'teacher_topk_indices of one token must differ',
        'teacher_topk_logprobs must hold a log-prob at every trained token; give its label ignore_index where there is '
        'none',
        'teacher_topk_logprobs must be log-probs, got NaN or +inf',
    )
    for wrong, message in zip(faults, said):
        if wrong:
            raise ValueError(message)
    return ids, scores
