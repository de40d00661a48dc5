"""The teacher of a distillation: its linear heads for the micro-batches of a `MegatronModel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .batch import TokenBatch
from .evaluation import Evaluation, Seen
from .loss.base import SweepLoss
from .loss.gkd import TeacherHead
from .megatron.engine import NO_EXTRAS, Engine
from .vocab_parallel import LinearHead, Logits, TokenStats, VocabShard, recut
from .vocab_parallel.divergence import same_cuts


class Teacher:
    """A frozen model in the layout of a `MegatronModel`, from whose distributions that one learns.

    Made by `MegatronModel.teacher`. Of each micro-batch only its hidden states are kept, `[tokens, H]`, never logits.
    """

    def __init__(self, engine: Engine, student: Engine, like: Callable[[], Evaluation]) -> None:
        self._engine, self._student, self._like = engine, student, like
        self._same: bool | None = None
        self._recut: dict[int, Tensor] = {}

    def heads(
        self, inputs: Any, micro_batch_size: int | None = None, *, max_tokens_per_micro_batch: int | None = None
    ) -> list[TeacherHead]:
        """The teacher's last hidden states and output layer for each micro-batch, for the keyword `teacher` of a call
        with `GKDLoss` over the same inputs, before which they are let go of.

        On the last stage one a micro-batch, of this rank's tokens; elsewhere none. If the teacher's output layer is
        padded in another way than the student's, its weight is cut anew at the first call. Collective: all ranks call
        it, with the inputs that `forward_backward` gets, cut into the same micro-batches.
        """
        like = self._like()
        collect = _Collect(like.ignore_index, like.labelling.layout)
        evaluation = _HeadsOnly(collect, [], self._engine.groups, self._engine.shard, {})
        plan = self._engine.plan(
            inputs, micro_batch_size, NO_EXTRAS, evaluation, training=False, max_tokens=max_tokens_per_micro_batch
        )
        self._engine.forward(plan, evaluation)
        return [self._cut_like_student(*found) for found in collect.found]

    def _cut_like_student(self, head: LinearHead, shard: VocabShard) -> TeacherHead:
        wanted = self._student.own_shard
        if self._same is None:
            self._same = wanted is None or same_cuts(shard, wanted)
        if wanted is None or self._same:
            return TeacherHead(head, shard)
        for name in ('weight', 'bias'):
            rows = getattr(head, name)
            if rows is not None:
                if rows.data_ptr() not in self._recut:
                    self._recut[rows.data_ptr()] = recut(rows, shard, wanted)
                setattr(head, name, self._recut[rows.data_ptr()])
        largest = self._student.padded_vocab_size or wanted.vocab_size
        return TeacherHead(head, replace(wanted, vocab_size=min(shard.vocab_size, largest)))


class _HeadsOnly(Evaluation):
    """Looks at no logits."""

    def see(self, model: Any, logits: Logits, batch: dict[str, Any]) -> Seen:
        like = batch['labels']
        return Seen(logits, self.shard_of(logits), TokenStats(log_prob=torch.zeros(like.shape, device=like.device)))


class _Collect(SweepLoss):
    """Keeps the head of every micro-batch."""

    reads_logits = True

    def __init__(self, ignore_index: int, layout: str | None) -> None:
        super().__init__(ignore_index)
        self.layout = layout
        self.found: list[tuple[LinearHead, VocabShard]] = []

    def contribution(
        self,
        batch: TokenBatch,
        stats: TokenStats,
        logits: Logits | None = None,
        shard: VocabShard | None = None,
        **extra: Any,
    ) -> Tensor:
        assert isinstance(logits, LinearHead)
        assert shard is not None
        head = LinearHead(
            logits.hidden.detach(),
            logits.weight.detach(),
            bias=None if logits.bias is None else logits.bias.detach(),
            sequence_parallel=logits.sequence_parallel,
            logit_scale=logits.logit_scale,
            max_workspace_mb=logits.max_workspace_mb,
        )
        head.order = logits.order
        self.found.append((head, shard))
        return torch.zeros((), device=logits.device)
