"""The files of checkpoints: complete ones have their final name and a manifest that agrees with what lies beside it."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FORMAT = 1
MANIFEST, STATE = 'manifest.json', 'state.pt'
OF_CALLER = 'of_caller'
"""Where `MegatronModel.save` keeps the state that it was given."""
_COMPLETE = re.compile(r'step-(\d{8,})')
_REPLACED = re.compile(r'\.step-(\d{8,})\.replaced')


def name_of(step: int) -> str:
    return f'step-{step:08d}'


def find(folder: Path) -> dict[int, Path]:
    """By step, the checkpoints that have been renamed, complete or not; of one that was about to be replaced by
    another, that is not there yet, the old one."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := _REPLACED.fullmatch(path.name))}
    return found | {int(match[1]): path for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name))}


def fault_of(path: Path) -> str | None:
    """Why a checkpoint is not complete; None: it is."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest['format'] != FORMAT:
            return f'its format is {manifest["format"]}, this version reads {FORMAT}'
        if name_of(manifest['step']) != path.name.removeprefix('.').removesuffix('.replaced'):
            return f'it is of step {manifest["step"]}; was it renamed?'
        files: dict[str, int] = manifest['files']
    except FileNotFoundError:
        return f'its {MANIFEST} is missing'
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f'its {MANIFEST} cannot be read: {type(error).__name__}: {error}'
    for name, size in files.items():
        try:
            found = (path / name).stat().st_size
        except FileNotFoundError:
            return f'its file {name} is missing'
        if found != size:
            return f'its file {name} has {found} bytes of {size}'
    return None


def choose(folder: Path, step: int | None) -> Path:
    """The checkpoint of this step, or the last complete one. ValueError where there is none."""
    if not folder.is_dir():
        raise ValueError(f'folder must be that of the checkpoints, but there is no {folder}')
    found = find(folder)
    if step is not None and step not in found:
        raise ValueError(f'there is no checkpoint of step {step!r} in {folder}, but of {sorted(found) or "none"}')
    faults = []
    for number in sorted(found, reverse=True) if step is None else [step]:
        fault = fault_of(found[number])
        if fault is None:
            if faults:
                warnings.warn(f'{"; ".join(faults)}; step {number} is taken', stacklevel=2)
            return found[number]
        faults.append(f'{found[number]} is not complete: {fault}')
    raise ValueError('; '.join(faults) or f'there is no complete checkpoint in {folder}')


def state_of(path: Path) -> dict[str, Any]:
    """The `state` that `MegatronModel.save` was given, without loading the model."""
    return torch.load(path / STATE, map_location='cpu', weights_only=True)['state'][OF_CALLER]


def sweep(folder: Path) -> None:
    """Removes what interrupted saves have left."""
    for path in list(folder.iterdir()):
        match = _REPLACED.fullmatch(path.name)
        if match and not (folder / f'step-{match[1]}').exists():
            path.rename(folder / f'step-{match[1]}')
        elif match or re.fullmatch(r'\.step-\d{8,}\.part-.*', path.name):
            shutil.rmtree(path, ignore_errors=True)  # what is left of it does no harm


def write(path: Path, value: Any) -> None:
    """Writes it safe to the disk: where that is full it shows now, and not while Megatron writes."""
    with open(path, 'wb') as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def written(part: Path, own_file: str) -> dict[str, int]:
    """The sizes of the files that this rank has written, safe on the disk; rank 0 lists all that it sees."""
    sizes = {}
    mine = f'__{dist.get_rank()}_'
    for path in part.rglob('*'):
        if (dist.get_rank() == 0 or path.name == own_file or path.name.startswith(mine)) and path.is_file():
            with open(path, 'rb') as file:
                os.fsync(file.fileno())
                sizes[path.relative_to(part).as_posix()] = os.fstat(file.fileno()).st_size
    return sizes


def publish(part: Path, folder: Path, manifest: dict[str, Any]) -> None:
    """The manifest, then the rename that makes it a checkpoint."""
    with open(part / MANIFEST, 'w', encoding='utf-8') as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for inner in (path for path in part.rglob('*') if path.is_dir()):
        _sync(inner)
    _sync(part)
    target = folder / name_of(manifest['step'])
    replaced = folder / f'.{target.name}.replaced'
    if target.exists():
        target.rename(replaced)
    part.rename(target)
    _sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def drop_all_but(keep: int, folder: Path, step: int) -> None:
    """Of the complete checkpoints up to this step, keeps the last so many."""
    complete = [path for number, path in sorted(find(folder).items()) if number <= step and fault_of(path) is None]
    for path in complete[:-keep]:
        gone = folder / f'.{path.name}.part-removed'
        path.rename(gone)  # at once, so that none is ever there in part
        shutil.rmtree(gone, ignore_errors=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
