"""Contrastive loss of sentence embeddings over the global batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..arguments import above_0, checked_arguments, reject_unknown
from ..batch import TokenBatch
from ..data_format import InputFeature, LossOutput, ModelOutput
from ..groups import all_gather_rows, data_parallel_group, group_rank, group_size, reduce_scatter_rows, sum_over
from ..seen import Pooled
from .contrast import Contrasts, Fault, Rule, check_starts, contrast, fault_message, fault_of
from .pooled import PooledLoss, with_gradient


class Coupled(NamedTuple):
    """One rank's part of a loss of the global batch. Nothing here has a history."""

    share: Tensor
    """The losses of this rank's own anchors, summed, ÷ the anchors of the global batch. Summed over the group: the
    loss."""
    gradient: Tensor | None
    """`[n, D]`, of the whole loss for this rank's rows, in float32 or float64."""
    losses: Tensor
    """Of this rank's own anchors."""


class InfonceLoss(PooledLoss):
    """Tells the positive of each anchor from all other documents: InfoNCE with negatives of the whole global batch.

    A group is an anchor aᵢ, its positive pᵢ, then its negatives, in consecutive rows; the positives and negatives of
    all groups are the documents dⱼ. With s the dot product (embeddings are normalised before, or not at all) and T
    the temperature, the loss of anchor i is

        log( Σⱼ wⱼ·exp(s(aᵢ, dⱼ)/T) + [qq] Σ_{k≠i} exp(s(aᵢ, aₖ)/T) + [dd] Σ_{dⱼ≠pᵢ} wⱼ·exp(s(pᵢ, dⱼ)/T) ) − s(aᵢ, pᵢ)/T

    and the loss the mean over the anchors of the global batch. wⱼ is 1, but for `hard_negatives`.

    Args:
        temperature: T.
        use_batch: all documents of the global batch count; False: only those of the anchor's own group.
        hard_negatives: k, how many negatives each group has. Of more, the first k count; of m < k each counts k // m
            times, and k % m of them, drawn without replacement from `seed`, m and k alone, once more. So values depend
            neither on ranks, nor on the order of groups. A group without negatives is a ValueError.
        mask_fake_negative: what is more similar to the anchor than s(aᵢ, pᵢ) + `fake_neg_margin` (without gradient) is
            taken for another positive and left out of the first two sums. The third has no such mask.
        fake_neg_margin: above 0.
        include_qq, include_dd: the second and the third sum. Both are over the batch and need `use_batch`.
        process_group: the data parallel group, without tensor, pipeline and context parallel ranks: these hold the same
            embeddings, which would count as their own negatives. None: Megatron's. Inside `MegatronModel` it is known.
        seed: of the draw of `hard_negatives`.

    Called by hand: `inputs['labels']` `[n]` or `[n, 1]` are nonzero at each anchor and 0 elsewhere;
    `outputs['embeddings']` `[n, D]`, else `outputs['logits']` `[n, D]`, or `[n, s, D]` of which the first position is
    taken. Each rank gives whole groups of its own, any number of them or no rows at all. Every rank gets the whole loss
    of the global batch, and the whole gradient of that one loss for its own rows, for what they are to the anchors of
    other ranks, too: gradients of parameters, **summed** over the data parallel ranks, are those of one process with
    the whole batch (where they are averaged, multiply by the ranks). Without any anchor on any rank it is 0, with a
    gradient of zeros.

    It is computed in float32, or float64 if any rank's embeddings are; the gradient has the dtype of its input.
    Similarities are found for some anchors at once and thrown away (`contrast.BLOCK`), the gradient with them, in the
    forward pass: memory grows with the rows of the global batch, not with anchors × documents, and `[n, D]` is kept
    for backward.

    Collectives over a group of several ranks, called by hand: an all-gather of eight numbers, one of the rows, padded
    to the longest rank, with one more column for the labels (not without `use_batch`), a reduce-scatter of their
    gradient (only where one is wanted, nor without `use_batch`), and a sum of one number; backward has none. A
    ValueError for labels, columns or faulty inputs of one rank is raised on all.

    van den Oord et al., arXiv 1807.03748, eq. 4; negatives from the batch: Karpukhin et al., arXiv 2004.04906; the
    other blocks: Li et al. (GTE), arXiv 2308.03281, and, with the mask, Zhang et al. (Qwen3 Embedding), arXiv
    2506.05176.
    """

    reads = ('embeddings',)
    over = 'groups'
    layout = 'groups'

    @checked_arguments
    def __init__(
        self,
        temperature: float = 0.1,
        use_batch: bool = True,
        hard_negatives: int | None = None,
        mask_fake_negative: bool = False,
        fake_neg_margin: float = 0.1,
        include_qq: bool = False,
        include_dd: bool = False,
        process_group: ProcessGroup | None = None,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        flags = {'use_batch': use_batch, 'mask_fake_negative': mask_fake_negative}
        flags |= {'include_qq': include_qq, 'include_dd': include_dd}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise ValueError(f'{name} must be True or False, got {flag!r}')
        for name in ('include_qq', 'include_dd'):
            if flags[name] and not use_batch:
                raise ValueError(f'{name}=True needs use_batch=True: it compares with other groups of the batch')
        if hard_negatives is not None and (not _is_int(hard_negatives) or hard_negatives < 1):
            raise ValueError(f'hard_negatives must be an int >= 1, or None for all negatives, got {hard_negatives!r}')
        if not _is_int(seed):
            raise ValueError(f'seed must be an int, got {seed!r}')
        if process_group is not None and not isinstance(process_group, ProcessGroup):
            raise ValueError(
                'process_group must be the data parallel ProcessGroup that this rank is in, or None for '
                f"Megatron's, got {process_group!r}"
            )
        self.temperature = above_0('temperature', temperature)
        self.fake_neg_margin = above_0('fake_neg_margin', fake_neg_margin) if mask_fake_negative else fake_neg_margin
        self.use_batch, self.include_qq, self.include_dd = use_batch, include_qq, include_dd
        self.mask_fake_negative = mask_fake_negative
        self.hard_negatives, self.process_group, self.seed = hard_negatives, process_group, seed

    def check_targets(self, targets: Tensor) -> None:
        check_starts(targets, self.hard_negatives)

    def contribution(self, batch: TokenBatch, seen: Pooled, targets: Tensor | None) -> Tensor:
        """Without `use_batch`. What looks at the global batch is `couple`."""
        assert not self.use_batch
        assert targets is not None
        found = seen.found
        marks = targets.detach().cpu() != 0
        groups = int(marks.sum()) if batch.counts is None else batch.counts.groups
        scale = 1 / (max(groups, 1) * group_size(batch.cp))
        wanted = found.requires_grad and torch.is_grad_enabled()
        rows = found.detach().to(torch.promote_types(found.dtype, torch.float32))
        losses, gradient = self._alone(rows, marks, scale if wanted else None)
        return with_gradient(found, losses.sum() * scale, gradient)

    def __call__(self, inputs: InputFeature, outputs: ModelOutput, **extra: Any) -> LossOutput:
        reject_unknown(extra, (), f'{type(self).__name__}.__call__')
        group = _data_parallel() if self.process_group is None else self.process_group
        embeddings = starts = None
        fault: Exception | None = None
        try:
            embeddings, starts = _read(inputs, outputs)
        except Exception as error:  # the other ranks wait for this one
            fault = error
        wanted = embeddings is not None and embeddings.requires_grad and torch.is_grad_enabled()
        coupled = self.couple(embeddings, starts, group, wanted)
        if fault is not None:
            raise fault
        if coupled is None:
            raise ValueError('inputs or outputs of another rank of the data parallel group are faulty, see its error')
        assert embeddings is not None
        loss = with_gradient(embeddings, sum_over(coupled.share, group), coupled.gradient)
        return LossOutput(loss=loss, num_tokens=0)

    def couple(
        self, embeddings: Tensor | None, starts: Tensor | None, group: ProcessGroup | None, gradient: bool
    ) -> Coupled | None:
        """This rank's part of the loss of the global batch; collective over `group`, the data parallel one.

        `embeddings` `[n, D]` and `starts` `[n]`, nonzero at the anchors, are this rank's whole groups. `embeddings`
        None says that this rank has failed: every rank then returns None. `gradient`: whether it is wanted. ValueError
        on every rank for a fault in one rank's `starts`, or for different D.
        """
        marks = torch.zeros(0, dtype=torch.bool) if starts is None else starts.detach().cpu() != 0
        told = _agree(embeddings, marks, self.hard_negatives, gradient, group)
        if told is None or embeddings is None:
            return None
        mine = embeddings.detach().to(torch.float64 if any(one.double for one in told) else torch.float32)
        total = sum(one.anchors for one in told)
        if total == 0:
            return Coupled(mine.new_zeros(()), torch.zeros_like(mine) if gradient else None, mine.new_zeros(0))
        scale = 1 / total if any(one.gradient for one in told) else None
        if self.use_batch and group_size(group) > 1:
            losses, grad = self._over_ranks(mine, marks, told, group, scale)
        else:
            losses, grad = self._alone(mine, marks, scale)
        return Coupled(losses.sum() / total, grad if gradient else None, losses)

    @property
    def _rule(self) -> Rule:
        margin = self.fake_neg_margin if self.mask_fake_negative else None
        return Rule(self.temperature, margin, self.use_batch, self.include_qq, self.include_dd)

    def _alone(self, rows: Tensor, marks: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
        """Losses of anchors among these rows, and the gradient of `scale` times their sum for the rows, if any."""
        if not marks.any():
            return rows.new_zeros(0), None if scale is None else torch.zeros_like(rows)
        among = Contrasts.of(marks, torch.arange(len(marks)), self.hard_negatives, self.seed)
        return contrast(rows, among, range(len(among.anchors)), self._rule, scale)

    def _over_ranks(
        self, mine: Tensor, marks: Tensor, told: list[_Told], group: ProcessGroup | None, scale: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Losses of this rank's anchors among the rows of all ranks, and the gradient of `scale` times the sum of all
        ranks' losses for its rows."""
        rank, longest = group_rank(group), max(one.rows for one in told)
        padded = mine.new_zeros(longest, max(one.columns for one in told) + 1)
        if len(mine):
            padded[: len(mine), :-1] = mine
            padded[: len(mine), -1] = marks.to(padded)
        everyone = all_gather_rows(padded, group).flatten(0, 1)
        at = torch.cat([r * longest + torch.arange(one.rows) for r, one in enumerate(told)])
        among = Contrasts.of(everyone[:, -1].cpu()[at] != 0, at, self.hard_negatives, self.seed)
        before = sum(one.anchors for one in told[:rank])
        own = range(before, before + told[rank].anchors)
        failed: Exception | None = None
        losses, grad = mine.new_zeros(0), None if scale is None else torch.zeros_like(everyone[:, :-1])
        try:
            losses, grad = contrast(everyone[:, :-1], among, own, self._rule, scale)
        except Exception as error:  # the other ranks wait for this one's part of the gradient
            failed = error
        received = None if grad is None else reduce_scatter_rows(grad, group)
        if failed is not None:
            raise failed
        if received is None:
            return losses, None
        return losses, received[: len(mine)].clone() if len(mine) else torch.zeros_like(mine)


class _Told(NamedTuple):
    """What each rank tells the others, as integers."""

    rows: int
    columns: int
    anchors: int
    failed: int
    double: int
    gradient: int
    """Whether it is wanted there: if it is anywhere, all take part in its sum."""
    fault: int
    row: int
    """Where the fault is."""


def _agree(
    embeddings: Tensor | None,
    marks: Tensor,
    hard_negatives: int | None,
    gradient: bool,
    group: ProcessGroup | None,
) -> list[_Told] | None:
    """What every rank tells. None if one has failed; ValueError on every rank for a fault in one's data. One
    all-gather."""
    rows, columns = (0, 0) if embeddings is None else embeddings.shape
    fault, row = (Fault.LABELS, len(marks)) if rows != len(marks) else fault_of(marks, hard_negatives)
    double = embeddings is not None and embeddings.dtype == torch.float64
    mine = _Told(rows, columns, int(marks.sum()), embeddings is None, double, gradient, fault, row)
    told = [_Told(*every) for every in all_gather_rows(torch.tensor(mine, dtype=torch.int64), group).tolist()]
    if any(one.failed for one in told):
        return None
    widths = {one.columns: rank for rank, one in enumerate(told) if one.columns}
    if len(widths) > 1:
        each = ', '.join(f'{width} on {_name(rank, group)}' for width, rank in sorted(widths.items()))
        raise ValueError(f'embeddings must have as many columns on every rank, got {each}')
    nothing = not any(one.anchors for one in told)
    for rank, one in enumerate(told):
        if one.fault and not (nothing and one.fault == Fault.FIRST):
            on = '' if group_size(group) == 1 else f'on {_name(rank, group)}: '
            raise ValueError(on + fault_message(Fault(one.fault), one.row, one.rows, hard_negatives))
    return told


def _name(rank: int, group: ProcessGroup | None) -> str:
    return f'rank {rank if group is None else dist.get_global_rank(group, rank)}'


def _read(inputs: InputFeature, outputs: ModelOutput) -> tuple[Tensor, Tensor]:
    """Embeddings `[n, D]` and labels `[n]`."""
    labels = inputs.get('labels')
    if labels is None:
        raise ValueError(f"inputs must hold 'labels', which mark the anchors, got the keys {sorted(inputs)}")
    name = 'logits' if outputs.get('embeddings') is None else 'embeddings'
    found: Any = outputs.get(name)
    if found is None:
        raise ValueError(f"outputs must hold 'embeddings' [n, D], got the keys {sorted(outputs)}")
    if not isinstance(found, Tensor) or not found.is_floating_point():
        what = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f'{name} must be a tensor of floating-point numbers, got {what}')
    embeddings = found[:, 0] if name == 'logits' and found.dim() == 3 and found.shape[1] else found
    if embeddings.dim() != 2 or (len(embeddings) and not embeddings.shape[1]):
        allowed = '[n, D], or [n, s, D] of which the first position is taken' if name == 'logits' else '[n, D]'
        raise ValueError(f'{name} must be {allowed}, got the shape {tuple(found.shape)}')
    try:
        starts = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f'labels must be one number for each embedding, got {labels!r}') from error
    if starts.dim() != 1 and tuple(starts.shape) != (starts.numel(), 1):
        raise ValueError(f'labels must be [n], one number for each embedding, got the shape {tuple(starts.shape)}')
    return embeddings, starts.reshape(-1)


def _data_parallel() -> ProcessGroup | None:
    """Megatron's; None in a single process. ValueError where nobody says which ranks hold replicas."""
    group = data_parallel_group()
    if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f'process_group must be the data parallel group: there are {dist.get_world_size()} ranks, and Megatron, '
            'which would tell which of them hold copies of the same embeddings, has no groups yet'
        )
    return group


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
