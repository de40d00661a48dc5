"""Checkpoints of a whole training state: found complete or not at all, exact in the same layout, resharded to another.

    folder/step-00000010/manifest.json      what there is, how large each file is; written last
                         state.pt           the scheduler, and what the caller gave
                         tp0-cp0-pp0-dp0.pt of each rank: random numbers, the state of a torch optimizer
                         megatron/          weights and Megatron's optimizer, by megatron.core.dist_checkpointing

A checkpoint is written in `folder/.step-00000010.part-...` and renamed when every rank has finished, so that whatever
ends a save leaves the earlier ones as they are. The folder lies on a file system that all ranks share, and belongs to
one run at a time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ..groups import Groups, raise_together
from .checkpoint_files import (
    FORMAT,
    MANIFEST,
    STATE,
    choose,
    drop_all_but,
    fault_of,
    find,
    name_of,
    publish,
    sweep,
    write,
    written,
)
from .checkpoint_state import Training, own_state, read, restore, sharded_state, write_sharded
from .optimizer import is_megatron

__all__ = ['Training', 'latest_step', 'load_checkpoint', 'save_checkpoint']

_MEGATRON = 'megatron'
_NAMED = 4
"""Parameters that an error names."""


def save_checkpoint(
    folder: str | Path,
    training: Training,
    *,
    step: int,
    state: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Saves weights, optimizer, scheduler, random numbers and `state` as `folder/step-{step:08d}`, and returns that.

    Args:
        folder: of this run's checkpoints, on a shared file system; made if need be.
        training: this rank's. Gradients are not saved.
        step: optimizer steps taken. An earlier checkpoint of the same step is replaced.
        state: more to be kept, such as the position in the data: numbers, strings, tensors, and lists, tuples, sets and
            dicts of them. That of rank 0 is kept, for all ranks; tensors come back on the CPU.
        keep: afterwards, of the complete checkpoints up to this step, only the last so many are kept; None: all.

    Collective over the whole world. An error on one rank, as of a full disk, is raised on every rank, and the earlier
    checkpoints stay; what an interrupted save has left behind is removed by the next. Megatron's distributed optimizer
    is gathered in host memory on each rank, 12 bytes for each parameter of the rank ('fully_reshardable').
    """
    groups, folder = training.groups, Path(folder)
    with _together(groups):
        _check_save(training, step, state, keep)
        own = own_state(training)
        _check_plain(own['optimizer'], 'the state of the optimizer')
    part = folder / f'.{name_of(step)}.part-{groups.gather_objects(uuid.uuid4().hex[:8])[0]}'
    try:
        with _together(groups):
            if _first():
                folder.mkdir(parents=True, exist_ok=True)
                sweep(folder)
                (part / _MEGATRON).mkdir(parents=True)
        with _together(groups):
            if not part.is_dir():
                raise ValueError(f'folder must lie on a file system that all ranks share, but {part} is not there')
        with _together(groups):
            write(part / training.own_file, own)
            if _first():
                scheduler = None if training.scheduler is None else training.scheduler.state_dict()
                write(part / STATE, {'scheduler': scheduler, 'state': dict(state or {})})
        with _weights_gathered(training.chunks):
            with _together(groups):
                sharded = sharded_state(training, loading=False)
            with _together(groups):
                write_sharded(sharded, part / _MEGATRON)
        with _together(groups):
            mine = written(part, training.own_file)
        files = {name: size for sizes in groups.gather_objects(mine) for name, size in sizes.items()}
        with _together(groups):
            if _first():
                publish(part, folder, _manifest(training, step, files))
    except BaseException:
        if _first():
            shutil.rmtree(part, ignore_errors=True)
        raise
    with _together(groups):
        if _first() and keep is not None:
            drop_all_but(keep, folder, step)
    return folder / name_of(step)


def load_checkpoint(
    folder: str | Path, training: Training, *, step: int | None = None, weights_only: bool = False
) -> dict[str, Any]:
    """Loads a checkpoint into `training`, and returns the `state` given at its save, and its 'step'.

    In the layout of the save everything goes on to the bit, dropout too. In another one weights and Megatron's
    optimizer are resharded; random numbers are not restored, which a warning says, and the state of a torch optimizer
    cannot be loaded.

    Args:
        folder: as given to `save_checkpoint`.
        training: as built for a start from nothing, or in any later state. Gradients are left as they are.
        step: which one; None: the last complete one. One that is not complete is passed over, which a warning says.
        weights_only: leave optimizer, scheduler and random numbers as they are. Megatron's optimizer takes the weights
            over into its own copies.

    Collective over the whole world. ValueError on every rank, before anything is changed, where there is no folder, no
    complete checkpoint, a file that is missing or truncated, another model, or no optimizer or scheduler of this kind
    in it. Contents are not checked beyond the sizes of files: an error while they are read leaves the training in an
    undefined state. Files are read by `torch.load(weights_only=True)`, which runs no code of theirs, except for
    Megatron's `.metadata`, a pickle: load what you trust.
    """
    groups, folder = training.groups, Path(folder)
    with _together(groups):
        _check_training(training)
        found = choose(folder, step) if _first() else None
    path: Path = groups.gather_objects(found)[0]
    with _together(groups):
        text = (path / MANIFEST).read_bytes()
    if len(set(groups.gather_objects(hashlib.sha256(text).hexdigest()))) > 1:
        raise ValueError(f'the ranks see different files at {path / MANIFEST}; do they share the file system?')
    manifest = json.loads(text)
    same_layout = manifest['layout'] == training.layout
    with _together(groups):
        _check_vocab_size(manifest, training)
        if not weights_only:
            _check_parts(manifest, training, same_layout)
        common = torch.load(path / STATE, map_location='cpu', weights_only=True)
        own = None
        if same_layout and not weights_only:
            own = torch.load(path / training.own_file, map_location='cpu', weights_only=True)
    with _weights_gathered(training.chunks):
        with _together(groups):
            sharded = sharded_state(training, loading=True, weights_only=weights_only)
            wanted = _shapes(sharded)
        every = groups.gather_objects(sorted(wanted))
        with _together(groups):
            _check_model(path, wanted, {key for keys in every for key in keys}, weights_only)
        with _together(groups):
            read(path / _MEGATRON, training, sharded)
    with _together(groups):
        if weights_only:
            if is_megatron(training.optimizer):
                training.optimizer.reload_model_params()
        else:
            restore(training, common, own)
            if own is None and _first():
                warnings.warn(
                    f'random numbers are not restored: the checkpoint was saved in the layout {manifest["layout"]}, '
                    f'this is {training.layout}',
                    stacklevel=2,
                )
    return {**common['state'], 'step': manifest['step']}


def latest_step(folder: str | Path) -> int | None:
    """The step of the last complete checkpoint in `folder`; None where there is none. Not collective."""
    return max((step for step, path in find(Path(folder)).items() if fault_of(path) is None), default=None)


def _first() -> bool:
    return dist.get_rank() == 0


@contextmanager
def _together(groups: Groups) -> Iterator[None]:
    """An error within, on whatever rank, is raised on every rank."""
    error = None
    try:
        yield
    except Exception as mine:
        error = mine
    except CheckpointException as shared:  # no Exception; of torch, which Megatron reads and writes with
        found = (f'rank {rank}: {type(mine).__name__}: {mine}' for rank, (mine, _) in shared.failures.items())
        error = RuntimeError('; '.join(found))
    raise_together(groups, error)


@contextmanager
def _weights_gathered(chunks: Sequence[Any]) -> Iterator[None]:
    """Of a distributed optimizer that gathers the weights while the forward pass runs: they are gathered first."""
    with ExitStack() as stack:
        for chunk in chunks:
            if getattr(chunk, 'remove_forward_pre_hook_handles', None):
                chunk.disable_forward_pre_hook()
                stack.callback(chunk.enable_forward_pre_hook)
        yield


def _check_training(training: Training) -> None:
    if training.groups.size != dist.get_world_size():
        raise ValueError(
            f'checkpoints need a layout of all {dist.get_world_size()} ranks of the world, as Megatron writes them '
            f'together, got one of {training.groups.size}'
        )
    for model in training.models:
        if not hasattr(model, 'sharded_state_dict'):
            raise ValueError(
                "chunks must have sharded_state_dict, as Megatron's modules have, to be saved and loaded, which "
                f'{type(model).__name__} lacks'
            )


def _check_save(training: Training, step: Any, state: Any, keep: Any) -> None:
    _check_training(training)
    for name, value, least in (('step', step, 0), ('keep', keep, 1)):
        wanted = f'an int of at least {least}' + (', or None for all' if name == 'keep' else '')
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not whole and (name, value) != ('keep', None):
            raise ValueError(f'{name} must be {wanted}, got {value!r}')
    if state is not None and (not isinstance(state, Mapping) or 'step' in state):
        what = "one with 'step', which has its own argument" if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f'state must be a dict of what else is to be kept, got {what}')
    _check_plain(dict(state or {}), 'state')
    if training.scheduler is not None:
        if not all(callable(getattr(training.scheduler, name, None)) for name in ('state_dict', 'load_state_dict')):
            raise ValueError(
                'scheduler must have state_dict and load_state_dict to be saved, which '
                f'{type(training.scheduler).__name__} lacks'
            )
        _check_plain(training.scheduler.state_dict(), 'the state of the scheduler')


_PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device)


def _check_plain(value: Any, where: str) -> None:
    """ValueError for what `torch.load(weights_only=True)` would refuse."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        for key, item in value.items():
            _check_plain(key, f'a key of {where}')
            _check_plain(item, f'{where}[{key!r}]')
    elif kind in (list, tuple, set):
        for i, item in enumerate(value):
            _check_plain(item, f'{where}[{i}]')
    elif kind not in _PLAIN:
        raise ValueError(
            f'{where} must be a number, a string, a tensor, or a list, tuple, set or dict of such, got '
            f'{kind.__module__}.{kind.__qualname__}'
        )


def _check_vocab_size(manifest: dict[str, Any], training: Training) -> None:
    held, wanted = manifest['vocab_size'], training.vocab_size
    if None not in (held, wanted) and held != wanted:
        raise ValueError(
            f'the checkpoint of step {manifest["step"]} is of another model: its vocabulary has {held} ids, '
            f'this one {wanted}'
        )


def _check_parts(manifest: dict[str, Any], training: Training, same_layout: bool) -> None:
    for name, wanted in training.parts.items():
        held = manifest['parts'][name]
        if wanted is not None and wanted != held:
            kinds = [' and '.join(kind) if isinstance(kind, list) else kind for kind in (held, wanted)]
            raise ValueError(
                f'the checkpoint of step {manifest["step"]} must hold the {name} that is to be loaded, '
                f'{kinds[1]}, but it holds {"none" if held is None else kinds[0]}; '
                'weights_only=True loads the weights alone'
            )
    if training.optimizer is not None and not is_megatron(training.optimizer) and not same_layout:
        raise ValueError(
            f'a torch optimizer can be loaded only in the layout of the save, {manifest["layout"]}, this is '
            f'{training.layout}; weights_only=True loads the weights alone'
        )


def _shapes(sharded: dict[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """The whole shape of each tensor that this rank asks for; None where it may be another, as of a vocabulary that is
    padded in its own way on each layout."""
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    copy: Any = extract_matching_values(sharded, lambda _: True)[0]  # of the dicts alone
    apply_factories(copy)
    tensors = [x for x in nested_values(copy) if isinstance(x, ShardedTensor)]
    return {x.key: None if x.allow_shape_mismatch else tuple(x.global_shape) for x in tensors}


def _check_model(path: Path, wanted: dict[str, Any], anywhere: set[str], weights_only: bool) -> None:
    """ValueError where the tensors of the checkpoint are not those that the ranks together ask for."""
    from megatron.core.dist_checkpointing import load_tensors_metadata

    stored = {x.key: tuple(x.global_shape) for x in load_tensors_metadata(str(path / _MEGATRON)).values()}
    missing = [name for name in wanted if name not in stored]
    left = [name for name in stored if name not in anywhere and not name.startswith('optimizer.')]
    if not weights_only and any(name.startswith('optimizer.') for name in anywhere):
        left = [name for name in stored if name not in anywhere]
    other = [name for name, shape in wanted.items() if shape not in (None, stored.get(name, shape))]
    if missing:
        raise ValueError(f'{path} is of another model: it lacks {_some(missing)}')
    if left:
        raise ValueError(f'{path} is of another model: this one has no {_some(left)}')
    if other:
        shapes = [f'{n} is {list(stored[n])} in the checkpoint, {list(wanted[n])} here' for n in other[:_NAMED]]
        raise ValueError(f'{path} is of another model: {"; ".join(shapes)}')


def _some(names: Sequence[str]) -> str:
    return ', '.join(names[:_NAMED]) + (f' and {len(names) - _NAMED} more' if len(names) > _NAMED else '')


def _manifest(training: Training, step: int, files: dict[str, int]) -> dict[str, Any]:
    import megatron.core

    from .. import __version__

    return {
        'format': FORMAT,
        'step': step,
        'layout': training.layout,
        'dtype': str(next(training.models[0].parameters()).dtype),
        'vocab_size': training.vocab_size,
        'parts': training.parts,
        'versions': {
            'twinkle_megatron': __version__,
            'megatron_core': megatron.core.__version__,
            'torch': torch.__version__,
        },
        'files': dict(sorted(files.items())),
    }
