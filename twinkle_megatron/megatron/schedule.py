"""Runs Megatron's own pipeline schedule so that the gradient is that of the global loss, and no error hangs a rank.

The global counts are known before the schedule starts (see plan.py), so a micro-batch's loss is a plain summand of the
global loss. Megatron then multiplies what it is given, depending on `calculate_per_token_loss`:

    False:  gradient of Σ L / (M · dp)        so L = M · dp · summand
    True:   gradient of Σ L, divided later    so L = G · summand, and G is divided out after finalisation

over M micro-batches and dp data parallel ranks; G is the token count, so that auxiliary losses keep Megatron's own
scale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import targets_of
from ..evaluation import Evaluation
from ..groups import Groups, group_rank, group_size, raise_together
from ..loss.infonce import Coupled
from ..seen import Pooled, Seen
from ..vocab_parallel import labels
from .forward_step import ForwardStep, Progress, Watched, device_of
from .heads import TakeHead, logits_taken
from .plan import Plan
from .randomness import same_random_numbers
from .restore import restored


class Outcome(NamedTuple):
    """Of one call: the global loss, the same on every rank, and on the last stage of each micro-batch the log-probs
    `[b, s]`, or what the head gives in their place."""

    loss: float
    results: list[Tensor]


class Runner:
    """Runs plans on this rank's model chunks.

    Args:
        chunks: as they go to the schedule, wrapped in Megatron's DDP or bare.
        models: the same chunks, unwrapped.
        config: the chunks' TransformerConfig; some fields are replaced while a schedule runs.
        groups: process groups of this rank.
        pg_collection: passed on to Megatron where its global state is not used.
        scale_loss: the optimizer's loss scaling, taken where the config has no `grad_scale_func`.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        models: Sequence[Any],
        config: Any,
        groups: Groups,
        pg_collection: Any = None,
        scale_loss: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.chunks, self.models, self.config, self.groups = list(chunks), list(models), config, groups
        self._collection, self._scale_loss = pg_collection, scale_loss
        self._finalize: Callable[[], None] | None = None
        self.device = device_of(self.models[0])
        self.watched: Watched | None = None

    @property
    def per_token(self) -> bool:
        """Megatron's `calculate_per_token_loss`."""
        return bool(getattr(self.config, 'calculate_per_token_loss', False))

    def _factor(self, plan: Plan, scale: float) -> float:
        """What a summand is multiplied by so that Megatron's own arithmetic leaves `scale` times its gradient."""
        return scale if self.per_token else scale * len(plan.items) * group_size(self.groups.dp)

    @property
    def reduces(self) -> bool:
        """Whether the chunks are wrapped in Megatron's DDP, which reduces gradients over ranks."""
        return is_ddp(self.chunks[0])

    def gradient_buffers(self) -> list[Tensor]:
        """The storage of all gradients of DDP-wrapped chunks."""
        return [
            buffer.grad_data for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    def run(
        self,
        plan: Plan,
        evaluation: Evaluation,
        training: bool,
        scale: float = 1.0,
        sync: bool = False,
        take_head: TakeHead = logits_taken,
        progress: Progress | None = None,
    ) -> Outcome:
        """Forward, and backward when training, of every micro-batch of the plan.

        Adds `scale` times the gradient of the global loss to the gradients of the chunks; with `sync` they are
        finalised. `take_head` is how the last stage hands over its logits. An exception that the loss, a metric or the
        head threw on one rank is raised on all of them after the schedule has ended, with the gradients zeroed.
        Collectives: Megatron's, and one all-gather over the layout.
        """
        factor = self._factor(plan, scale)
        call = self._call(plan, evaluation, factor, progress)
        self._schedule(call, training, sync, take_head)
        (loss,) = self._agree(call, training, sync)
        if training and sync:
            self.finalize(started=True)
        return Outcome(loss, self._whole_sequences(call))

    def _call(
        self, plan: Plan, evaluation: Evaluation, factor: float = 1.0, progress: Progress | None = None
    ) -> ForwardStep:
        own = self.models, self.config, self.groups
        return ForwardStep(*own, plan, evaluation, factor, progress, self.watched)

    @torch.no_grad()
    def look(self, plan: Plan, evaluation: Evaluation, take_head: TakeHead) -> tuple[list[Tensor], list[Seen | Pooled]]:
        """The outputs of every micro-batch, and on the last stage what the loss can be computed from later. The pass
        after it draws the same random numbers."""
        call = self._call(plan, evaluation.looking())
        with same_random_numbers():
            self._schedule(call, training=False, sync=False, take_head=take_head)
        self._agree(call, training=False, sync=False)
        return self._whole_sequences(call), call.kept

    def revisit(self, plan: Plan, evaluation: Evaluation, kept: Sequence[Seen | Pooled]) -> list[float]:
        """The global loss, or the totals of a first pass, from what `look` kept. Collective over the layout."""
        call = self._call(plan, evaluation)
        items = [item for item in plan.items if not item.is_padding]
        for item, seen in zip(items, kept):
            call.revisit(item, seen)
        return self._agree(call, training=False, sync=False)

    @torch.no_grad()
    def first_pass(self, plan: Plan, evaluation: Evaluation, take_head: TakeHead = logits_taken) -> Tensor:
        """The totals of a loss that couples its batch, float64 `[k]`, the same on every rank: one more forward pass of
        every micro-batch, whose random numbers the pass after it draws again."""
        first = evaluation.first_pass()
        call = self._call(plan, first)
        with same_random_numbers():
            self._schedule(call, training=False, sync=False, take_head=take_head)
        return torch.tensor(self._agree(call, training=False, sync=False), dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def couple(self, plan: Plan, evaluation: Evaluation, take_head: TakeHead, training: bool) -> list[Coupled]:
        """What a loss over the embeddings of the global batch finds in each micro-batch of this replica, on the last
        stage: one more forward pass, whose random numbers the pass after it draws again, then a gather over DP."""
        call = self._call(plan, evaluation.pooled())
        with same_random_numbers():
            self._schedule(call, training=False, sync=False, take_head=take_head)
        self._agree(call, training=False, sync=False)
        return self.coupled(plan, evaluation, call.results, training)

    def coupled(self, plan: Plan, evaluation: Evaluation, results: Sequence[Tensor], training: bool) -> list[Coupled]:
        """The same, from the embeddings of this replica's micro-batches. Collective over the layout."""
        if not self.groups.is_last_stage:
            raise_together(self.groups, None)
            return []
        batches = [item.batch for item in plan.items if not item.is_padding]
        sizes = [len(result) for result in results]
        dtype = next((p.dtype for p in self.models[-1].parameters()), torch.float32)
        none = torch.empty(0, 0, device=self.device, dtype=torch.promote_types(dtype, torch.float32))
        embeddings = torch.cat(list(results)) if sizes else none
        starts = [
            targets.to(self.device).reshape(-1) for batch in batches if (targets := targets_of(batch)) is not None
        ]
        error: Exception | None = None
        found = None
        try:
            with torch.set_grad_enabled(training):
                found = evaluation.couple(embeddings, torch.cat(starts) if starts else none.reshape(-1))
        except Exception as caught:  # raised on every rank
            error = caught
        raise_together(self.groups, error)
        assert found is not None
        anchors = [int((part != 0).sum()) for part in starts]
        losses = found.losses.split(anchors)
        gradients = [None] * len(sizes) if found.gradient is None else found.gradient.split(sizes)
        return [found._replace(losses=mine, gradient=its) for mine, its in zip(losses, gradients)]

    def finalize(self, started: bool) -> None:
        """Megatron's reductions of the accumulated gradients, without a division: the token counts of several calls are
        summed first. Nothing for bare chunks. Collective over the layout.

        `started`: the schedule that just ended has started those reductions that overlap with the backward pass.
        """
        if self._finalize is None:
            return
        if not started:
            for chunk in self.chunks:
                if chunk.ddp_config.overlap_grad_reduce:
                    chunk.start_grad_sync()
        self._finalize()

    def zero_gradients(self) -> None:
        """Zeroes the gradients of every chunk."""
        for chunk in self.chunks:
            if is_ddp(chunk):
                chunk.zero_grad_buffer()
            else:
                chunk.zero_grad(set_to_none=True)

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the gradients of every chunk."""
        for chunk in self.chunks:
            if is_ddp(chunk):
                chunk.scale_gradients(factor)
            else:
                for parameter in chunk.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)

    def _schedule(self, call: ForwardStep, training: bool, sync: bool, take_head: TakeHead) -> None:
        """Runs the schedule; finalisation is put off until it is known that no rank has failed."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        own_finalize = self.config.finalize_model_grads_func
        if own_finalize is None:
            from megatron.core.distributed import finalize_model_grads as own_finalize

        def put_off(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
            self._finalize = lambda: own_finalize(model, None, **kwargs)

        changes: dict[str, Any] = {'finalize_model_grads_func': put_off if self.reduces else None}
        if self.config.grad_scale_func is None:
            changes['grad_scale_func'] = self._scale_loss
        overlapped = any(getattr(getattr(c, 'ddp_config', None), 'overlap_grad_reduce', False) for c in self.chunks)
        if not sync:
            changes.update(no_sync_func=None, grad_sync_func=None)
        elif overlapped and self.config.no_sync_func is None:
            syncs = [chunk.no_sync for chunk in self.chunks]
            changes['no_sync_func'] = syncs if len(syncs) > 1 else syncs[0]
        items = call.plan.items
        shape = items[0].batch['input_ids'].shape
        with contextlib.ExitStack() as stack:
            stack.enter_context(_changed(self.config, changes))
            if not sync and overlapped:
                for chunk in self.chunks:
                    stack.enter_context(chunk.no_sync())
            for model in self.models:
                if call.is_hooked(model):
                    stack.enter_context(take_head(model, call.on_logits))
            stack.enter_context(_told_where(self.groups))
            iterators = [iter(items) for _ in self.chunks]
            get_forward_backward_func(*self._pipeline_sizes())(
                forward_step_func=call,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(items),
                seq_length=int(shape[1]),
                micro_batch_size=int(shape[0]),
                forward_only=not training,
                **self._without_globals(),
            )

    def _pipeline_sizes(self) -> tuple[Any, ...]:
        if self._collection is None:
            return ()
        return group_size(self.groups.pp), len(self.chunks) if len(self.chunks) > 1 else None

    def _without_globals(self) -> dict[str, Any]:
        if self._collection is None:
            return {}
        out: dict[str, Any] = {'pg_collection': self._collection}
        if group_size(self.groups.pp) > 1:
            from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

            assert self.groups.pp is not None
            out['p2p_communicator'] = P2PCommunicator(self.groups.pp, self.config)
        return out

    def _agree(self, call: ForwardStep, training: bool, sync: bool) -> list[float]:
        """The global loss, or the totals of a first pass; if any rank failed, zero gradients and the same exception on
        every rank."""
        try:
            labels.raise_pending(wait=True)  # a host read follows anyway
        except ValueError as error:
            call.error = call.error or error
        owned = call.loss if self.groups.owns_result else torch.zeros_like(call.loss)
        failed = torch.tensor([float(call.error is not None)], dtype=torch.float64, device=self.device)
        *sums, failures = self.groups.gather_everyone(torch.cat([owned, failed])).sum(0).tolist()
        if failures:
            if training:
                if sync:
                    self.finalize(started=True)  # completes reductions that overlap with the backward pass
                self.zero_gradients()
            raise_together(self.groups, call.error)
        return sums

    def _whole_sequences(self, call: ForwardStep) -> list[Tensor]:
        """Each real micro-batch's log-probs or values as whole sequences in input order; a collective over CP on the
        last stage. What is one a sequence already is as it is."""
        out = []
        for item, local in zip(call.plan.items, call.results):
            if not call.per_token:
                out.append(local)
                continue
            out.append(restored(item, local, self.groups.cp))
        return out


def is_ddp(chunk: Any) -> bool:
    """Whether the chunk is wrapped in Megatron's DistributedDataParallel."""
    return callable(getattr(chunk, 'finish_grad_sync', None)) and callable(getattr(chunk, 'scale_gradients', None))


@contextlib.contextmanager
def _changed(config: Any, changes: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(config, name) for name in changes}
    for name, value in changes.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@contextlib.contextmanager
def _told_where(groups: Groups) -> Iterator[None]:
    """Adds to an exception out of the schedule which rank of which groups it came from."""
    try:
        yield
    except Exception as error:
        names = ('tp', 'pp', 'cp', 'dp')
        where = ', '.join(f'{n} {group_rank(getattr(groups, n))} of {group_size(getattr(groups, n))}' for n in names)
        error.add_note(
            f"in Megatron's pipeline schedule on the rank {where}. A timeout or a lost connection here means that "
            'another rank of one of these groups failed or stopped first: look for its error'
        )
        raise
