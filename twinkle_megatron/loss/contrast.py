"""InfoNCE losses of anchors among rows of embeddings, and their gradient for these rows, found block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

BLOCK = 1 << 22
"""Similarities that exist at once, at the most (or those of one anchor)."""


class Fault(IntEnum):
    """What can be wrong with labels that mark the first row, the anchor, of each group."""

    NONE = 0
    LABELS = 1
    """There are more or fewer than rows."""
    FIRST = 2
    """The first row is in no group."""
    ALONE = 3
    """An anchor without a positive."""
    NO_NEGATIVE = 4
    """A group without negatives where `hard_negatives` asks for some."""


@dataclass(frozen=True)
class Contrasts:
    """Who is contrasted with whom among rows `[N, D]`. All on the CPU.

    `documents` lie group by group, the positive of each group first.
    """

    anchors: Tensor
    """Rows `[A]`."""
    documents: Tensor
    """Rows `[M]`, of those documents that count."""
    weights: Tensor | None
    """How often each document counts `[M]`, float64, 1 for positives; None: all once."""
    positives: Tensor
    """Of each anchor, which document `[A]`."""

    @classmethod
    def of(cls, marks: Tensor, rows: Tensor, hard_negatives: int | None, seed: int) -> Contrasts:
        """Of whole groups: `marks` `[n]` is True at the anchors, the first of them is one; `rows` `[n]` is where they
        lie. `hard_negatives`: the weights of the negatives of a group sum up to it, see `InfonceLoss`."""
        anchors = marks.nonzero()[:, 0]
        group = marks.cumsum(0) - 1
        place = torch.arange(len(marks)) - anchors[group]  # 0 the anchor, 1 the positive, 2... the negatives
        weights = (place > 0).double()
        if hard_negatives is not None:
            negatives = group.bincount(minlength=len(anchors)) - 2
            tables = {m: negative_weights(m, hard_negatives, seed) for m in set(negatives.tolist())}
            for m, table in tables.items():
                here = (place > 1) & (negatives[group] == m)
                weights[here] = table[place[here] - 2]
        counts = weights > 0
        documents = counts.nonzero()[:, 0]
        positives = (place[documents] == 1).nonzero()[:, 0]
        weights = None if hard_negatives is None else weights[documents]
        return cls(rows[anchors], rows[documents], weights, positives)


def check_starts(starts: Tensor, hard_negatives: int | None) -> None:
    """ValueError unless rows whose anchors `starts` `[n]` marks by numbers other than 0 are whole groups. Not
    collective."""
    if starts.dim() != 1:
        raise ValueError(f'labels must be [n], one number for each embedding, got the shape {tuple(starts.shape)}')
    fault, row = fault_of(starts.detach().cpu() != 0, hard_negatives)
    if fault:
        raise ValueError(fault_message(fault, row, len(starts), hard_negatives))


def fault_of(marks: Tensor, hard_negatives: int | None) -> tuple[Fault, int]:
    """The first fault in the groups, and its row."""
    if len(marks) == 0:
        return Fault.NONE, 0
    if not marks[0]:
        return Fault.FIRST, 0
    anchors = marks.nonzero()[:, 0]
    sizes = torch.diff(anchors, append=torch.tensor([len(marks)]))
    for fault, least in ((Fault.ALONE, 2), (Fault.NO_NEGATIVE, 2 if hard_negatives is None else 3)):
        short = anchors[sizes < least]
        if len(short):
            return fault, int(short[0])
    return Fault.NONE, 0


def fault_message(fault: Fault, row: int, rows: int, hard_negatives: int | None) -> str:
    """What is wrong at a row of `rows`."""
    if fault == Fault.LABELS:
        return f'labels must be one number for each of the {rows} embeddings, got {row}'
    if fault == Fault.FIRST:
        return 'labels must mark the first row as an anchor, got 0 there: was a group cut between two batches or ranks?'
    if fault == Fault.ALONE:
        return (
            f'labels must mark groups of an anchor, its positive, then negatives; the one at row {row} has no positive'
        )
    return (
        f'hard_negatives={hard_negatives} must find negatives in each group; the one at row {row} has none: give it '
        'some, or hard_negatives=None'
    )


def negative_weights(count: int, wanted: int, seed: int) -> Tensor:
    """How often each of a group's `count` negatives is taken so that these numbers sum up to `wanted` `[count]`,
    float64: the first ones of too many; of too few all equally often, and some, drawn without replacement, once more.

    It depends on nothing but the three numbers.
    """
    if count >= wanted:
        return (torch.arange(count) < wanted).double()
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + count) * 1_000_003 + wanted) % (1 << 63))
    drawn = torch.randperm(count, generator=generator)[: wanted % count]
    return torch.full((count,), wanted // count, dtype=torch.float64).index_add_(
        0, drawn, torch.ones(len(drawn), dtype=torch.float64)
    )


@dataclass(frozen=True)
class Rule:
    """Which similarities stand in the denominator. `margin` None: none is taken for a false negative."""

    temperature: float
    margin: float | None
    across_groups: bool
    qq: bool
    dd: bool


@torch.no_grad()
def contrast(
    rows: Tensor, among: Contrasts, own: range, rule: Rule, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    """The losses of the anchors `own` `[len(own)]`, and the gradient of `scale` times their sum for all rows `[N, D]`;
    None: no gradient.

    No more similarities than `BLOCK` exist at once. Beside them there are a copy of the rows, their gradient and its
    copy.
    """
    device = rows.device
    order = torch.cat([among.documents, among.anchors]).to(device)
    packed = rows[order]
    grad = None if scale is None else torch.zeros_like(packed)
    log_weights = None
    if among.weights is not None:
        log_weights = torch.cat([among.weights, torch.ones(len(among.anchors), dtype=torch.float64)]).log()
        log_weights = log_weights.to(device, rows.dtype)
    work = _Work(packed, grad, log_weights, among, rule, 0.0 if scale is None else scale)
    with torch.autocast(device.type, enabled=False), _full_precision():
        losses = list(work.over_all(own) if rule.across_groups else work.over_own_group(own))
    found = torch.cat(losses) if losses else rows.new_zeros(0)
    if grad is None:
        return found, None
    return found, torch.zeros_like(rows).index_copy_(0, order, grad)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """float32 products without TF32: divided by a low temperature, its rounding would be that of the loss."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest')
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class _Work:
    """`packed` holds the documents, then the anchors; so do `grad`, which is added to, and `log_weights`."""

    packed: Tensor
    grad: Tensor | None
    log_weights: Tensor | None
    among: Contrasts
    rule: Rule
    scale: float

    def over_all(self, own: range) -> Iterator[Tensor]:
        """The losses, block by block, where the documents of all groups count."""
        m = len(self.among.documents)
        columns = self.packed if self.rule.qq else self.packed[:m]
        step = max(1, BLOCK // max(1, len(columns) + (m if self.rule.dd else 0)))
        for first in range(own.start, own.stop, step):
            yield self._block(columns, m, range(first, min(first + step, own.stop)))

    def _block(self, columns: Tensor, m: int, block: range) -> Tensor:
        rule, docs = self.rule, self.packed[:m]
        here = slice(m + block.start, m + block.stop)
        anchors = self.packed[here]
        at = self.among.positives[block.start : block.stop].to(columns.device)
        scores = anchors @ columns.T
        positive = scores.gather(1, at[:, None])
        if rule.qq:
            scores[:, m:].diagonal(block.start).fill_(-torch.inf)
        if rule.margin is not None:
            scores.masked_fill_(scores > positive + rule.margin, -torch.inf)
        parts = [scores]
        if rule.dd:
            parts.append((docs[at] @ docs.T).scatter_(1, at[:, None], -torch.inf))
        losses = self._softmax(parts, positive, self.log_weights)
        if self.grad is None:
            return losses
        scores.scatter_add_(1, at[:, None], torch.full_like(positive, -self.scale / rule.temperature))
        self.grad[here].addmm_(scores, columns)
        self.grad[: len(columns)].addmm_(scores.T, anchors)
        if rule.dd:
            self.grad.index_add_(0, at, parts[1] @ docs)
            self.grad[:m].addmm_(parts[1].T, docs[at])
        return losses

    def over_own_group(self, own: range) -> Iterator[Tensor]:
        """The losses, block by block, where only the documents of an anchor's own group count."""
        firsts, m = self.among.positives, len(self.among.documents)
        counts = torch.diff(firsts, append=torch.tensor([m]))
        longest = int(counts.max()) if len(counts) else 1
        step = max(1, BLOCK // max(1, longest * self.packed.shape[1]))  # the documents of a block are copied
        for first in range(own.start, own.stop, step):
            block = slice(first, min(first + step, own.stop))
            yield self._groups(slice(m + block.start, m + block.stop), firsts[block], counts[block])

    def _groups(self, here: slice, firsts: Tensor, counts: Tensor) -> Tensor:
        rule, device = self.rule, self.packed.device
        place = torch.arange(int(counts.max()))
        beyond = place >= counts[:, None]
        index = (firsts[:, None] + place.masked_fill(beyond, 0)).to(device)
        anchors, docs = self.packed[here], self.packed[index]
        scores = (docs @ anchors[..., None])[..., 0]
        positive = scores[:, :1].clone()
        if rule.margin is not None:
            scores.masked_fill_(scores > positive + rule.margin, -torch.inf)
        scores.masked_fill_(beyond.to(device), -torch.inf)
        losses = self._softmax([scores], positive, None if self.log_weights is None else self.log_weights[index])
        if self.grad is not None:
            scores[:, 0] -= self.scale / rule.temperature
            self.grad[here] += (scores[:, None] @ docs)[:, 0]
            sent = scores[..., None] * anchors[:, None]
            self.grad.index_add_(0, index.view(-1), sent.view(-1, sent.shape[-1]))
        return losses

    def _softmax(self, parts: list[Tensor], positive: Tensor, log_weights: Tensor | None) -> Tensor:
        """The losses of rows of similarities, −inf where one does not count. `parts` then hold the softmax times
        scale/T. The positive counts: the largest is never −inf."""
        t = self.rule.temperature
        for part in parts:
            part.div_(t)
            if log_weights is not None:
                part.add_(log_weights[..., : part.shape[1]])
        top = torch.stack([part.amax(1) for part in parts]).amax(0)[:, None]
        total = torch.stack([part.sub_(top).exp_().sum(1) for part in parts]).sum(0)[:, None]
        for part in parts:
            part.mul_(self.scale / t / total)
        return (top - positive / t + total.log())[:, 0]
