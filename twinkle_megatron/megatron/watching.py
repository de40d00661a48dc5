"""Looks at what the modules of a model give while a call runs, and knows which micro-batch it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..groups import Groups, all_gather_rows, group_size
from .item import Item
from .restore import restored
from .schedule import Runner


class Passing(NamedTuple):
    """The output of a module for one micro-batch.

    `place` orders the modules as a micro-batch passes them, over all stages: 0 the embedding, n layer n, and behind
    them the final norm. `number` is that of the micro-batch on this rank. `trains`: gradients are wanted of it.
    """

    name: str
    place: float
    number: int
    item: Item
    trains: bool


See = Callable[[Passing, Tensor], None]


@contextmanager
def hidden_states(runner: Runner, see: See) -> Iterator[None]:
    """While open, `see` gets the hidden states `[s/(cp · tp), b, H]`, `/tp` under sequence parallelism only, behind the
    embedding, each layer and the final norm, as this rank has them, of each real micro-batch of every call."""
    found = [(*place, module) for model in runner.models for place, module in _places(model)]
    with _hooked(runner, [(name, place, module) for name, place, module in found], see):
        yield


@contextmanager
def every_module(runner: Runner, see: See) -> Iterator[None]:
    """The same for every module that has no modules of its own; places are those of the layer around it."""
    places = {id(module): place for model in runner.models for (_, place), module in _places(model)}
    modules = []
    for model in runner.models:
        around = 0.0 if getattr(model, 'pre_process', True) else 0.5
        offset = getattr(model, 'vp_stage', None) or 0
        for name, module in model.named_modules():
            around = places.get(id(module), around)
            if name.startswith('output_layer'):
                around = float('inf')
            if next(module.children(), None) is None:
                modules.append((f'chunk {offset}: {name}' if offset else name, around, module))
    with _hooked(runner, modules, see):
        yield


def whole_hidden(passing: Passing, hidden: Tensor, groups: Groups, sequence_parallel: bool) -> Tensor:
    """Hidden states `[s/(cp · tp), b, ...]` of this rank as `[b, s, ...]` in input order, in the caller's shape. One
    all-gather over TP under sequence parallelism, and one over CP."""
    if sequence_parallel and group_size(groups.tp) > 1:
        hidden = all_gather_rows(hidden, groups.tp).flatten(0, 1)
    return restored(passing.item, hidden.transpose(0, 1).contiguous(), groups.cp)


def _places(model: Any) -> Iterator[tuple[tuple[str, float], Any]]:
    if getattr(model, 'pre_process', False) and hasattr(model, 'embedding'):
        yield ('embedding', 0.0), model.embedding
    decoder = getattr(model, 'decoder', None)
    for layer in getattr(decoder, 'layers', ()):
        yield (f'layer {layer.layer_number}', float(layer.layer_number)), layer
    norm = getattr(decoder, 'final_layernorm', None)
    if norm is not None:
        yield ('final norm', 1e9), norm


@contextmanager
def _hooked(runner: Runner, modules: Sequence[tuple[str, float, Any]], see: See) -> Iterator[None]:
    current: list[tuple[Item, int]] = []
    before = runner.watched

    def watched(item: Item, number: int, model: Any) -> None:
        current[:] = [] if item.is_padding else [(item, number)]
        if before is not None:
            before(item, number, model)

    def hook(name: str, place: float) -> Callable[..., None]:
        def seen(module: Any, arguments: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if current and isinstance(hidden, Tensor) and hidden.is_floating_point():
                item, number = current[0]
                passing = Passing(name, place, number, item, torch.is_grad_enabled())
                with torch.no_grad():
                    see(passing, hidden.detach())

        return seen

    runner.watched = watched
    handles = [module.register_forward_hook(hook(name, place)) for name, place, module in modules]
    try:
        yield
    finally:
        runner.watched = before
        for handle in handles:
            handle.remove()
