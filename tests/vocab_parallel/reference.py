"""The statistics by their definitions, in float64 on one process, and random inputs to compare the operation with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle_megatron.groups import group_rank
from twinkle_megatron.vocab_parallel import VocabShard, cross_entropy, token_stats

DIFFERENTIABLE = ('log_prob', 'log_normalizer', 'entropy', 'mean_logit')
SMOOTHING, Z_LOSS = 0.1, 1e-3


def plain(
    logits: Tensor, target: Tensor, vocab_size: int, temperature: float = 1.0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Every statistic and the cross entropy of whole logits `[..., columns]`, by plain autograd; −100 is ignored."""
    x = logits[..., :vocab_size]
    kept = target != -100
    y = torch.where(kept[..., None], x.to(dtype) / temperature, 0)
    log_p = y.log_softmax(-1)
    p = log_p.exp()
    found = {
        'log_prob': log_p.gather(-1, target.long().clamp(0)[..., None])[..., 0],
        'log_normalizer': y.logsumexp(-1),
        'entropy': -(p * torch.where(p == 0, 0, log_p)).sum(-1),
        'mean_logit': y.mean(-1),
    }
    smooth = (1 - SMOOTHING) * -found['log_prob'] + SMOOTHING * (found['log_normalizer'] - found['mean_logit'])
    found['cross_entropy'] = smooth + Z_LOSS * found['log_normalizer'] ** 2
    found = {name: torch.where(kept, value, 0) for name, value in found.items()}
    best = x.isnan() | (x == x.amax(-1, keepdim=True))
    first = torch.where(best, torch.arange(vocab_size), vocab_size).amin(-1)
    return {**found, 'argmax': torch.where(kept, first, -1)}


def ours(logits: Tensor, target: Tensor, shard: VocabShard, **options: Any) -> dict[str, Tensor | None]:
    """The same names from the operation under test."""
    stats = token_stats(logits, target, shard=shard, entropy=True, mean_logit=True, argmax=True, **options)
    weights = {'label_smoothing': SMOOTHING, 'z_loss': Z_LOSS}
    found = {name: getattr(stats, name) for name in (*DIFFERENTIABLE, 'argmax')}
    return {**found, 'cross_entropy': cross_entropy(logits, target, shard=shard, **weights, **options)}


def upstream(seed: int, lead: Sequence[int]) -> dict[str, Tensor]:
    """A random gradient for each differentiable output, float64."""
    generator = torch.Generator().manual_seed(seed)
    names = (*DIFFERENTIABLE, 'cross_entropy')
    return {name: torch.randn(tuple(lead), generator=generator, dtype=torch.float64) for name in names}


def gradient(outputs: dict[str, Tensor], x: Tensor, weights: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """d/dx of the outputs `names`, each weighted with its upstream gradient."""
    chosen = [outputs[name] for name in names]
    grads = [weights[name].to(out.dtype) for name, out in zip(names, chosen)]
    return torch.autograd.grad(chosen, x, grads, retain_graph=True)[0]


GROUPS = (DIFFERENTIABLE, ('cross_entropy',))
"""Outputs whose gradients are taken together."""


@dataclass(frozen=True)
class Example:
    """Random logits that are cut over `len(widths)` ranks, and everything that may be odd about them."""

    seed: int
    lead: tuple[int, ...]
    vocab_size: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    temperature: float
    scale: float
    offset: float
    layouts: tuple[str, ...]
    ignored: float
    ignored_holds: float
    masked: str
    padding: float
    label_dtype: torch.dtype
    chunk_size: int | None

    @classmethod
    def draw(cls, pick: Callable[[Sequence[Any]], Any], ranks: int) -> Example:
        """`pick` chooses one of several options."""
        vocab_size = pick([1, 2, 3, 5, 8, 13, 33, 64])
        cuts = sorted(pick(range(vocab_size + 1)) for _ in range(ranks - 1))
        widths = [stop - start for start, stop in zip([0, *cuts], [*cuts, vocab_size])]
        widths[-1] += pick([0, 0, 1, 7])
        layouts = ['contiguous', 'contiguous', 'transposed', 'sliced', 'stepped', 'columns first', 'expanded']
        return cls(
            seed=pick(range(1 << 20)),
            lead=pick([(), (0,), (1,), (2,), (7,), (2, 3), (3, 2), (1, 4), (0, 3), (2, 3, 2)]),
            vocab_size=vocab_size,
            widths=tuple(widths),
            dtype=pick([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
            temperature=pick([1.0, 0.5, 0.7, 3, 1e-3, 1e3]),
            scale=pick([1.0, 0.0, 10.0]),
            offset=pick([0.0, 0.0, -50.0, 1e4]),
            layouts=(pick(layouts),) * ranks
            if pick([True, False])
            else tuple(pick(layouts[:-1]) for _ in range(ranks)),
            ignored=pick([0.0, 0.3, 1.0]),
            ignored_holds=pick([0.0, math.nan, math.inf, -math.inf]),
            masked=pick(['', '', 'some', 'first shard']),
            padding=pick([0.0, math.nan, math.inf, -math.inf, 3e38]),
            label_dtype=pick([torch.int64, torch.int32, torch.int16]),
            chunk_size=pick([None, None, 1, 3, 1000]),
        )

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Whole logits `[..., columns]`, padding included, and labels `[...]`."""
        g = torch.Generator().manual_seed(self.seed)
        x = torch.randn(*self.lead, sum(self.widths), generator=g, dtype=torch.float64) * self.scale + self.offset
        target = torch.randint(self.vocab_size, self.lead, generator=g)
        if self.masked:
            some = torch.rand(x.shape, generator=g) < 0.5
            first = (torch.arange(x.shape[-1]) < self.widths[0]).expand_as(x)
            last_real = torch.arange(x.shape[-1]) == self.vocab_size - 1
            x.masked_fill_((some if self.masked == 'some' else first) & ~last_real, -math.inf)
        if 'expanded' in self.layouts and self.lead:
            x = x[:1].expand(*self.lead, -1).clone()
        else:
            ignored = torch.rand(self.lead, generator=g) < self.ignored
            target = torch.where(ignored, -100, target)
            x = torch.where(
                ignored[..., None], torch.where(torch.rand(x.shape, generator=g) < 0.5, x, self.ignored_holds), x
            )
        x[..., self.vocab_size :] = self.padding
        return x.to(self.dtype), target.to(self.label_dtype)

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """This rank's columns, lying in memory as `layouts` says."""
        start = sum(self.widths[:rank])
        return lay_out(whole[..., start : start + self.widths[rank]], self.layouts[rank])

    def shard(self, group: Any) -> VocabShard:
        start = sum(self.widths[: group_rank(group)])
        return VocabShard(start, start + self.widths[group_rank(group)], self.vocab_size, group)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The values of `x` as another view of memory; what lies between them is NaN."""
    if layout == 'transposed' and x.dim() > 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == 'sliced' and x.dim() > 1:
        room = x.new_full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1]), math.nan)
        room[..., :-1, :] = x
        return room[..., :-1, :]
    if layout == 'stepped':
        room = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
        room[..., ::2] = x
        return room[..., ::2]
    if layout == 'columns first':
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == 'expanded' and x.dim() > 1 and x.shape[0]:
        return x[:1].expand(x.shape)
    return x.contiguous().clone()


def bits(x: Tensor) -> Tensor:
    """Raw bits, for comparisons in which NaN equals NaN."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(width)


def run_example(example: Example, group: Any, **options: Any) -> dict[str, Tensor]:
    """The outputs of the operation on this rank and its gradients `grad 0`, `grad 1` (see `GROUPS`)."""
    whole, target = example.tensors()
    x = example.local(whole, group_rank(group)).detach().requires_grad_()
    before, labels_before = bits(x.detach()).clone(), target.clone()
    options = {'temperature': example.temperature, 'chunk_size': example.chunk_size, **options}
    found = ours(x, target, example.shard(group), **options)
    weights = upstream(example.seed, example.lead)
    for i, names in enumerate(GROUPS):
        grad = gradient(found, x, weights, names)
        assert (grad.dtype, grad.device, grad.shape) == (x.dtype, x.device, x.shape)
        found[f'grad {i}'] = grad
    assert torch.equal(bits(x.detach()), before), 'the logits were written to'
    assert torch.equal(target, labels_before), 'the labels were written to'
    return {name: value.detach() for name, value in found.items()}


def assert_example(example: Example, ranks: list[dict[str, Tensor]]) -> None:
    """The outputs are bitwise the same on all ranks; they and the joined gradients equal the definitions'."""
    for other in ranks[1:]:
        for name in (*DIFFERENTIABLE, 'cross_entropy', 'argmax'):
            assert torch.equal(bits(other[name]), bits(ranks[0][name])), f'{name} differs among ranks: {example}'
    whole, target = example.tensors()
    accumulate = torch.float64 if example.dtype == torch.float64 else torch.float32
    want, own = (_plain_example(example, whole, target, dtype) for dtype in (torch.float64, accumulate))
    y = whole[..., : example.vocab_size][target != -100].double() / example.temperature
    size = float(y[y.isfinite()].abs().max()) if y.isfinite().any() else 0.0
    unit = torch.finfo(accumulate).eps * (8 + size)
    got = {**ranks[0], **{f'grad {i}': torch.cat([r[f'grad {i}'] for r in ranks], -1) for i in range(len(GROUPS))}}
    assert torch.equal(got['argmax'], want['argmax']), (got['argmax'], want['argmax'], example)
    for name, expected in want.items():
        if name == 'argmax':
            continue
        is_grad = name.startswith('grad')
        assert got[name].dtype == (example.dtype if is_grad else accumulate), (name, example)
        # z_loss squares a number of the size of the logits
        floor = 4 * unit * (max(1, 1 / example.temperature) * 4 if is_grad else 1)
        floor *= 1 + (2 * Z_LOSS * size if name in ('cross_entropy', 'grad 1') else 0)
        rounding = torch.finfo(example.dtype if is_grad else accumulate).eps
        assert_as_exact_as_torch(got[name], expected, own[name], floor, rounding, f'{name} of {example}')
        exact_zero = (target == -100)[..., None].expand_as(expected) if is_grad else target == -100
        assert (got[name][exact_zero] == 0).all(), f'{name} of ignored tokens: {example}'
    for i in range(len(GROUPS)):
        assert (got[f'grad {i}'][..., example.vocab_size :] == 0).all(), f'gradient of the padding: {example}'


def _plain_example(example: Example, whole: Tensor, target: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    x = (whole.double() if dtype == torch.float64 else whole).detach().requires_grad_()
    found = plain(x, target, example.vocab_size, example.temperature, dtype)
    weights = upstream(example.seed, example.lead)
    grads = {f'grad {i}': gradient(found, x, weights, names) for i, names in enumerate(GROUPS)}
    return {name: value.detach() for name, value in {**found, **grads}.items()}


def assert_as_exact_as_torch(
    got: Tensor, want: Tensor, own: Tensor, floor: float, rounding: float, what: str, times: float = 4
) -> None:
    """|got − want| is at most `times` the error of plain torch `own` in the same dtype, or a few roundings."""
    rounded = want.to(own.dtype).double()  # inf where it overflows float16
    finite = rounded.isfinite() & own.isfinite()
    assert got.shape == want.shape, what
    alike = torch.where(rounded.isnan(), got.isnan(), got == rounded)
    beyond_torch = rounded.isfinite() & ~own.isfinite()
    at_the_edge = want.isfinite() & rounded.isinf() & (got.abs() > 0.99 * torch.finfo(own.dtype).max)
    assert (rounded.isfinite() | alike | at_the_edge).all(), f'{what}: {got} instead of {want}'
    assert (got.isfinite() | ~finite).all(), f'{what}: {got} instead of {want}'
    assert not (got.isnan() & beyond_torch & ~own.isnan()).any(), f'{what}: {got} instead of {want}'
    if not finite.any():
        return
    error = (got.double() - want)[finite].abs()
    allowed = times * float((own.double() - want)[finite].abs().max()) + floor + rounding * want[finite].abs()
    assert (error <= allowed).all(), f'{what}: error {error.max():.3g}, allowed {allowed.min():.3g}: {got} not {want}'


def examples(seed: int, count: int, ranks: int) -> list[Example]:
    """Reproducible random examples."""
    rng = random.Random(seed)
    return [Example.draw(rng.choice, ranks) for _ in range(count)]
