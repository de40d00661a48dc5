"""Random pairs of student and teacher, the divergence by its definition in float64, and how the two are compared."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.vocab_parallel.reference import assert_as_exact_as_torch, bits, lay_out
from twinkle_megatron.groups import group_rank, group_size
from twinkle_megatron.vocab_parallel import LinearHead, Logits, VocabShard, generalized_jsd

F64 = torch.float64
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ('contiguous', 'transposed', 'sliced', 'stepped', 'columns first')
NAMES = {1: ('logits',), 2: ('hidden', 'weight'), 3: ('hidden', 'weight', 'bias')}


def plain(
    student: Tensor,
    teacher: Tensor,
    beta: float,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype = F64,
) -> Tensor:
    """The divergence of whole logits by plain autograd. A probability of 0 adds nothing, and has no logarithm."""
    kept = torch.ones(student.shape[:-1], dtype=torch.bool) if mask is None else mask
    y, z = (torch.where(kept[..., None], x[..., :vocab_size].to(dtype) / temperature, 0) for x in (student, teacher))
    log_s, log_t = y.log_softmax(-1), z.log_softmax(-1)
    s, t = log_s.exp(), log_t.exp()

    def kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
        log_p, log_q = (torch.where(p > 0, log, 0) for log in (log_p, log_q))
        return (p * (log_p - log_q)).sum(-1)

    if beta == 0:
        value = kl(t, log_t, log_s)
    elif beta == 1:
        value = kl(s, log_s, log_t)
    else:
        mixture = beta * t + (1 - beta) * s
        log_m = torch.where(mixture > 0, mixture, 1).log()
        value = beta * kl(t, log_t, log_m) + (1 - beta) * kl(s, log_s, log_m)
    return torch.where(kept, value, 0)


def gradient(value: Tensor, x: Tensor, upstream: Tensor) -> Tensor:
    """d/dx of the values, each weighted with its upstream gradient."""
    return torch.autograd.grad(value, x, upstream.to(value.dtype), retain_graph=True)[0]


@dataclass(frozen=True)
class Side:
    """Student or teacher: logits, or a linear head that makes them."""

    dtype: torch.dtype
    layouts: tuple[str, ...]
    offset: float
    masked: bool
    """Some columns are -inf, other ones in each row of logits; in a head by its bias."""
    head: bool
    sequence_parallel: bool
    transposed: bool
    largest_mb: float | None

    @property
    def rounds(self) -> bool:
        """Whether products of a head are rounded; in half precision they are of small whole numbers, and exact."""
        return self.dtype.itemsize > 2

    @classmethod
    def draw(cls, pick: Callable[[Sequence[Any]], Any], ranks: int, lead: tuple[int, ...], heads: bool) -> Side:
        head = heads and pick([True, False])
        return cls(
            dtype=pick(DTYPES),
            layouts=tuple(pick(LAYOUTS) for _ in range(ranks)),
            offset=pick([0.0, 0.0, -30.0, 1e4]),
            masked=pick([False, False, True]),
            head=head,
            sequence_parallel=head and bool(lead) and lead[0] % ranks == 0 and pick([True, False]),
            transposed=head and len(lead) == 2 and lead[0] == lead[1] and pick([True, False]),
            largest_mb=pick([None, 1e-5, 2e-4]),
        )


@dataclass(frozen=True)
class Pair:
    """A student and a teacher of the same tokens, cut over `len(widths)` ranks, and everything odd about them."""

    seed: int
    lead: tuple[int, ...]
    vocab_size: int
    widths: tuple[int, ...]
    student: Side
    teacher: Side
    beta: float
    temperature: float
    scale: float
    alike: float
    """How much of the teacher's logits is the student's."""
    ignored: float | None
    """Part of the tokens; None: no mask."""
    ignored_holds: float
    padding: float
    chunk_size: int | None

    @classmethod
    def draw(cls, pick: Callable[[Sequence[Any]], Any], ranks: int, heads: bool = False) -> Pair:
        """`pick` chooses one of several options."""
        vocab_size = pick([1, 2, 3, 5, 8, 13, 33, 64])
        cuts = sorted(pick(range(vocab_size + 1)) for _ in range(ranks - 1))
        widths = [stop - start for start, stop in zip([0, *cuts], [*cuts, vocab_size])]
        widths[-1] += pick([0, 0, 1, 7])
        lead = pick([(), (0,), (1,), (2,), (6,), (2, 3), (3, 2), (3, 3), (0, 3), (6, 2)])
        student, teacher = (Side.draw(pick, ranks, lead, heads) for _ in range(2))
        # a probability that float32 rounds to 0 counts as 0: it is no reason for an infinite divergence
        infinite = student.masked or teacher.masked
        temperatures = [1.0, 0.7, 3] if infinite else [1.0, 0.5, 0.7, 3, 1e-2, 1e3]
        if student.head and student.dtype == torch.float16:  # where parts of a sum overflow there is nothing to compare
            temperatures = [1.0, 0.7, 3]
        return cls(
            seed=pick(range(1 << 20)),
            lead=lead,
            vocab_size=vocab_size,
            widths=tuple(widths),
            student=student,
            teacher=teacher,
            beta=pick(BETAS),
            temperature=pick(temperatures),
            scale=pick([1.0, 0.1] if infinite else [1.0, 0.0, 10.0]),
            alike=pick([0.0, 0.0, 0.999, 1.0]),
            ignored=pick([None, 0.0, 0.3, 1.0]),
            ignored_holds=pick([0.0, math.nan, math.inf, -math.inf]),
            padding=pick([0.0, math.nan, math.inf, -math.inf, 3e4]),
            chunk_size=pick([None, None, 1, 3, 1000]),
        )

    @property
    def accumulate(self) -> torch.dtype:
        return F64 if self.student.dtype == F64 else torch.float32

    def mask(self) -> Tensor | None:
        if self.ignored is None:
            return None
        return torch.rand(self.lead, generator=torch.Generator().manual_seed(self.seed + 1)) >= self.ignored

    def upstream(self) -> Tensor:
        return torch.randn(self.lead, generator=torch.Generator().manual_seed(self.seed + 2), dtype=F64)

    def tensors(self, which: str) -> list[Tensor]:
        """Whole logits `[*lead, columns]`, or hidden states, weight and bias; padding included."""
        side: Side = getattr(self, which)
        own, other = torch.Generator(), torch.Generator().manual_seed(self.seed)
        own.manual_seed(self.seed if which == 'student' else self.seed + 3)
        columns, alike = sum(self.widths), self.alike if which == 'teacher' else 0.0

        def draw(*shape: int) -> Tensor:
            if side.head and not side.rounds:
                return torch.randint(-2, 3, shape, generator=own).to(F64)
            mine, theirs = (torch.randn(shape, generator=g, dtype=F64) for g in (own, other))
            return ((1 - alike) * mine + alike * theirs) * self.scale

        gone = torch.rand(columns, generator=own) < 0.4
        gone[self.vocab_size - 1] = False
        if side.head:
            hidden, weight, bias = draw(*self.lead, 3), draw(columns, 3), draw(columns)
            if side.masked:
                bias[gone] = -math.inf
            weight[self.vocab_size :] = bias[self.vocab_size :] = self.padding
            found = [self._spoilt(hidden, side.transposed), weight, bias]
        else:
            x = draw(*self.lead, columns) + side.offset
            if side.masked:
                some = torch.rand(x.shape, generator=own) < 0.4
                x[some & (torch.arange(columns) != self.vocab_size - 1)] = -math.inf
            x = self._spoilt(x, False)
            x[..., self.vocab_size :] = self.padding
            found = [x]
        return [t.to(side.dtype) for t in found]

    def _spoilt(self, x: Tensor, transposed: bool) -> Tensor:
        mask = self.mask()
        if mask is None:
            return x
        mask = mask.transpose(0, 1) if transposed else mask
        half = torch.rand(x.shape, generator=torch.Generator().manual_seed(self.seed + 4)) < 0.5
        return torch.where(~mask[..., None] & half, self.ignored_holds, x)

    def logits(self, which: str, tensors: Sequence[Tensor]) -> Tensor:
        """From whole tensors; a head's without padding."""
        if len(tensors) == 1:
            return tensors[0]
        hidden, weight, bias = tensors
        transposed = getattr(self, which).transposed
        mask = self.mask()
        if mask is not None:  # NaN · 0 would reach the weight
            mask = mask.transpose(0, 1) if transposed else mask
            hidden = torch.where(mask[..., None], hidden, 0)
        true = slice(self.vocab_size)  # an infinite padding would reach the hidden states
        x = hidden @ weight[true].T + bias[true]
        return x.transpose(0, 1) if transposed else x

    def local(self, which: str, group: Any) -> list[Tensor]:
        """This rank's tensors, lying in memory as `layouts` says."""
        side: Side = getattr(self, which)
        rank, shard = group_rank(group), self.shard(group)
        layout, columns = side.layouts[rank], slice(shard.start, shard.stop)
        whole = self.tensors(which)
        if not side.head:
            return [lay_out(whole[0][..., columns], layout)]
        hidden, weight, bias = whole
        hidden = hidden.chunk(group_size(group))[rank] if side.sequence_parallel and len(hidden) else hidden
        return [lay_out(hidden, layout), lay_out(weight[columns], layout), bias[columns].clone()]

    def shard(self, group: Any) -> VocabShard:
        rank = group_rank(group)
        start = sum(self.widths[:rank])
        return VocabShard(start, start + self.widths[rank], self.vocab_size, group)


def given(side: Side, tensors: Sequence[Tensor]) -> Logits:
    """What the operation takes, from what `Pair.local` gave."""
    if not side.head:
        return tensors[0]
    head = LinearHead(
        tensors[0],
        tensors[1],
        bias=tensors[2],
        sequence_parallel=side.sequence_parallel,
        max_workspace_mb=side.largest_mb,
    )
    return head.transpose(0, 1) if side.transposed else head


def run_pair(pair: Pair, group: Any) -> dict[str, Tensor]:
    """The value on this rank, and the gradients of the student's tensors. No input is written to."""
    student = [t.detach().requires_grad_() for t in pair.local('student', group)]
    teacher = pair.local('teacher', group)
    before = [bits(t.detach()).clone() for t in (*student, *teacher)]
    value = generalized_jsd(
        given(pair.student, student),
        given(pair.teacher, teacher),
        shard=pair.shard(group),
        beta=pair.beta,
        temperature=pair.temperature,
        mask=pair.mask(),
        chunk_size=pair.chunk_size,
    )
    grads = torch.autograd.grad(value, student, pair.upstream().to(value.dtype))
    for tensor, grad, saved in zip((*student, *teacher), (*grads, *teacher), before):
        assert (grad.dtype, grad.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(tensor.detach()), saved), 'an input was written to'
    return {'value': value.detach(), **dict(zip(NAMES[len(grads)], grads))}


def plain_pair(pair: Pair, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same of whole tensors by plain autograd, and the gradient of the logits that a head makes."""
    student, teacher = (
        [(t.to(dtype) if dtype == F64 else t).detach().requires_grad_(which == 'student') for t in pair.tensors(which)]
        for which in ('student', 'teacher')
    )
    x = pair.logits('student', student)
    value = plain(x, pair.logits('teacher', teacher), pair.beta, pair.temperature, pair.mask(), pair.vocab_size, dtype)
    # where the divergence is infinite, so is its gradient, if it has one
    upstream = torch.where(value.isfinite(), pair.upstream().to(dtype), 0)
    grads = torch.autograd.grad(value, [*student, x], upstream)
    return {'value': value.detach(), **dict(zip((*NAMES[len(student)], 'of logits'), grads))}


def whole_gradients(pair: Pair, ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """From every rank's. A gradient of hidden states that every rank holds has to be bitwise the same on all."""
    found = {}
    for name in list(ranks[0])[1:]:
        parts = [rank[name] for rank in ranks]
        if name == 'hidden' and not pair.student.sequence_parallel:
            assert all(torch.equal(bits(part), bits(parts[0])) for part in parts), f'{name} differs: {pair}'
            found[name] = parts[0]
        else:
            found[name] = torch.cat(parts, -1 if name == 'logits' else 0)
    return found


def assert_pair(pair: Pair, ranks: Sequence[dict[str, Tensor]]) -> None:
    """The value is bitwise the same on all ranks; it and the gradients equal those of the definition."""
    for other in ranks[1:]:
        assert torch.equal(bits(other['value']), bits(ranks[0]['value'])), f'the value differs among ranks: {pair}'
    want, own = plain_pair(pair, F64), plain_pair(pair, pair.accumulate)
    got = {'value': ranks[0]['value'], **whole_gradients(pair, ranks)}
    products = [torch.finfo(side.dtype).eps for side in (pair.student, pair.teacher) if side.head and side.rounds]
    unit = max([torch.finfo(pair.accumulate).eps, *products]) * (8 + _size(pair))
    assert got['value'].dtype == pair.accumulate
    rounding = torch.finfo(pair.accumulate).eps
    assert_as_exact_as_torch(got['value'], want['value'], own['value'], 4 * unit, rounding, f'value of {pair}')
    assert (got['value'] >= -4 * unit).all(), f'{got["value"]} is negative: {pair}'
    mask = pair.mask()
    if mask is not None:
        assert (got['value'][~mask] == 0).all(), f'value of ignored tokens: {pair}'
    if want['value'].isinf().any():  # shown by the value
        return
    whole = dict(zip(NAMES[len(got) - 1], pair.tensors('student')))
    for name in whole:
        rounding = torch.finfo(pair.student.dtype).eps
        floor = 16 * unit * max(1, 1 / pair.temperature)
        if name != 'logits':
            floor, terms = _of_head(pair, name, whole, want['of logits'], floor)
            floor += 2 * rounding * terms
        assert_as_exact_as_torch(got[name], want[name], own[name], floor, rounding, f'{name} of {pair}')
        if name != 'hidden':
            past = got[name][..., pair.vocab_size :] if name == 'logits' else got[name][pair.vocab_size :]
            assert (past == 0).all(), f'{name} of the padding: {pair}'
    if mask is not None:
        rows = mask.transpose(0, 1) if pair.student.transposed else mask
        assert (got['hidden' if pair.student.head else 'logits'][~rows] == 0).all(), (
            f'gradient of ignored tokens: {pair}'
        )


def _size(pair: Pair) -> float:
    """The largest logit over the temperature, or sum of what it is made of: what rounding is relative to."""
    sizes = [0.0]
    for which in ('student', 'teacher'):
        parts = [t.double().nan_to_num(0, 0, 0).abs() for t in pair.tensors(which)]
        x = pair.logits(which, parts)[..., : pair.vocab_size]
        x = x if pair.mask() is None else x[pair.mask()]
        sizes.append(float(x.max()) / pair.temperature if x.numel() else 0.0)
    return max(sizes)


def _of_head(pair: Pair, name: str, whole: dict[str, Tensor], of_logits: Tensor, floor: float) -> tuple[float, float]:
    """How much errors of `floor` in the gradient of the logits move that of the tensor, and the largest sum of absolute
    terms that it has."""
    g = of_logits.abs()[..., : pair.vocab_size].reshape(-1, pair.vocab_size)
    g = g.nan_to_num(0, 0, 0)
    hidden = whole['hidden'].double().nan_to_num(0, 0, 0).abs()
    hidden = (hidden.transpose(0, 1) if pair.student.transposed else hidden).reshape(-1, hidden.shape[-1])
    weight = whole['weight'].double()[: pair.vocab_size].abs()
    other = {'hidden': weight, 'weight': hidden, 'bias': torch.ones(len(g), 1, dtype=F64)}[name]
    terms = g @ other if name == 'hidden' else g.T @ other
    return floor * float(other.sum()), float(terms.max()) if terms.numel() else 0.0


def pairs(seed: int, count: int, ranks: int, heads: bool = False) -> list[Pair]:
    """Reproducible random pairs."""
    rng = random.Random(seed)
    return [Pair.draw(rng.choice, ranks, heads) for _ in range(count)]
