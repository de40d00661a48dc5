"""One set of model chunks and how to run calls on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..evaluation import Evaluation
from ..groups import Groups, group_size
from ..vocab_parallel import VocabShard
from . import checks
from .head_choice import HeadChoice
from .heads import TakeHead, check_no_hook
from .plan import Extras, Limits, Plan, make_plan
from .schedule import Outcome, Runner

NO_EXTRAS = Extras({}, {})


class Engine:
    """This rank's chunks, ready for calls: plans them, chooses the head, runs Megatron's schedule.

    Args:
        chunks: as they go to the schedule.
        groups: of this rank.
        collection: Megatron's, where its global state is not used.
        vocab_size: the true one; None: the model's.
        head, max_workspace_mb: see `MegatronModel`.
        optimizer: whose gradients the chunks have; None where they are not trained.
        trains: whether gradients are wanted, for which bare chunks will often not do.
    """

    def __init__(
        self,
        chunks: Any,
        groups: Groups,
        collection: Any = None,
        *,
        vocab_size: int | None = None,
        head: str = 'auto',
        max_workspace_mb: float | None = None,
        scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
        optimizer: Any = None,
        trains: bool = True,
    ) -> None:
        self.chunks: list[Any] = list(chunks) if isinstance(chunks, (list, tuple, torch.nn.ModuleList)) else [chunks]
        self.groups, self._collection = groups, collection
        self._head, self._max_workspace_mb = head, max_workspace_mb
        self.models, self.config = checks.unwrap(self.chunks)
        checks.check_chunks(self.chunks, self.models, self.config, groups, optimizer, trains)
        self.padded_vocab_size: int | None = getattr(self.models[0], 'vocab_size', None)
        checks.check_vocab_size(vocab_size, self.padded_vocab_size)
        self.vocab_size = vocab_size if vocab_size is not None else self.padded_vocab_size
        self._head_choice = HeadChoice(head, self.models, self.config, groups, max_workspace_mb)
        self.runner = Runner(self.chunks, self.models, self.config, groups, collection, scale_loss)
        self._limits = Limits.of(self.models[0], self.config, groups, self.vocab_size, len(self.chunks))
        self._shards: dict[int, VocabShard] = {}

    @property
    def own_shard(self) -> VocabShard | None:
        """This rank's, where the model tells its vocabulary size."""
        padded = self.padded_vocab_size
        return None if padded is None else self.shard(padded // group_size(self.groups.tp))

    def beside(self, chunks: Any, head: str | None = None, vocab_size: int | None = None) -> Engine:
        """Another one in the same layout, for chunks that are not trained; by default with this one's settings."""
        return Engine(
            chunks,
            self.groups,
            self._collection,
            vocab_size=vocab_size or self.vocab_size,
            head=head or self._head,
            max_workspace_mb=self._max_workspace_mb,
            trains=False,
        )

    def plan(
        self, inputs: Any, micro_batch_size: int | None, extra: Extras, evaluation: Evaluation, training: bool
    ) -> Plan:
        """See `make_plan`. Keywords are looked at on the last stage alone, where they are used: the other stages need
        not have them."""

        def check() -> None:
            check_no_hook(self.models)
            checks.check_extra(evaluation.loss, extra.given, extra.kinds)
            if self.groups.is_last_stage:
                checks.check_call(evaluation.loss, extra.given, training)

        return make_plan(
            inputs,
            micro_batch_size,
            extra if self.groups.is_last_stage else extra._replace(given={}),
            self.groups,
            self._limits,
            evaluation.ignore_index,
            needs_labels=True,
            layout=evaluation.layout,
            check=check,
        )

    def forward_backward(self, plan: Plan, evaluation: Evaluation, scale: float, sync: bool) -> Outcome:
        """Adds `scale` times the gradient of the global loss; see `Runner.run`."""
        take_head = self._head_for(plan, evaluation)
        return self.runner.run(plan, evaluation, training=True, scale=scale, sync=sync, take_head=take_head)

    @torch.no_grad()
    def forward(self, plan: Plan, evaluation: Evaluation) -> Outcome:
        """In eval mode, without gradients."""
        if not plan.items:
            return self.nothing(plan)
        with _eval_mode(self.chunks):
            take_head = self._head_for(plan, evaluation)
            return self.runner.run(plan, evaluation, training=False, take_head=take_head)

    def nothing(self, plan: Plan) -> Outcome:
        """Of a global batch in which nothing is trained."""
        zeros = [torch.zeros(item.shape) for item in plan.items if not item.is_padding]
        return Outcome(0.0, zeros if self.groups.is_last_stage else [])

    def shard(self, local_size: int) -> VocabShard:
        """This rank's, for logits of so many columns."""
        if local_size not in self._shards:
            self._shards[local_size] = checks.vocab_shard(
                local_size, self.groups.tp, self.vocab_size, self.padded_vocab_size
            )
        return self._shards[local_size]

    def _head_for(self, plan: Plan, evaluation: Evaluation) -> TakeHead:
        """How to take the head; a loss that couples several micro-batches gets its totals first."""
        take_head = self._head_choice.taken(plan.most_tokens)
        if evaluation.couples and plan.micro_batches > 1:
            evaluation.totals = self.runner.first_pass(plan, evaluation, take_head)
        return take_head


@contextmanager
def _eval_mode(chunks: Sequence[Any]) -> Iterator[None]:
    """Every module in eval mode, and afterwards in the mode it was in: some may be frozen in eval mode."""
    modes = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
