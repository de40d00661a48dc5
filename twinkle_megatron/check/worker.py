"""What a rank does: builds the model of the setup file, runs one call, and writes down what it has found."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ..command_line import SIZES
from ..groups import group_rank, group_size
from ..megatron.checkpoint_state import read, sharded_state, write_sharded
from ..megatron.watching import Passing, hidden_states, whole_hidden
from ..model import MegatronModel
from .gradients import differences, sharded_gradients
from .replicas import unequal_replicas

TIMES = {'elapsed_seconds', 'iters_per_second'}
"""Metrics that no two runs have alike."""


def layout(options: Any, folder: Path) -> None:
    """One call in the layout."""
    model, inputs, keywords = _prepared(options, options.sizes)
    record: dict[str, Any] = {'unequal': unequal_replicas(model._engine.models, model.groups)}
    _save(sharded_state(model._training(), loading=False, weights_only=True), folder / 'weights')
    record |= _run(model, inputs, keywords)
    _save(sharded_gradients(model._training()), folder / 'gradients')
    torch.save(record, folder / f'layout-{dist.get_rank()}.pt')


def reference(options: Any, folder: Path) -> None:
    """The same call in one process, with the weights of the layout and the batches of all its replicas."""
    sizes = dict.fromkeys(options.sizes, 1)
    model, inputs, keywords = _prepared(options, sizes, replicas=options.dp)
    training = model._training()
    read(folder / 'weights', training, sharded_state(training, loading=True, weights_only=True))
    record = _run(model, inputs, keywords)
    record['gradients'] = differences(training, folder / 'gradients')
    record['dtype'] = next(model._engine.models[0].parameters()).dtype
    torch.save(record, folder / 'reference.pt')


def locate(options: Any, folder: Path) -> None:
    """Where the loss of the layout comes from."""
    model, inputs, keywords = _prepared(options, options.sizes)
    located = model.locate(inputs, top=options.top, **keywords)
    if dist.get_rank() == 0:
        torch.save(located, folder / 'located.pt')


def _prepared(options: Any, sizes: dict[str, int], replicas: int | None = None) -> tuple[MegatronModel, Any, Any]:
    """The model in that layout, and the inputs and keywords of this rank's replica, or of all `replicas`."""
    setup = _loaded(options.setup)
    model = setup.build(**sizes)
    if not isinstance(model, MegatronModel):
        raise ValueError(f'build must return a MegatronModel, got {type(model).__name__}')
    _check(model)
    if replicas is None:
        return model, *_batch(setup, group_rank(model.groups.dp), group_size(model.groups.dp))
    return model, *_joined([_batch(setup, rank, replicas) for rank in range(replicas)])


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location('twinkle_check_setup', path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ('build', 'batch'):
        if not callable(getattr(module, name, None)):
            raise ValueError(f'{path} must define the function {name}; docs/check.md has an example')
    try:
        inspect.signature(module.build).bind(**dict.fromkeys(SIZES, 1))
        inspect.signature(module.batch).bind(0, 1)
    except TypeError as error:
        raise ValueError(f'{path}: build takes {", ".join(SIZES)}, batch takes dp_rank, dp_size: {error}') from None
    return module


def _check(model: MegatronModel) -> None:
    """ValueError for what makes two runs differ that are both right."""
    config = model.config
    dropped = [name for name in ('hidden_dropout', 'attention_dropout') if getattr(config, name, 0)]
    if dropped:
        raise ValueError(f'build the model with {" and ".join(dropped)} 0: two layouts do not drop the same values')
    for chunk in model.chunks:
        if getattr(getattr(chunk, 'ddp_config', None), 'use_distributed_optimizer', False):
            raise ValueError(
                'build the model without the distributed optimizer (use_distributed_optimizer=False): with it each '
                'rank keeps a part of the gradients only'
            )


def _batch(setup: Any, rank: int, size: int) -> tuple[Any, dict[str, Any]]:
    found = setup.batch(rank, size)
    inputs, keywords = found if isinstance(found, tuple) else (found, {})
    if not isinstance(keywords, dict):
        raise ValueError(f'batch must return inputs, or (inputs, dict of keywords), got {type(keywords).__name__}')
    if 'max_tokens_per_micro_batch' in keywords:
        raise ValueError(
            'give micro-batches, or samples and micro_batch_size: each layout packs by a budget differently'
        )
    return (list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]), keywords


def _joined(batches: Sequence[tuple[Any, dict[str, Any]]]) -> tuple[list[Any], dict[str, Any]]:
    """The inputs and the keywords of all replicas, one after the other."""
    size = batches[0][1].get('micro_batch_size')
    for inputs, _ in batches[:-1]:
        if size is not None and len(inputs) % size:
            raise ValueError(f'the samples of a replica, {len(inputs)}, must be a multiple of micro_batch_size, {size}')
    keywords = {key: _one_after_the_other([given[key] for _, given in batches]) for key in batches[0][1]}
    return [item for inputs, _ in batches for item in inputs], keywords


def _one_after_the_other(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, (list, tuple)):
        return [item for value in values for item in value]
    if isinstance(first, np.ndarray) and first.ndim:
        return _one_after_the_other([torch.from_numpy(value) for value in values])
    if isinstance(first, Tensor) and first.dim():
        alike = len({value.shape[1:] for value in values}) == 1
        return torch.cat(values) if alike else [row for value in values for row in value]
    return first


def _save(sharded: dict[str, Any], path: Path) -> None:
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    write_sharded(sharded, path)


def _run(model: MegatronModel, inputs: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Hidden states, results, loss and metrics of one call; of what several ranks have, the first keeps it."""
    groups, runner = model.groups, model._engine.runner
    keeps = group_rank(groups.tp) == 0 and group_rank(groups.cp) == 0
    sequence_parallel = bool(model.config.sequence_parallel)
    recomputes = getattr(model.config, 'recompute_granularity', None) == 'full'
    hidden: dict[tuple[int, float, str], Tensor] = {}
    numbers: set[int] = set()

    def see(passing: Passing, states: Tensor) -> None:
        inside = passing.name.startswith('layer')
        if passing.trains and not (recomputes and inside):
            numbers.add(passing.number)
            whole = whole_hidden(passing, states, groups, sequence_parallel)
            if keeps:
                hidden[passing.number, passing.place, passing.name] = whole.cpu()

    with hidden_states(runner, see):
        out = model.forward_backward(inputs, **keywords)
    results = {key: value for key, value in out.items() if isinstance(value, list) and keeps}
    metrics = {key: value for key, value in model.metric_values().items() if key not in TIMES}
    return {
        'replica': parallel_state.get_data_parallel_rank(),
        'stage': group_rank(groups.pp),
        'hidden': hidden,
        'results': {key: [value.detach().cpu() for value in values] for key, values in results.items()}
        if keeps
        else {},
        'loss': out['loss'],
        'metrics': metrics,
        'micro_batches': len(numbers),
    }
