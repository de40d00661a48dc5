"""How near embeddings of anchors lie to their positives, and to those of other groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..arguments import checked_arguments
from ..groups import all_gather_rows, group_device, group_size, sum_over
from .base import Metric, checked_keywords
from .features import Features, as_tensor, micro_batches
from .state import MAXIMUM, MINIMUM, SUM, Field, as_scalar


class EmbeddingMetric(Metric):
    """Cosines of anchors with positives over the global batch, the mean loss, and the last gradient norm.

    A group is an anchor, its positive in the next row, then its negatives; `labels` marks the anchors. With aᵢ and pᵢ
    the anchor and the positive of group i, both divided by their norms in float64 (a vector of zeros stays one, and
    has cosine 0 with all), n the groups of a global batch on all ranks:

    - `pos_sim`: the mean of aᵢ·pᵢ over all anchors; `pos_sim_min`, `pos_sim_max`: the smallest and the largest;
    - `neg_sim`: the mean of aᵢ·pⱼ over j ≠ i of the same global batch, from sums of vectors and never from n × n
      numbers: Σ_{i≠j} aᵢ·pⱼ = (Σ aᵢ)·(Σ pⱼ) − Σ aᵢ·pᵢ, over n(n−1); of several batches the sum of the numerators over
      that of the denominators. Left out where no batch has two anchors;
    - `loss`: the mean over anchors, left out without any;
    - `grad_norm`: the largest over the ranks, once one above 0 was given.

    NaN among the embeddings shows as NaN. What is reduced over is the data parallel group, with its context parallel
    ranks, which hold the same embeddings and count once.

    Args:
        device_mesh, process_group: as of every metric.

    Kept until `calculate` or `reset`: for each global batch 2 + 2D float64 numbers, on the device of the embeddings
    `[n, D]`.

    `calculate` and `values` are collective on the last pipeline stage: two small all-gathers (D and number of batches,
    then their numbers) and an all-reduce of the kept numbers; then, as of every metric, one all-gather, and one
    broadcast along the pipeline. Groups of one rank take none. `accumulate` is not collective.
    """

    reads = 'embeddings'
    layout: ClassVar[str] = 'groups'
    """How the rows of a micro-batch belong together."""

    fields: ClassVar[Mapping[str, Field]] = {
        'anchors': SUM, 'pos_total': SUM, 'pos_min': MINIMUM, 'pos_max': MAXIMUM, 'loss': SUM, 'loss_anchors': SUM,
        'grad_norm': MAXIMUM, 'neg_sim': MAXIMUM,
    }  # fmt: skip

    @checked_arguments
    def __init__(self, device_mesh: Any = None, process_group: ProcessGroup | None = None, **unknown: Any) -> None:
        super().__init__(device_mesh, process_group)
        self._batches: dict[int, Tensor] = {}
        self._unnumbered = 0

    @checked_keywords
    def accumulate(
        self, inputs: Any = None, outputs: Any = None, *, call: int | None = None, grad_norm: Any = None
    ) -> None:
        """Takes in one micro-batch, or a list of them with a list of outputs or with one dictionary over all rows.

        Only the last pipeline stage's count. Labels that lie on an accelerator are synced with the host.

        Args:
            inputs: `labels[n]`, not 0 at the first row of each group; of samples, one number each.
            outputs: `embeddings[n, D]` (or a list of such, one a micro-batch), else `logits` `[n, D]` or `[n, s, D]`,
                whose first position counts; of any dtype. `loss`: with a `num_tokens` above 0 the sum over that many
                anchors, else their mean, which weighs the anchors of `labels` (1 without labels). Whatever is missing
                is not taken in.
            call: an integer from 0, equal on every rank: what has the same number is one global batch. None: the k-th
                such `accumulate` of each rank, with all of its micro-batches, is part of the k-th global batch.
            grad_norm: gradient norm of the last step; the last one given is shown.

        ValueError, and nothing is taken in, where embeddings and labels do not fit, or an anchor has no positive.
        """
        if not self.is_last_stage:
            return
        found = [(output, *_rows_and_anchors(features, output)) for features, output in micro_batches(inputs, outputs)]
        self._check_width([rows for _, rows, _ in found if rows is not None])
        batch = self._number(call)
        for output, rows, anchors in found:
            if rows is not None and anchors:
                self._add_rows(batch, rows, anchors)
            if output.get('loss') is not None:
                self._add_loss(output['loss'], output.get('num_tokens'), 1 if anchors is None else len(anchors))
        self.on_step(grad_norm=grad_norm)

    def on_step(
        self,
        *,
        lr: Any = None,
        step: int | None = None,
        gradient_accumulation_steps: int | None = None,
        grad_norm: Any = None,
    ) -> None:
        """Takes in the gradient norm."""
        if grad_norm is not None:
            self.state.put(grad_norm=grad_norm)

    def reset(self) -> None:
        """Forgets what was accumulated."""
        super().reset()
        self._batches, self._unnumbered = {}, 0

    def state_dict(self) -> dict[str, Any]:
        batches = {number: sums.cpu() for number, sums in self._batches.items()}
        return {**super().state_dict(), 'batches': batches, 'unnumbered': self._unnumbered}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        super().load_state_dict(kept)
        self._batches, self._unnumbered = dict(kept['batches']), kept['unnumbered']

    def totals(self) -> dict[str, float]:
        """The fields reduced over all ranks; `neg_sim` is -inf where there is none."""
        if self.is_last_stage:
            total, pairs = _negatives(self._summed_batches())
            if pairs > 0:  # the same on all of these ranks, and so is its maximum
                self.state.put(neg_sim=total / pairs)
        return super().totals()

    def figures(self, totals: Mapping[str, float]) -> dict[str, float]:
        t, figures = totals, {}
        if t['anchors'] > 0:
            figures |= {'pos_sim': t['pos_total'] / t['anchors'], 'pos_sim_min': t['pos_min']}
            figures |= {'pos_sim_max': t['pos_max']}
        if t['neg_sim'] != -math.inf:
            figures['neg_sim'] = t['neg_sim']
        if t['loss_anchors'] > 0:
            figures['loss'] = t['loss'] / t['loss_anchors']
        if t['grad_norm'] > 0 or math.isnan(t['grad_norm']):
            figures['grad_norm'] = t['grad_norm']
        return figures

    def display(self, totals: Mapping[str, float]) -> dict[str, Any]:
        """4 decimals, `grad_norm` 6."""
        figures = self.figures(totals)
        return {name: f'{value:.{6 if name == "grad_norm" else 4}f}' for name, value in figures.items()}

    def _number(self, call: Any) -> int:
        """The key of a global batch: unnumbered ones count down from -1."""
        if call is None:
            self._unnumbered += 1
            return -self._unnumbered
        if not isinstance(call, int | np.integer) or isinstance(call, bool) or call < 0:
            raise ValueError(f'call must be an integer >= 0, equal on every rank, got {call!r}')
        return int(call)

    @property
    def _copies(self) -> int:
        """Ranks of the reduction that hold the same embeddings as this one, itself included."""
        groups = self.mesh_group('cp'), self._reduced_over()
        cp, reduced = (set(dist.get_process_group_ranks(group)) if group is not None else set() for group in groups)
        return max(len(cp & reduced), 1)

    def _check_width(self, given: Sequence[Tensor]) -> None:
        widths = {rows.shape[1] for rows in given} | {_width(sums) for sums in self._batches.values()}
        if len(widths) > 1:
            raise ValueError(f'embeddings must all have the same size until the next reset, got {sorted(widths)}')

    def _add_rows(self, batch: int, rows: Tensor, anchors: Sequence[int]) -> None:
        at = torch.tensor(anchors, device=rows.device)
        a, p = _unit(rows[at]), _unit(rows[at + 1])
        cosines = (a * p).sum(1)
        count, total = cosines.new_tensor(len(anchors)) / self._copies, cosines.sum() / self._copies
        self.state.fold(anchors=count, pos_total=total, pos_min=cosines.min(), pos_max=cosines.max())
        sums = torch.cat([torch.stack([count, total]), a.sum(0) / self._copies, p.sum(0) / self._copies])
        before = self._batches.get(batch)
        self._batches[batch] = sums if before is None else before + sums.to(before.device)

    def _add_loss(self, loss: Any, count: Any, labelled: int) -> None:
        device = loss.device if isinstance(loss, Tensor) else torch.device('cpu')
        loss, count = as_scalar(loss, 'loss', device), as_scalar(0 if count is None else count, 'num_tokens', device)
        weight = torch.full_like(count, labelled / self._copies)
        is_sum = count > 0
        anchors = torch.where(is_sum, count, weight)
        total = torch.where(is_sum, loss, loss * weight)
        self.state.fold(loss=torch.where(anchors > 0, total, 0.0), loss_anchors=anchors)

    def _summed_batches(self) -> Tensor:
        """What is kept of every global batch, in the order of their numbers, summed over the ranks: `[k, 2 + 2D]`."""
        group, mine = self._reduced_over(), sorted(self._batches)
        device = group_device(group)
        rows = torch.empty(0, 2, dtype=torch.float64, device=device)
        if mine:
            rows = torch.stack([self._batches[batch].to(device) for batch in mine])
        if group_size(group) == 1:
            return rows
        counts, widths = all_gather_rows(torch.tensor([len(mine), _width(rows)]), group).T.tolist()
        if not any(counts):
            return rows
        if len(set(widths) - {0}) > 1:
            raise ValueError(f'embeddings must have the same size on every rank, got {widths} (0: none)')
        padded = torch.zeros(max(counts), dtype=torch.int64)
        padded[: len(mine)] = torch.tensor(mine, dtype=torch.int64)
        known = all_gather_rows(padded, group).tolist()
        place = {b: i for i, b in enumerate(sorted({b for row, n in zip(known, counts) for b in row[:n]}))}
        every = torch.zeros(len(place), 2 + 2 * max(widths), dtype=torch.float64, device=device)
        if mine:
            every[[place[batch] for batch in mine]] = rows
        return sum_over(every, group)


def _negatives(batches: Tensor) -> tuple[float, float]:
    """Σ of the cosines of anchors and positives of different groups, and the number of these pairs."""
    n, own = batches[:, 0], batches[:, 1]
    a, p = batches[:, 2:].chunk(2, 1)
    several = n > 1.5  # shares of context parallel ranks may not add up to the last digit
    total = torch.where(several, (a * p).sum(1) - own, 0).sum()
    return total.item(), torch.where(several, n * (n - 1), 0).sum().item()


def _width(sums: Tensor) -> int:
    """D of one or more rows of 2 + 2D numbers."""
    return (sums.shape[-1] - 2) // 2


def _unit(x: Tensor) -> Tensor:
    """The rows divided by their norms, in float64; rows of zeros as they are."""
    x = x.double()
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return torch.where(norm == 0, 0, x / norm)


def _rows_and_anchors(features: Sequence[Features], output: Features) -> tuple[Tensor | None, list[int] | None]:
    """The embeddings `[n, D]` and the numbers of the rows that are anchors; None each where not given."""
    marks = [as_tensor(f['labels'], 'labels').reshape(-1).cpu() != 0 for f in features if f.get('labels') is not None]
    anchors = torch.cat(marks).nonzero()[:, 0].tolist() if marks and len(marks) == len(features) else None
    rows = _embeddings(output)
    if rows is None:
        return None, anchors
    if anchors is None:
        raise ValueError('inputs must hold labels, which mark the first row of each group, got none beside embeddings')
    n = sum(map(len, marks))
    if n != len(rows):
        raise ValueError(f"inputs['labels'] must have one number for each of the {len(rows)} embeddings, got {n}")
    _check_positives(anchors, n)
    return rows, anchors


def _embeddings(output: Features) -> Tensor | None:
    name = next((name for name in ('embeddings', 'logits') if output.get(name) is not None), None)
    if name is None:
        return None
    value = output[name]
    listed = isinstance(value, list | tuple) and all(isinstance(part, Tensor | np.ndarray) for part in value)
    parts = [as_tensor(part, name).detach() for part in (value if listed else [value])]
    for part in parts:
        if part.dim() not in (2, 3):
            raise ValueError(
                f"outputs['{name}'] must have the shape [n, D], or [n, s, D] whose first position is taken, got "
                f'{tuple(part.shape)}'
            )
    return torch.cat([part if part.dim() == 2 else part[:, 0] for part in parts]) if parts else None


def _check_positives(anchors: Sequence[int], n: int) -> None:
    for anchor, following in zip(anchors, [*anchors[1:], n]):
        if following == anchor + 1:
            what = 'is the last one' if following == n else 'is followed by another anchor'
            raise ValueError(
                f"inputs['labels'] must mark anchors that are followed by their positive, but row {anchor} of {n} is "
                f'an anchor and {what}; was a group cut between two micro-batches?'
            )
