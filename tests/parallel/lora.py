"""A plain LoRA for the tiny GPT: low-rank terms beside Megatron's layers, whose own weights are frozen.

Terms are cut over tensor parallel ranks as the layers beside them are. Their weights follow from their names, like all
others of the tiny GPT.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from ranks import device
from tiny_gpt import Layout, Spec, build, set_weights
from torch import Tensor, nn

RANK = 3
LAYERS = ('linear_qkv', 'linear_proj', 'linear_fc1', 'linear_fc2')


class LowRank(nn.Module):
    """`x @ down.T @ up.T`: 'column' cuts `up` over TP, 'row' cuts `down`, 'ids' takes rows of `down.T` by their ids."""

    def __init__(self, kind: str, inputs: int, outputs: int, spec: Spec, layout: Layout) -> None:
        super().__init__()
        self.kind, self.sp, self.on = kind, layout.sp, True
        tp = ps.get_tensor_model_parallel_world_size()
        sizes = (inputs // tp if kind == 'row' else inputs, outputs // tp if kind == 'column' else outputs)
        self.down = nn.Parameter(torch.empty(RANK, sizes[0], dtype=spec.dtype, device=device()))
        self.up = nn.Parameter(torch.empty(sizes[1], RANK, dtype=spec.dtype, device=device()))
        if kind == 'column':
            set_tensor_model_parallel_attributes(self.up, True, 0, 1)
            setattr(self.down, 'sequence_parallel', layout.sp)  # noqa: B010
        if kind == 'row':
            set_tensor_model_parallel_attributes(self.down, True, 1, 1)
            setattr(self.up, 'sequence_parallel', layout.sp)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor | float:
        if not self.on:
            return 0.0
        if self.kind == 'ids':
            return self.down.t()[x] @ self.up.t()
        low = x @ self.down.t()
        if self.kind == 'row':
            low = (reduce_scatter_to_sequence_parallel_region if self.sp else reduce_from_tensor_model_parallel_region)(
                low
            )
        elif self.sp:
            low = gather_from_sequence_parallel_region(low)
        else:
            low = copy_to_tensor_model_parallel_region(low)
        return low @ self.up.t()


class Adapted(nn.Module):
    """A layer with a low-rank term beside it."""

    def __init__(self, base: nn.Module, term: LowRank) -> None:
        super().__init__()
        self.base, self.term = base, term

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.base(x, *args, **kwargs)
        return (out[0] + self.term(x), *out[1:]) if isinstance(out, tuple) else out + self.term(x)


class Saved(Adapted):
    """The same, which can be saved under tensor parallelism."""

    def sharded_state_dict(self, prefix: str = '', sharded_offsets: Any = (), metadata: Any = None) -> Any:
        cut = {'column': {'up': 0}, 'row': {'down': 1}, 'ids': {}}[self.term.kind]
        own = make_sharded_tensors_for_checkpoint(self.term.state_dict(), f'{prefix}term.', cut, sharded_offsets)
        base: Any = self.base
        return base.sharded_state_dict(f'{prefix}base.', sharded_offsets, metadata) | own


class LowRankWeight(nn.Module):
    """The same on the weight itself, for `torch.nn.utils.parametrize`."""

    def __init__(self, term: LowRank) -> None:
        super().__init__()
        self.term = term

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.term.up @ copy_to_tensor_model_parallel_region(self.term.down)


def build_adapted(
    spec: Spec, layout: Layout, ends: str = 'frozen', layers: tuple[str, ...] = LAYERS, kind: type[Adapted] = Saved
) -> list[Any]:
    """Bare chunks with LoRA on these linear layers. `ends`: what the embedding and the output layer are.

    'frozen': as they were; 'wrapped': with a term each (which Megatron's GPTModel cannot save); 'hooked': the output
    layer has its term in a forward hook; 'parametrized': in its weight.
    """
    chunks = build(spec, layout)
    for chunk in chunks:
        chunk.requires_grad_(False)
        for layer in chunk.decoder.layers:
            for part, name in zip((layer.self_attention, layer.self_attention, layer.mlp, layer.mlp), LAYERS):
                if name in layers:
                    _wrap(part, name, 'row' if name in ('linear_proj', 'linear_fc2') else 'column', spec, layout, kind)
        if chunk.pre_process and ends == 'wrapped':
            term = LowRank('ids', chunk.vocab_size, spec.hidden, spec, layout)
            chunk.embedding.word_embeddings = kind(chunk.embedding.word_embeddings, term)
        if chunk.post_process:
            _adapt_output(chunk, ends, spec, layout, kind)
        set_weights(chunk, spec)
    return chunks


def _wrap(part: Any, name: str, cut: str, spec: Spec, layout: Layout, kind: type[Adapted]) -> None:
    base = getattr(part, name)
    setattr(part, name, kind(base, LowRank(cut, base.input_size, base.output_size, spec, layout)))


def _adapt_output(chunk: Any, ends: str, spec: Spec, layout: Layout, kind: type[Adapted]) -> None:
    layer = chunk.output_layer
    if ends == 'wrapped':
        _wrap(chunk, 'output_layer', 'column', spec, layout, kind)
    if ends == 'hooked':
        chunk.term = LowRank('column', spec.hidden, chunk.vocab_size, spec, layout)
        layer.register_forward_hook(lambda _, inputs, out: (out[0] + chunk.term(inputs[0]), out[1]))
    if ends == 'parametrized':
        term = LowRankWeight(LowRank('column', spec.hidden, chunk.vocab_size, spec, layout))
        torch.nn.utils.parametrize.register_parametrization(layer, 'weight', term)


@contextmanager
def switched_off(chunks: list[Any]) -> Iterator[None]:
    """The model without its adapters."""
    terms = [module for chunk in chunks for module in chunk.modules() if isinstance(module, LowRank)]
    for term in terms:
        term.on = False
    try:
        yield
    finally:
        for term in terms:
            term.on = True
