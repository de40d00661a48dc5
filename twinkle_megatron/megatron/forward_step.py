"""One micro-batch through this rank's chunk: Megatron's forward step, and the function of its output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..batch import split_context
from ..evaluation import Evaluation
from ..groups import Groups, all_gather_rows, group_rank, group_size
from ..loss_watch import validate
from ..seen import Pooled, Seen, nothing, nothing_for
from ..vocab_parallel import Logits, cross_entropy
from .embedding import idle_parameters
from .heads import has_loss_hook
from .item import PREFIX, Item
from .lazy_logits import LazyLogits
from .plan import Plan
from .together import Together

Progress = Callable[[int, int], None]
"""(micro-batches done, micro-batches of this rank)."""
Watched = Callable[[Item, int, Any], None]
"""Called before a chunk runs: the micro-batch, its number on this rank, the chunk without wrappers."""


class ForwardStep:
    """Megatron's `forward_step_func` for the micro-batches of one plan, with what this rank finds on the way.

    `factor` multiplies each summand of the global loss before it goes to Megatron. After the schedule `loss` holds the
    sums of this rank's summands, `results` what was found in each real micro-batch on the last stage, log-probs `[b,
    s/cp]` or what the head gives, and `error` what the loss, a metric or the head threw first. The micro-batches after
    it are run like any others, since other ranks, which may have had no error, wait in their collectives.
    """

    def __init__(
        self,
        models: Sequence[Any],
        config: Any,
        groups: Groups,
        plan: Plan,
        evaluation: Evaluation,
        factor: float,
        progress: Progress | None = None,
        watched: Watched | None = None,
    ) -> None:
        self.plan = plan
        self.error: Exception | None = None
        self._config, self._groups, self._evaluation, self._factor = config, groups, evaluation, factor
        self._model, self._hooked = models[0], has_loss_hook(models[-1])
        self._device = device_of(models[0])
        self._accepts = _forward_arguments(models[0])
        self.loss = torch.zeros(evaluation.size, dtype=torch.float64, device=self._device)
        self.results: list[Tensor] = []
        self.kept: list[Seen | Pooled] = []
        """What was seen of each of them, where the evaluation keeps it."""
        self._last_model = models[-1]
        self._idle = idle_parameters(models[-1], evaluation.head) if groups.is_last_stage else []
        self._number = 0
        self._progress, self._passed, self._watched = progress, 0, watched
        self._local: dict[str, Any] = {}
        self._seen: Seen | Pooled | None = None
        self._swept = False

    @property
    def per_token(self) -> bool:
        """Whether the results have an entry for each token of this rank."""
        return self._evaluation.per_token

    def is_hooked(self, model: Any) -> bool:
        return self._groups.is_last_stage and has_loss_hook(model)

    def __call__(self, items: Iterator[Item], chunk: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]:
        """Megatron's forward step: runs a chunk on the next micro-batch, and gives the function of its output."""
        item = next(items)
        local = self._slice(item)
        self._seen, self._swept, self._local = None, False, local
        if self._watched is not None:
            number = next(i for i, one in enumerate(self.plan.items) if one is item)
            self._watched(item, number, unwrapped(chunk))
        output = chunk(**self._arguments(item, local))
        self._tell_progress(item, chunk)
        return output, lambda logits_or_loss: self._loss(item, local, logits_or_loss)

    def _tell_progress(self, item: Item, chunk: Any) -> None:
        """After each real micro-batch has passed the last chunk of this rank."""
        if self._progress is None or item.is_padding or unwrapped(chunk) is not self._last_model:
            return
        self._passed += 1
        total = sum(not one.is_padding for one in self.plan.items)
        try:
            self._progress(self._passed, total)
        except Exception as error:  # raised after the schedule, on every rank
            self.error = self.error or error

    @torch.no_grad()
    def revisit(self, item: Item, seen: Seen | Pooled) -> None:
        """The loss of a micro-batch that was looked at before, without another forward pass."""
        share = self._share_of(item, self._slice(item), seen, seen.end)
        self.loss += share.detach().double()

    def _slice(self, item: Item) -> dict[str, Any]:
        """This context parallel rank's tokens of a micro-batch, on the device."""
        batch = self._on_device(_with_positions(item, self._model))
        boundaries = None if item.packing is None else item.packing.boundaries
        return split_context(batch, group_size(self._groups.cp), group_rank(self._groups.cp), boundaries)

    def on_logits(self, logits: Logits, labels: Tensor) -> Tensor:
        """The head's hook: sweeps, keeps the statistics of the last call, returns plain cross entropy `[b, s]`, or
        whatever there is in place of logits."""
        seen = self._see(logits, {**self._local, 'labels': labels})
        if seen is None:
            return nothing(logits, tuple(labels.shape))
        if isinstance(seen, Pooled):
            return seen.found
        if self._evaluation.temperature != 1 and getattr(self._config, 'mtp_num_layers', None):
            return cross_entropy(logits, labels, shard=seen.shard, ignore_index=self._evaluation.ignore_index)
        assert seen.stats.log_prob is not None
        return -seen.stats.log_prob

    def _see(self, logits: Logits, batch: dict[str, Any]) -> Seen | Pooled | None:
        self._swept = True
        self._seen = None
        try:
            self._seen = self._evaluation.see(self._last_model, logits, batch)
        except Exception as error:  # raised after the schedule, on every rank
            self.error = self.error or error
        return self._seen

    def _loss(self, item: Item, local: dict[str, Any], output: Tensor) -> tuple[Any, ...]:
        share = nothing(output) if item.is_padding else self._share(item, local, output)
        self._seen = None  # lets go of the logits before the backward pass
        if self._idle and output.requires_grad:
            share = share + nothing_for(self._idle)
        if not share.requires_grad and output.requires_grad:
            share = share + nothing(output)  # a loss that is a constant still has to enter the backward pass
        self.loss += share.detach().double()
        if share.requires_grad and not item.is_padding:
            self._validate(share)
        report = {'loss': share.detach().clone().reshape(-1)}
        scaled = (share.float() if share.dtype in (torch.bfloat16, torch.float16) else share).sum() * self._factor
        if getattr(self._config, 'calculate_per_token_loss', False):
            count = 0 if item.is_padding else (local['labels'] != self._evaluation.ignore_index).sum()
            return scaled, torch.as_tensor(count, dtype=torch.int, device=scaled.device), report
        return scaled, report

    def _validate(self, share: Tensor) -> None:
        try:
            validate(share)
        except Exception as error:  # raised after the schedule, on every rank
            self.error = self.error or error

    def _share(self, item: Item, local: dict[str, Any], output: Tensor) -> Tensor:
        """This micro-batch's summand of the loss, or a zero without gradient where that failed."""
        seen = self._seen if self._swept else self._see(output, local)
        return self._share_of(item, local, seen, output)

    def _share_of(
        self, item: Item, local: dict[str, Any], seen: Seen | Pooled | None, output: Tensor | Logits
    ) -> Tensor:
        number, self._number = self._number, self._number + 1
        foreign = self._evaluation.is_foreign
        if foreign and seen is not None:
            local, seen = _without_added_rows(local, seen, item.shape[0])
        inputs = {key: value for key, value in local.items() if not key.startswith(PREFIX)}
        extra = item.extra | {key[len(PREFIX) :]: value for key, value in local.items() if key.startswith(PREFIX)}
        share = None if seen is None else self._contribution(inputs, item.extra if foreign else extra, seen, number)
        if seen is None and self._evaluation.gathers and self._evaluation.coupled is None:
            self._evaluation.couple(None, None)  # the other data parallel ranks wait for this one's embeddings
        if self._may_fail_alone() and self._failed_on_a_peer(share is None):
            share = None
        if seen is None:
            return nothing(output)
        if share is None:
            return nothing(seen.end)
        try:
            self._evaluation.feed(inputs, extra, seen, self.plan.counts, share)
        except Exception as error:  # raised after the schedule, on every rank
            self.error = self.error or error
        self.results.append(seen.result)
        if self._evaluation.keeps:
            self.kept.append(seen.kept())
        return share

    def _contribution(
        self, inputs: dict[str, Any], extra: dict[str, Any], seen: Seen | Pooled, number: int
    ) -> Tensor | None:
        counts, micro_batches = self.plan.counts, self.plan.micro_batches

        def loss() -> Tensor | None:
            return self._evaluation.contribution(inputs, extra, seen, counts, micro_batches, number)

        try:
            lazy = self._evaluation.is_foreign and isinstance(seen.source, LazyLogits)
            if lazy and group_size(self._groups.tp) > 1:
                return Together(cast(LazyLogits, seen.source), self._groups.tp).run(cast(Callable[[], Tensor], loss))
            return loss()
        except Exception as error:  # raised after the schedule, on every rank
            self.error = self.error or error
            return None

    def _may_fail_alone(self) -> bool:
        """Whether a peer may wait for this rank in a collective of the loss if that fails here."""
        own = not self._evaluation.is_foreign  # it sums over sequences, but builds no logits
        return self._evaluation.may_fail_alone and not (own and group_size(self._groups.cp) == 1)

    def _failed_on_a_peer(self, failed: bool) -> bool:
        """Whether a custom loss failed on a TP or CP rank of this replica. It may have built the logits of a linear
        head or summed over sequences, whose backward passes are collective: all these ranks have to go through them, or
        none. One small collective over each of the two groups."""
        mark = torch.tensor(float(failed), device=self._device)
        for group in (self._groups.tp, self._groups.cp):
            mark = all_gather_rows(mark, group).amax()
        return bool(mark)

    def _on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {k: v.to(self._device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}

    def _arguments(self, item: Item, local: dict[str, Any]) -> dict[str, Any]:
        ids = local['input_ids']
        mask = local.get('attention_mask')
        out: dict[str, Any] = {
            'input_ids': ids,
            'position_ids': local['position_ids'],
            'attention_mask': mask if mask is not None and mask.dim() == 4 else None,
        }
        if self._hooked or getattr(self._config, 'mtp_num_layers', None):
            out['labels'] = local['labels']
        if getattr(self._config, 'mtp_num_layers', None):
            out['loss_mask'] = (local['labels'] != self._evaluation.ignore_index).float()
        if item.packing is not None:
            length = int(item.batch['input_ids'].shape[1])
            out['packed_seq_params'] = _packed(item.packing.boundaries, length, ids.device)
        return out if self._accepts is None else {k: v for k, v in out.items() if k in self._accepts}


def _without_added_rows(local: dict[str, Any], seen: Seen | Pooled, rows: int) -> tuple[dict[str, Any], Seen | Pooled]:
    """Without the ignored rows that the schedule asked for: a custom loss may take a mean over rows."""
    shape = local['labels'].shape
    if shape[0] == rows:
        return local, seen
    own = {k: v[:rows] if isinstance(v, Tensor) and v.shape[:1] == shape[:1] else v for k, v in local.items()}
    return own, seen.first_rows(rows)


def unwrapped(chunk: Any) -> Any:
    """The chunk without DDP and mixed-precision wrappers."""
    while hasattr(chunk, 'module') and callable(getattr(chunk.module, 'forward', None)):
        chunk = chunk.module
    return chunk


def device_of(model: Any) -> torch.device:
    """Where the chunk's parameters lie; the CPU for a chunk without any."""
    return next((p.device for p in model.parameters()), torch.device('cpu'))


def _with_positions(item: Item, model: Any) -> dict[str, Any]:
    batch = dict(item.batch)
    if batch.get('position_ids') is None:
        rows, length = batch['input_ids'].shape
        positions = torch.arange(length, device=batch['input_ids'].device)
        if item.packing is not None:
            starts = item.packing.boundaries.to(positions.device)
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
