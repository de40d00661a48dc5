"""Random linear heads, the plain float64 formula with their logits written out, and how the two are compared."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.vocab_parallel.reference import (
    DIFFERENTIABLE,
    GROUPS,
    SMOOTHING,
    Z_LOSS,
    Example,
    assert_as_exact_as_torch,
    bits,
    lay_out,
    ours,
    plain,
    upstream,
)
from twinkle_megatron.groups import group_rank, group_size
from twinkle_megatron.vocab_parallel import LinearHead, linear_source, workspace

NAMES = ('hidden', 'weight', 'bias')
LAYOUTS = ['contiguous', 'contiguous', 'transposed', 'sliced', 'stepped', 'columns first']


@dataclass(frozen=True)
class HeadExample:
    """Hidden states, the weight whose rows are cut over the ranks, and everything that may be odd about them.

    `base` holds what is as in an example with logits: leading dims (here those of the whole hidden states), vocabulary,
    dtype, labels, what ignored rows and padding hold, and which columns the bias masks.
    """

    base: Example
    width: int
    whole_numbers: bool
    """Small whole numbers, whose products are exact in every dtype and in every order of summation."""
    with_bias: bool
    logit_scale: float
    sequence_parallel: bool
    transposed: bool
    max_workspace_mb: float | None
    largest_tile_mb: float
    """What workspace a tile takes at most; the rest is left for tiles that are kept."""
    hidden_layout: str
    weight_layout: str

    @classmethod
    def draw(cls, pick: Callable[[Sequence[Any]], Any], ranks: int) -> HeadExample:
        """`pick` chooses one of several options."""
        base = Example.draw(pick, ranks)
        if base.dtype == torch.float16:  # gradients that overflow are not compared: parts of a sum do so before it
            base = replace(base, temperature=max(base.temperature, 0.5))
        sequence_parallel = bool(base.lead) and pick([True, False])
        if sequence_parallel:
            base = replace(base, lead=(base.lead[0] * ranks, *base.lead[1:]))
        return cls(
            base=base,
            width=pick([1, 2, 5, 16]),
            whole_numbers=pick([True, False]),
            with_bias=bool(base.masked) or pick([True, False]),
            logit_scale=pick([1.0, 1.0, 0.5, 0.7, 3]),
            sequence_parallel=sequence_parallel,
            transposed=len(base.lead) > 1 and pick([True, False]),
            max_workspace_mb=pick([None, 1e-9, 1e-5, 2e-4, 1e-3, 1, 1e4]),
            largest_tile_mb=pick([8, 1e-4, 1e-3]),
            hidden_layout=pick(LAYOUTS),
            weight_layout=pick(LAYOUTS),
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def lead(self) -> tuple[int, ...]:
        """Of the logits."""
        first, second, *rest = (*self.base.lead, 0, 0)
        return (second, first, *rest[:-2]) if self.transposed else self.base.lead

    @property
    def options(self) -> dict[str, Any]:
        """Of the functions that take the head."""
        return {'temperature': self.base.temperature, 'chunk_size': self.base.chunk_size}

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Whole hidden states `[*base.lead, H]`, weight `[columns, H]` and bias `[columns]`, padding included."""
        base, g = self.base, torch.Generator().manual_seed(self.base.seed)
        columns = sum(base.widths)

        def draw(*shape: int) -> Tensor:
            if self.whole_numbers:
                return torch.randint(-3, 4, shape, generator=g).double()
            return torch.randn(shape, generator=g, dtype=torch.float64)

        hidden, weight, bias = draw(*base.lead, self.width), draw(columns, self.width), draw(columns)
        if not self.whole_numbers:
            hidden *= base.scale
        at = torch.arange(columns)
        if base.masked:
            some = torch.rand(columns, generator=g) < 0.5
            masks = some if base.masked == 'some' else at < base.widths[0]
            bias[masks & (at != base.vocab_size - 1)] = -torch.inf
        ignored = (self._target() == -100)[..., None] & (torch.rand(hidden.shape, generator=g) < 0.5)
        hidden = torch.where(ignored, base.ignored_holds, hidden)
        weight[base.vocab_size :] = bias[base.vocab_size :] = base.padding
        return hidden.to(base.dtype), weight.to(base.dtype), bias.to(base.dtype) if self.with_bias else None

    def _target(self) -> Tensor:
        """In the order of the hidden states."""
        g = torch.Generator().manual_seed(self.base.seed + 1)
        target = torch.randint(self.vocab_size, self.base.lead, generator=g)
        return torch.where(torch.rand(self.base.lead, generator=g) < self.base.ignored, -100, target)

    def target(self) -> Tensor:
        """`[*lead]`."""
        target = self._target().to(self.base.label_dtype)
        return target.transpose(0, 1) if self.transposed else target

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of whole tensors, or of this rank's rows of the weight, in the order of the head."""
        x = hidden @ weight.T
        x = (x if bias is None else x + bias) * self.logit_scale
        return x.transpose(0, 1) if self.transposed else x

    def local(self, group: Any) -> list[Tensor]:
        """This rank's hidden, weight and, where there is one, bias, as leaves that want a gradient."""
        hidden, weight, bias = self.tensors()
        rank, ranks, shard = group_rank(group), group_size(group), self.base.shard(group)
        if self.sequence_parallel:
            hidden = hidden.chunk(ranks)[rank] if hidden.shape[0] else hidden
        rows = slice(shard.start, shard.stop)
        found = [lay_out(hidden, self.hidden_layout), lay_out(weight[rows], self.weight_layout)]
        if bias is not None:
            found.append(bias[rows].clone())
        return [t.detach().requires_grad_() for t in found]

    def head(self, tensors: Sequence[Tensor], **options: Any) -> LinearHead:
        """From what `local` gave."""
        hidden, weight, *bias = tensors
        options = {'max_workspace_mb': self.max_workspace_mb, **options}
        found = LinearHead(
            hidden,
            weight,
            bias=bias[0] if bias else None,
            sequence_parallel=self.sequence_parallel,
            logit_scale=self.logit_scale,
            **options,
        )
        return found.transpose(0, 1) if self.transposed else found


def gradients(
    outputs: dict[str, Tensor], tensors: Sequence[Tensor], weights: dict[str, Tensor], names: Sequence[str]
) -> tuple[Tensor, ...]:
    """Of all `tensors`, from the outputs `names`, each weighted with its upstream gradient."""
    chosen = [outputs[name] for name in names]
    grads = [weights[name].to(out.dtype) for name, out in zip(names, chosen)]
    return torch.autograd.grad(chosen, tensors, grads, retain_graph=True)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written to holds NaN: whoever reads it is found out."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            return out.fill_(torch.nan) if out.is_floating_point() else out.fill_(-77)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'empty', filled(torch.empty))
        patch.setattr(torch, 'empty_like', filled(torch.empty_like))
        patch.setattr(torch.Tensor, 'new_empty', filled(torch.Tensor.new_empty))
        patch.setattr(linear_source, '_empty_weight', filled(linear_source._empty_weight))
        yield


@contextlib.contextmanager
def largest_tile(mb: float) -> Iterator[None]:
    """On CPU, where `max_workspace_mb` is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(workspace._LARGEST_MB, 'cpu', mb)
        yield


def run_head(example: HeadExample, group: Any, **options: Any) -> dict[str, Tensor]:
    """The outputs on this rank and the gradients `hidden 0`, `weight 0`, … (see `GROUPS`)."""
    tensors, target = example.local(group), example.target()
    before, labels_before = [bits(t.detach()).clone() for t in tensors], target.clone()
    with poisoned(), largest_tile(example.largest_tile_mb):
        head = example.head(tensors, **options)
        found = ours(head, target, example.base.shard(group), **example.options)
        weights = upstream(example.base.seed, example.lead)
        for i, names in enumerate(GROUPS):
            for name, tensor, grad in zip(NAMES, tensors, gradients(found, tensors, weights, names)):
                assert (grad.dtype, grad.device, grad.shape) == (tensor.dtype, tensor.device, tensor.shape), name
                found[f'{name} {i}'] = grad
    for name, tensor, bits_before in zip(NAMES, tensors, before):
        assert torch.equal(bits(tensor.detach()), bits_before), f'{name} was written to'
    assert torch.equal(target, labels_before), 'the labels were written to'
    return {name: value.detach() for name, value in found.items()}


def plain_head(example: HeadExample, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same names by plain autograd through logits that are built, in float64 or in the dtype of the tensors."""
    whole = [t for t in example.tensors() if t is not None]
    tensors = [(t.double() if dtype == torch.float64 else t).detach().requires_grad_() for t in whole]
    target = example.target()
    kept = (target != -100).transpose(0, 1) if example.transposed else target != -100
    hidden, weight, *bias = tensors
    true = slice(example.vocab_size)
    x = example.logits(
        torch.where(kept[..., None], hidden, 0), weight[true], bias[0][true] if bias else None
    )  # an ignored NaN would reach the weight
    found = plain(x, target, example.vocab_size, example.base.temperature, dtype)
    weights = upstream(example.base.seed, example.lead)
    for i, names in enumerate(GROUPS):
        for name, grad in zip((*NAMES[: len(tensors)], 'logits'), gradients(found, [*tensors, x], weights, names)):
            found[f'{name} {i}'] = grad
    found['logits'] = x
    return {name: value.detach() for name, value in found.items()}


def whole_gradients(example: HeadExample, ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """From every rank's gradients those of the whole tensors. The hidden states' have to be bitwise the same."""
    found = {}
    for i in range(len(GROUPS)):
        for name in NAMES if example.with_bias else NAMES[:2]:
            parts = [rank[f'{name} {i}'] for rank in ranks]
            if name != 'hidden' or example.sequence_parallel:
                found[f'{name} {i}'] = torch.cat(parts)
                continue
            found[f'{name} {i}'] = parts[0]
            assert all(torch.equal(bits(part), bits(parts[0])) for part in parts), f'{name} {i} differs: {example}'
    return found


def assert_head(example: HeadExample, ranks: list[dict[str, Tensor]]) -> None:
    """The outputs are bitwise the same on all ranks; they and the gradients equal those of the plain formula."""
    for other in ranks[1:]:
        for name in (*DIFFERENTIABLE, 'cross_entropy', 'argmax'):
            assert torch.equal(bits(other[name]), bits(ranks[0][name])), f'{name} differs among ranks: {example}'
    target, dtype = example.target(), example.dtype
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    want, own = plain_head(example, torch.float64), plain_head(example, accumulate)
    got = {**ranks[0], **whole_gradients(example, ranks)}
    _assert_argmax(example, got['argmax'], want, own)
    size = _size(example)
    unit = torch.finfo(accumulate).eps * (8 + size)
    for name in (*DIFFERENTIABLE, 'cross_entropy'):
        assert got[name].dtype == accumulate, (name, example)
        floor = 4 * unit * (1 + (2 * Z_LOSS * size if name == 'cross_entropy' else 0))
        rounding = torch.finfo(accumulate).eps
        assert_as_exact_as_torch(got[name], want[name], own[name], floor, rounding, f'{name} of {example}')
        assert (got[name][target == -100] == 0).all(), f'{name} of ignored tokens: {example}'
    for name in [name for name in got if name.split()[0] in NAMES]:
        rounding = torch.finfo(dtype).eps
        floor = 4 * unit * _slope(example, name, size) + 2 * rounding * _terms(example, name, want)
        assert got[name].dtype == dtype, (name, example)
        assert_as_exact_as_torch(got[name], want[name], own[name], floor, rounding, f'{name} of {example}')
        if name.startswith('hidden'):
            ignored = example._target() == -100
            assert (got[name][ignored] == 0).all(), f'{name} of ignored tokens: {example}'
        else:
            assert (got[name][example.vocab_size :] == 0).all(), f'{name} of the padding: {example}'


def _assert_argmax(example: HeadExample, got: Tensor, want: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """The lowest id of the largest logit; where products are rounded, of one that lies as near to the largest."""
    if example.whole_numbers:
        assert torch.equal(got, own['argmax']), (got, own['argmax'], example)
        return
    kept = want['argmax'] >= 0
    assert torch.equal(got[~kept], want['argmax'][~kept]), example
    x = want['logits'][kept]
    best, chosen = x.amax(-1), x.gather(-1, got[kept][:, None])[:, 0]
    room = 4 * torch.finfo(example.dtype).eps * _size(example) * example.base.temperature
    assert (best - chosen <= room).all() or best.isinf().any(), (got, want['argmax'], example)


def _size(example: HeadExample) -> float:
    """The largest sum of what a logit is made of, over the temperature: what its rounding is relative to."""
    hidden, weight, bias = example.tensors()
    hidden = hidden.double()[example._target() != -100].abs()
    x = hidden @ weight[: example.vocab_size].double().abs().T
    if bias is not None:
        x = x + bias[: example.vocab_size].double().abs().nan_to_num(0, 0, 0)
    return float(x.max()) * example.logit_scale / example.base.temperature if x.numel() else 0.0


def _slope(example: HeadExample, name: str, size: float) -> float:
    """How much an error of one unit in every probability and upstream gradient moves the named gradient, at most."""
    hidden, weight, _ = example.tensors()
    kept = example._target() != -100
    if not kept.any():
        return 0.0
    slope = example.logit_scale / example.base.temperature
    slope *= 4 + (2 * Z_LOSS * size if name.endswith('1') else size + SMOOTHING)
    if name.startswith('hidden'):
        return slope * float(weight[: example.vocab_size].double().abs().amax())
    return slope * float(hidden[kept].double().abs().amax() if name.startswith('weight') else 1) * int(kept.sum())


def _terms(example: HeadExample, name: str, want: dict[str, Tensor]) -> float:
    """The largest sum of absolute terms of the named gradient, each of which is rounded to the dtype on its way."""
    hidden, weight, _ = example.tensors()
    grad = want[f'logits {name[-1]}'].abs()
    grad = grad.transpose(0, 1) if example.transposed else grad
    kept = example._target() != -100
    grad, hidden = grad[kept] * example.logit_scale, hidden[kept].double().abs()
    if name.startswith('hidden'):
        terms = grad @ weight[: example.vocab_size].double().abs()
    else:
        terms = grad.T @ hidden if name.startswith('weight') else grad.sum(0)
    return float(terms.max()) if terms.numel() else 0.0


def head_examples(seed: int, count: int, ranks: int) -> list[HeadExample]:
    """Reproducible random examples."""
    rng = random.Random(seed)
    return [HeadExample.draw(rng.choice, ranks) for _ in range(count)]
