"""Runs Megatron's own pipeline schedule so that the gradient is that of the global loss, and no error hangs a rank.

The global counts are known before the schedule starts (see plan.py), so a micro-batch's loss is a plain summand of the
global loss. Megatron then multiplies what it is given, depending on `calculate_per_token_loss`:

    False:  gradient of Σ L / (M · dp)        so L = M · dp · summand
    True:   gradient of Σ L, divided later    so L = G · summand, and G is divided out after finalisation

over M micro-batches and dp data parallel ranks; G is the token count, so that auxiliary losses keep Megatron's own scale.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batch import join_context, split_context
from ..evaluation import Evaluation, Seen, nothing
from ..groups import Groups, all_gather_rows, group_rank, group_size, raise_together
from .heads import has_loss_hook, logits_taken
from .plan import Item, Plan


class Outcome(NamedTuple):
    """Of one call: the global loss, the same on every rank, and on the last stage each micro-batch's log-probs `[b, s]`."""

    loss: float
    logps: list[Tensor]


class Runner:
    """Runs plans on this rank's model chunks.

    Args:
        chunks: as they go to the schedule, wrapped in Megatron's DDP or bare.
        models: the same chunks, unwrapped.
        config: the chunks' TransformerConfig; some fields are replaced while a schedule runs.
        groups: process groups of this rank.
        pg_collection: passed on to Megatron where its global state is not used.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        models: Sequence[Any],
        config: Any,
        groups: Groups,
        pg_collection: Any = None,
    ) -> None:
        self.chunks, self.models, self.config, self.groups = list(chunks), list(models), config, groups
        self._collection = pg_collection
        self._finalize: Callable[[], None] | None = None
        self.accepts = _forward_arguments(self.models[0])
        self.device = next((p.device for p in self.models[0].parameters()), torch.device('cpu'))

    @property
    def per_token(self) -> bool:
        """Megatron's `calculate_per_token_loss`."""
        return bool(getattr(self.config, 'calculate_per_token_loss', False))

    @property
    def reduces(self) -> bool:
        """Whether the chunks are wrapped in Megatron's DDP, which reduces gradients over ranks."""
        return is_ddp(self.chunks[0])

    def gradient_buffers(self) -> list[Tensor]:
        """The storage of all gradients of DDP-wrapped chunks."""
        return [buffer.grad_data for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def run(self, plan: Plan, evaluation: Evaluation, training: bool, scale: float, sync: bool) -> Outcome:
        """Forward, and backward when training, of every micro-batch of the plan.

        Adds `scale` times the gradient of the global loss to the gradients of the chunks; with `sync` they are finalised.
        An exception that the loss, a metric or the head threw on one rank is raised on all of them after the schedule has
        ended, with the gradients zeroed. Collectives: Megatron's, and one all-gather over the layout.
        """
        call = _Call(self, plan, evaluation, scale)
        self._schedule(call, training, sync)
        loss = self._agree(call, training, sync)
        if training and sync:
            self.finalize(started=True)
        return Outcome(loss, self._whole_sequences(call))

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

    def _schedule(self, call: _Call, training: bool, sync: bool) -> None:
        """Runs the schedule; finalisation is put off until it is known that no rank has failed."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        own_finalize = self.config.finalize_model_grads_func
        if own_finalize is None:
            from megatron.core.distributed import finalize_model_grads as own_finalize

        def put_off(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
            self._finalize = lambda: own_finalize(model, None, **kwargs)

        changes: dict[str, Any] = {'finalize_model_grads_func': put_off if self.reduces else None}
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
                    stack.enter_context(logits_taken(model, call.on_logits))
            iterators = [iter(items) for _ in self.chunks]
            get_forward_backward_func(*self._pipeline_sizes())(
                forward_step_func=call.forward_step,
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

            out['p2p_communicator'] = P2PCommunicator(self.groups.pp, self.config)
        return out

    def _agree(self, call: _Call, training: bool, sync: bool) -> float:
        """The global loss; or, if any rank failed, gradients zeroed and the same exception on every rank."""
        owned = call.loss if self.groups.owns_result else torch.zeros((), dtype=torch.float64, device=self.device)
        failed = torch.tensor(float(call.error is not None), dtype=torch.float64, device=self.device)
        table = self.groups.gather_everyone(torch.stack([owned.to(self.device), failed])).sum(0).tolist()
        if table[1]:
            if training:
                if sync:
                    self.finalize(started=True)  # completes reductions that overlap with the backward pass
                self.zero_gradients()
            raise_together(self.groups, call.error)
        return table[0]

    def _whole_sequences(self, call: _Call) -> list[Tensor]:
        """Each real micro-batch's log-probs as whole sequences in input order; a collective over CP on the last stage."""
        out = []
        for item, local in zip(call.plan.items, call.logps):
            whole = join_context(all_gather_rows(local, self.groups.cp))
            out.append(whole[: item.shape[0], : item.shape[1]])
        return out


class _Call:
    """The state of one run of the schedule on this rank."""

    def __init__(self, runner: Runner, plan: Plan, evaluation: Evaluation, scale: float) -> None:
        self.runner, self.plan, self.evaluation = runner, plan, evaluation
        self.error: Exception | None = None
        self.loss = torch.zeros((), dtype=torch.float64, device=runner.device)
        self.logps: list[Tensor] = []
        self._scale = scale if runner.per_token else scale * len(plan.items) * group_size(runner.groups.dp)
        self._seen: Seen | None = None

    def is_hooked(self, model: Any) -> bool:
        return self.runner.groups.is_last_stage and has_loss_hook(model)

    def forward_step(self, items: Iterator[Item], chunk: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]:
        """Megatron's forward step: runs a chunk on the next micro-batch, and gives the function of its output."""
        item, groups = next(items), self.runner.groups
        batch = self._on_device(_with_positions(item, self.runner.models[0]))
        local = split_context(batch, group_size(groups.cp), group_rank(groups.cp))
        self._seen = None
        output = chunk(**self._arguments(item, local))
        return output, lambda logits_or_loss: self._loss(item, local, logits_or_loss)

    def on_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The head's hook: sweeps, keeps the statistics of the last call, returns plain cross entropy `[b, s]`."""
        return self._guarded(lambda: self._cross_entropy(logits, labels), logits, tuple(labels.shape))

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        self._seen = self.evaluation.sweep(logits, labels)
        assert self._seen.stats.log_prob is not None
        return -self._seen.stats.log_prob

    def _loss(self, item: Item, local: dict[str, Any], output: Tensor) -> tuple[Any, ...]:
        share = self._guarded(lambda: self._share(item, local, output), output, ())
        if not share.requires_grad and output.requires_grad:
            share = share + nothing(output)  # a loss that is a constant still has to enter the backward pass
        self.loss += share.detach().double()
        report = {'loss': share.detach().clone().reshape(1)}
        scaled = (share.float() if share.dtype in (torch.bfloat16, torch.float16) else share) * self._scale
        if self.runner.per_token:
            count = 0 if item.is_padding else (local['labels'] != self.evaluation.ignore_index).sum()
            return scaled, torch.as_tensor(count, dtype=torch.int, device=scaled.device), report
        return scaled, report

    def _share(self, item: Item, local: dict[str, Any], output: Tensor) -> Tensor:
        if self.error is not None or item.is_padding:
            return nothing(output)
        seen = self._seen or self.evaluation.sweep(output, local['labels'])
        assert seen.stats.log_prob is not None
        share = self.evaluation.contribution(local, item.extra, seen, self.plan.tokens, self.plan.micro_batches)
        self.logps.append(seen.stats.log_prob.detach())
        return share

    def _guarded(self, compute: Callable[[], Tensor], source: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The value of `compute`, or zeros without gradient once it has failed: raised after the schedule, on every rank."""
        if self.error is None:
            try:
                return compute()
            except Exception as error:
                self.error = error
        return nothing(source, shape)

    def _on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        device = self.runner.device
        return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}

    def _arguments(self, item: Item, local: dict[str, Any]) -> dict[str, Any]:
        ids = local['input_ids']
        mask = local.get('attention_mask')
        out: dict[str, Any] = {
            'input_ids': ids,
            'position_ids': local['position_ids'],
            'attention_mask': mask if mask is not None and mask.dim() == 4 else None,
        }
        last = self.runner.models[-1]
        if has_loss_hook(last) or getattr(self.runner.config, 'mtp_num_layers', None):
            out['labels'] = local['labels']
        if getattr(self.runner.config, 'mtp_num_layers', None):
            out['loss_mask'] = (local['labels'] != self.evaluation.ignore_index).float()
        if item.boundaries is not None:
            out['packed_seq_params'] = _packed(item.boundaries, int(ids.shape[1]), ids.device)
        accepts = self.runner.accepts
        return out if accepts is None else {k: v for k, v in out.items() if k in accepts}


def is_ddp(chunk: Any) -> bool:
    """Whether the chunk is wrapped in Megatron's DistributedDataParallel."""
    return callable(getattr(chunk, 'finish_grad_sync', None)) and callable(getattr(chunk, 'scale_gradients', None))


def _with_positions(item: Item, model: Any) -> dict[str, Any]:
    batch = dict(item.batch)
    if batch.get('position_ids') is None:
        rows, length = batch['input_ids'].shape
        positions = torch.arange(length, device=batch['input_ids'].device)
        if item.boundaries is not None:
            starts = item.boundaries.to(positions.device)
            at = torch.bucketize(positions, starts[1:], right=True, out_int32=True).clamp(max=starts.numel() - 1)
            positions = positions - starts[at]
        limit = getattr(model, 'max_sequence_length', None)
        if limit is not None:
            positions = positions.clamp(max=limit - 1)  # padding only: real tokens are checked to fit
        batch['position_ids'] = positions.expand(rows, length).contiguous()
    return batch


def _packed(boundaries: Tensor, length: int, device: torch.device) -> Any:
    """Megatron's description of a packed row; trailing padding becomes a sequence of its own."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if int(boundaries[-1]) < length:
        boundaries = torch.cat([boundaries, boundaries.new_tensor([length])])
    longest = int(boundaries.diff().max())
    boundaries = boundaries.to(device)
    return PackedSeqParams(
        qkv_format='thd', cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _forward_arguments(model: Any) -> set[str] | None:
    """Names that the chunk's forward takes; None: any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters}


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
