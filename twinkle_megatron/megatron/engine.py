"""One set of model chunks and how to run calls on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..evaluation import Evaluation
from ..groups import Groups, group_size
from ..seen import Pooled, PooledHead, Seen
from ..vocab_parallel import VocabShard
from . import checks
from .embedding import EmbeddingHead, ScalarHead, value_head_of
from .forward_step import Progress
from .head_choice import HeadChoice
from .heads import TakeHead, check_no_hook, head_taken
from .plan import Extras, Limits, Plan, make_plan
from .randomness import same_random_numbers
from .schedule import Outcome, Runner

NO_EXTRAS = Extras({}, {})
AUTO = "'auto'"


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
        head: str | PooledHead = 'auto',
        max_workspace_mb: float | None = None,
        scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
        optimizer: Any = None,
        trains: bool = True,
    ) -> None:
        self.chunks: list[Any] = list(chunks) if isinstance(chunks, (list, tuple, torch.nn.ModuleList)) else [chunks]
        self.groups, self._collection, self._optimizer = groups, collection, optimizer
        self._max_workspace_mb = max_workspace_mb
        self.models, self.config = checks.unwrap(self.chunks)
        checks.check_chunks(self.chunks, self.models, self.config, groups, optimizer, trains)
        self.padded_vocab_size: int | None = getattr(self.models[0], 'vocab_size', None)
        checks.check_vocab_size(vocab_size, self.padded_vocab_size)
        self.vocab_size = vocab_size if vocab_size is not None else self.padded_vocab_size
        self.set_head(head)
        self.runner = Runner(self.chunks, self.models, self.config, groups, collection, scale_loss)
        self._limits = Limits.of(self.models[0], self.config, groups, self.vocab_size, len(self.chunks))
        self._shards: dict[int, VocabShard] = {}

    def set_head(self, head: str | PooledHead) -> None:
        """What the last stage hands over; see `MegatronModel`."""
        if not isinstance(head, str | PooledHead):
            raise ValueError(
                "head must be 'auto', 'logits', 'linear', or an instance of EmbeddingHead or ScalarHead, got "
                f'{head.__name__ + ", the class" if isinstance(head, type) else repr(head)}'
            )
        self.pooled = head if isinstance(head, PooledHead) else None
        self._vocabulary = head if isinstance(head, str) else 'auto'
        self.head_choice = HeadChoice(self._vocabulary, self.models, self.config, self.groups, self._max_workspace_mb)

    def head_for(self, loss: Any) -> PooledHead | None:
        """What stands in place of the logits for this loss: the head that was set, else what the loss asks for.
        ValueError where they do not go together."""
        reads = getattr(loss, 'reads', None)
        name = type(loss).__name__
        if self.pooled is not None:
            if reads is not None and self.pooled.gives not in reads:
                raise ValueError(
                    f'{name} is computed from {" or ".join(reads)}, but the model has {self.pooled!r}, which gives '
                    f'{self.pooled.gives}; set another loss, or another head: model.set_head('
                    f'{"EmbeddingHead()" if "embeddings" in reads else "ScalarHead()" if "values" in reads else AUTO})'
                )
            return self.pooled
        if reads is None or 'logits' in reads:
            return None
        return {'embeddings': EmbeddingHead, 'values': ScalarHead}[reads[0]]()

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
            head=head or self._vocabulary,
            max_workspace_mb=self._max_workspace_mb,
            trains=False,
        )

    def plan(
        self,
        inputs: Any,
        micro_batch_size: int | None,
        extra: Extras | None,
        evaluation: Evaluation,
        training: bool,
        max_tokens: int | None = None,
    ) -> Plan:
        """See `make_plan`. Keywords are looked at on the last stage alone, where they are used: the other stages need
        not have them. None: they come later."""
        known = NO_EXTRAS if extra is None else extra

        def check() -> None:
            check_no_hook(self.models)
            obstacle = None if evaluation.head is None else self._obstacle(evaluation.head)
            if obstacle is not None:
                raise ValueError(f'{evaluation.head!r} cannot be had: {obstacle}')
            checks.check_extra(evaluation.loss, known.given, known.kinds)
            if self.groups.is_last_stage and extra is not None:
                checks.check_call(evaluation.loss, known.given, training)

        return make_plan(
            inputs,
            micro_batch_size,
            known if self.groups.is_last_stage else known._replace(given={}),
            self.groups,
            self._limits,
            evaluation.labelling,
            check=check,
            max_tokens=max_tokens,
        )

    def forward_backward(
        self, plan: Plan, evaluation: Evaluation, scale: float, sync: bool, progress: Progress | None = None
    ) -> Outcome:
        """Adds `scale` times the gradient of the global loss; see `Runner.run`."""
        take_head = self._head_for(plan, evaluation, training=True)
        return self.runner.run(
            plan, evaluation, training=True, scale=scale, sync=sync, take_head=take_head, progress=progress
        )

    @torch.no_grad()
    def forward(self, plan: Plan, evaluation: Evaluation, progress: Progress | None = None) -> Outcome:
        """In eval mode, without gradients."""
        if not plan.items:
            return self.nothing(plan, evaluation)
        with _eval_mode(self.chunks):
            take_head = self._head_for(plan, evaluation, training=False)
            return self.runner.run(plan, evaluation, training=False, take_head=take_head, progress=progress)

    def look(self, plan: Plan, evaluation: Evaluation) -> tuple[Outcome, list[Seen | Pooled]]:
        """The outputs in the mode that the chunks are in, and what the loss can be computed from."""
        if not plan.items:
            return self.nothing(plan, evaluation), []
        take_head = self._taken(plan, evaluation)
        results, kept = self.runner.look(plan, evaluation, take_head)
        return Outcome(0.0, results), kept

    @torch.no_grad()
    def revisit(self, plan: Plan, evaluation: Evaluation, kept: list[Seen | Pooled]) -> float:
        """The loss of micro-batches that were looked at. Another forward pass only for one that reads logits."""
        if not plan.items:
            return 0.0
        if not evaluation.can_be_revisited:
            with same_random_numbers():
                return self.runner.run(plan, evaluation, False, take_head=self._head_for(plan, evaluation, False)).loss
        if evaluation.gathers:
            found = [seen.result for seen in kept]
            evaluation.coupled = self.runner.coupled(plan, evaluation, found, training=False)
        elif evaluation.couples and plan.micro_batches > 1:
            totals = self.runner.revisit(plan, evaluation.first_pass(), kept)
            evaluation.totals = torch.tensor(totals, dtype=torch.float64, device=self.runner.device)
        return self.runner.revisit(plan, evaluation, kept)[0]

    def nothing(self, plan: Plan, evaluation: Evaluation) -> Outcome:
        """Of a global batch in which nothing is trained: no outputs of a head."""
        wanted = evaluation.head is None and self.groups.is_last_stage
        return Outcome(0.0, [torch.zeros(item.shape) for item in plan.items if not item.is_padding and wanted])

    def shard(self, local_size: int) -> VocabShard:
        """This rank's, for logits of so many columns."""
        if local_size not in self._shards:
            self._shards[local_size] = checks.vocab_shard(
                local_size, self.groups.tp, self.vocab_size, self.padded_vocab_size
            )
        return self._shards[local_size]

    def _obstacle(self, head: PooledHead) -> str | None:
        """What keeps this rank from having it."""
        if not self.groups.is_last_stage:
            return None
        model = self.models[-1]
        return head.why_not(model) or self._untrained(value_head_of(model) if isinstance(head, ScalarHead) else [])

    def _untrained(self, parameters: Sequence[torch.nn.Parameter]) -> str | None:
        """Whether parameters were made too late for their gradients to reach the optimizer."""
        wanted = [p for p in parameters if p.requires_grad]
        late = 'the value head was added too late to be trained: call add_value_head before '
        if self.runner.reduces and any(not hasattr(p, 'main_grad') for p in wanted):
            return late + 'the chunk is wrapped in DistributedDataParallel'
        groups = [] if self._optimizer is None or self.runner.reduces else self._optimizer.param_groups
        held = {id(p) for group in groups for p in group['params']}
        if groups and any(id(p) not in held for p in wanted):
            return late + 'the optimizer is made'
        return None

    def _taken(self, plan: Plan, evaluation: Evaluation) -> TakeHead:
        return head_taken if evaluation.head is not None else self.head_choice.taken(plan.most_tokens)

    def _head_for(self, plan: Plan, evaluation: Evaluation, training: bool) -> TakeHead:
        """How to take the head; a loss that couples several micro-batches gets what they have in common first."""
        take_head = self._taken(plan, evaluation)
        if evaluation.gathers and not plan.one_each:
            evaluation.coupled = self.runner.couple(plan, evaluation, take_head, training)
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
