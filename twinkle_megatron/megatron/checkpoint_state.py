"""What a checkpoint holds of a rank: weights, optimizer, scheduler, random numbers; taken out and put back."""

from __future__ import annotations

import logging
import queue
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..groups import Groups, group_rank, group_size
from .compatibility import check_saved_as_cut
from .optimizer import is_megatron

logger = logging.getLogger('twinkle_megatron')


class Choices(NamedTuple):
    """Of a rank: what to keep, and what takes it up again."""

    kept: Callable[[], dict[str, Any]]
    take: Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Training:
    """What a checkpoint holds of this rank, and what one is loaded into.

    Args:
        chunks: as they go to the schedule.
        models: the same chunks, unwrapped.
        groups: of this rank; the layout is the whole world.
        optimizer: Megatron's, or a torch optimizer of bare chunks.
        scheduler: anything with `state_dict` and `load_state_dict`.
        metrics: those of training and of evaluation, whose sums are kept; of another layout they start anew.
        choices: what else this rank keeps, and how it is put back.
        vocab_size: the true one, where it is known. Without it a vocabulary of another size, which is padded to the
            size of each layout, is not noticed.
    """

    chunks: Sequence[Any]
    models: Sequence[Any]
    groups: Groups
    optimizer: Any = None
    scheduler: Any = None
    vocab_size: int | None = None
    metrics: Sequence[Any] = ()
    choices: Choices | None = None

    @property
    def layout(self) -> dict[str, int]:
        """Ranks in each dimension. Random numbers and torch's optimizers go on only in the same."""
        groups, config = self.groups, self.models[0].config
        sizes = {name: group_size(getattr(groups, name)) for name in ('tp', 'cp', 'pp', 'dp')}
        expert = {
            'ep': int(getattr(config, 'expert_model_parallel_size', None) or 1),
            'etp': int(getattr(config, 'expert_tensor_parallel_size', None) or sizes['tp']),
        }
        return {'world': groups.size, **sizes, 'vpp': len(self.models), **expert}

    @property
    def own_file(self) -> str:
        """The name of this rank's file, by its place in the layout."""
        places = (f'{name}{group_rank(getattr(self.groups, name))}' for name in ('tp', 'cp', 'pp', 'dp'))
        return '-'.join(places) + '.pt'

    @property
    def parts(self) -> dict[str, Any]:
        """The kinds of optimizer and scheduler, as they stand in the manifest."""
        return {
            'optimizer': None if self.optimizer is None else kind_of_optimizer(self.optimizer),
            'scheduler': None if self.scheduler is None else type(self.scheduler).__name__,
        }


def sharded_state(training: Training, loading: bool, weights_only: bool = False) -> dict[str, Any]:
    """What goes through Megatron, with what it needs to know of who holds which part."""
    from megatron.core import parallel_state

    group = training.groups.dp_cp
    metadata = {
        'distrib_optim_sharding_type': 'fully_reshardable',
        'chained_optim_avoid_prefix': True,
        'dp_cp_group': parallel_state.get_data_parallel_group(with_context_parallel=True) if group is None else group,
    }
    models = {f'model{i}': m.sharded_state_dict(metadata=metadata) for i, m in enumerate(training.models)}
    for model in models.values():
        check_saved_as_cut(model, group_size(training.groups.tp))
    if weights_only or not is_megatron(training.optimizer):
        return models
    _allocate(training.optimizer)
    return {**models, 'optimizer': training.optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata)}


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what PyTorch says of its own names to Megatron, which every rank would repeat."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', FutureWarning)
        yield


def write_sharded(sharded: dict[str, Any], path: Path) -> None:
    """Writes what `sharded_state` describes into a folder that is there. Collective over the world."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # For saves in the background Megatron keeps a process with a queue, which a signal to all processes of a job ends;
    # each later save would break. These saves end before they return: a queue of this process does.
    name = next(name for name in vars(filesystem_async) if name.endswith('get_write_results_queue'))
    of_megatron = getattr(filesystem_async, name)
    setattr(filesystem_async, name, lambda *_, **__: queue.Queue())
    try:
        with _quietly():
            dist_checkpointing.save(sharded, str(path))
    finally:
        setattr(filesystem_async, name, of_megatron)


def read(path: Path, training: Training, sharded: dict[str, Any]) -> None:
    """Reads what `sharded_state` describes into the models and Megatron's optimizer."""
    from megatron.core import dist_checkpointing

    with _quietly():
        loaded: Any = dist_checkpointing.load(sharded, str(path))
    for i, model in enumerate(training.models):
        missing, unexpected = model.load_state_dict(loaded[f'model{i}'], strict=False)
        left = [name for name in (*missing, *unexpected) if not name.endswith('_extra_state')]
        if left:
            raise ValueError(f'{path} does not fit the model: {", ".join(left)} cannot be loaded')
    if 'optimizer' in sharded:
        _load_optimizer(training.optimizer, loaded['optimizer'])


def _parts_of(optimizer: Any) -> list[Any]:
    """Those that one of Megatron's is a chain of."""
    return list(getattr(optimizer, 'chained_optimizers', None) or [optimizer])


def _is_torch_adam(inner: Any) -> bool:
    """Whether Megatron steps by torch's Adam, for want of Transformer Engine and Apex."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _allocate(optimizer: Any) -> None:
    """Gives each optimizer, before its first step, the state that this step would begin with: Megatron asks for one on
    load, and its distributed optimizer on save too."""
    for part in _parts_of(optimizer):
        inner = getattr(part, 'optimizer', None)
        if inner is None or inner.state or getattr(part, 'init_state_fn', None) is None:
            continue
        part.init_state_fn(inner, part.config)
        if _is_torch_adam(inner):
            for of_parameter in inner.state.values():
                of_parameter['step'] = torch.tensor(0.0)


def _load_optimizer(optimizer: Any, loaded: dict[Any, Any]) -> None:
    """Megatron's own load, around what goes wrong in it with torch's Adam: a counter of 0 is not saved, and of the
    distributed optimizer all parameters would share one counter, and their moments are looked for under 'step' too."""
    parts = _parts_of(optimizer)
    moments = []
    for i, part in enumerate(parts):
        if not _is_torch_adam(getattr(part, 'optimizer', None)):
            continue
        of_part = loaded if len(parts) == 1 else loaded[i]
        of_adam = of_part.get('optimizer', of_part)
        if 'param_state' in of_part:
            moments.append((part, of_part.pop('param_state')))
        elif 'state' in of_adam:
            of_adam['state'].setdefault('common_step', torch.tensor(0.0))
    optimizer.load_state_dict(loaded)
    for part, of_part in moments:
        steps = [of_parameter.pop('step') for of_parameter in part.optimizer.state.values()]
        part.load_parameter_state_from_fully_reshardable(of_part)
        for of_parameter, step in zip(part.optimizer.state.values(), steps, strict=True):
            of_parameter['step'] = step.clone()


def own_state(training: Training) -> dict[str, Any]:
    """What is of no use to other ranks: random numbers, the state of a torch optimizer, what metrics have summed up."""
    alone = None if is_megatron(training.optimizer) else training.optimizer
    return {
        'random': _random_states(),
        'optimizer': None if alone is None else alone.state_dict(),
        'metrics': [[type(metric).__name__, metric.state_dict()] for metric in training.metrics],
        'choices': None if training.choices is None else training.choices.kept(),
    }


def restore(training: Training, common: dict[str, Any], own: dict[str, Any] | None) -> None:
    """The scheduler, a torch optimizer, and last the random numbers."""
    if own is not None and training.optimizer is not None and not is_megatron(training.optimizer):
        training.optimizer.load_state_dict(own['optimizer'])
    if training.scheduler is not None:
        if hasattr(training.scheduler, 'num_steps'):
            training.scheduler.num_steps = 0  # Megatron's adds those of the checkpoint to its own
        training.scheduler.load_state_dict(common['scheduler'])
    _restore_metrics(training.metrics, [] if own is None else own.get('metrics', []))
    if own is not None:
        if training.choices is not None and own.get('choices') is not None:
            training.choices.take(own['choices'])
        _set_random_states(own['random'])


def _restore_metrics(metrics: Sequence[Any], kept: Sequence[Any]) -> None:
    """Those of the same kinds in the same order; else all start anew, as they do in another layout."""
    if [type(metric).__name__ for metric in metrics] != [name for name, _ in kept]:
        for metric in metrics:
            metric.reset()
        if metrics and kept:
            logger.warning('twinkle_megatron starts the metrics anew: the checkpoint has those of other kinds')
        return
    for metric, (_, state) in zip(metrics, kept, strict=True):
        metric.load_state_dict(state)


def _random_states() -> dict[str, Any]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    kind, keys, *rest = np.random.get_state()
    tracker: Any = get_cuda_rng_tracker()
    return {
        'python': random.getstate(),
        'numpy': (kind, keys.tolist(), *rest),  # pyright: ignore[reportAttributeAccessIssue]
        'torch': torch.get_rng_state(),
        'cuda': torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        'tracker': {n: s.get_state() if isinstance(s, torch.Generator) else s for n, s in tracker.get_states().items()},
    }


def _set_random_states(saved: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    random.setstate(saved['python'])
    kind, keys, *rest = saved['numpy']
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(saved['torch'])
    if saved['cuda'] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved['cuda'])
    tracker: Any = get_cuda_rng_tracker()
    present = tracker.get_states()
    for name, state in saved['tracker'].items():
        if isinstance(present.get(name), torch.Generator):  # under CUDA graphs, which have it registered
            present[name].set_state(state)
        else:
            present[name] = state
    if present:
        tracker.set_states(present)


def kind_of_optimizer(optimizer: Any) -> list[str]:
    if not is_megatron(optimizer):
        return [type(optimizer).__name__]
    names = ((type(part).__name__, getattr(part, 'optimizer', None)) for part in _parts_of(optimizer))
    return sorted({f'{name} of {type(inner).__name__}' for name, inner in names if inner is not None})
