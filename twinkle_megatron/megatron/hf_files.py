"""Folders of Hugging Face checkpoints: what tensors one holds, and a new one, written whole or not at all."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .hf_config import package

INDEX = 'model.safetensors.index.json'
SHARD_BYTES = 5 * 10**9
"""A file of weights is closed before it would be larger."""
BESIDE = ('*.json', '*.txt', '*.model', '*.jinja', 'LICENSE*', 'NOTICE*')
"""Files of a checkpoint that a new one gets, too: its configuration and its tokenizer. Never code, nor the weights."""
WANTED = (*BESIDE, '*.safetensors')
"""What is fetched of a repository."""


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint by name. ValueError where its files are not there, or broken."""
    index = folder / INDEX
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())['weight_map'].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f'{index} is no index of weights: {type(error).__name__}: {error}') from None
    else:
        files = sorted(path.name for path in folder.glob('*.safetensors'))
    if not files:
        old = sorted(path.name for pattern in ('*.bin', '*.pth') for path in folder.glob(pattern))
        has = f'only {", ".join(old[:3])}; save it again by save_pretrained of transformers' if old else 'none'
        raise ValueError(f'{folder} must hold weights in *.safetensors, and has {has}')
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        found |= _shapes(folder / file)
    return found


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    if not file.is_file():
        raise ValueError(f'{file} is not there, and {INDEX} names it; was the copy or the download interrupted?')
    try:
        with package('safetensors').safe_open(file, framework='pt') as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except Exception as error:  # of the package, which has a class of its own
        raise ValueError(f'{file} cannot be read: {error}; was the copy or the download interrupted?') from None


def check_tensors(folder: Path, config: Any, taken: set[str]) -> None:
    """ValueError unless the files in a folder hold what its configuration says, and all of that is `taken`."""
    there, wanted = shapes_in(folder), shapes_by_config(config)
    left_out = sorted(set(wanted) - taken)
    if left_out:
        raise ValueError(
            f'{folder} has weights that Megatron has no place for here, such as {left_out[0]}: its config.json asks '
            'for something beyond the usual form of its architecture'
        )
    for name in sorted(wanted):
        if name not in there:
            raise ValueError(
                f'{folder} must hold {name}, the checkpoint of a language model, and has '
                f'{len(there)} tensors without it'
            )
        if there[name] != wanted[name]:
            raise ValueError(
                f'{name} in {folder} must have the shape {wanted[name]} that its config.json tells, got {there[name]}'
            )


def shapes_by_config(config: Any) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint must hold, by name."""
    with torch.device('meta'):
        model = package('transformers').AutoModelForCausalLM.from_config(config)
    tied = {'lm_head.weight'} if getattr(config, 'tie_word_embeddings', False) else set()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


class Writer:
    """Writes tensors to *.safetensors in a folder, as they come, with an index where there are several files."""

    def __init__(self, folder: Path, dtype: torch.dtype | None) -> None:
        self._folder, self._dtype = folder, dtype
        self._files: list[list[str]] = []
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = self._total = 0
        self.dtypes: set[torch.dtype] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor; one that is tied to another comes twice."""
        if name in self._waiting or any(name in names for names in self._files):
            return
        tensor = tensor.detach().to('cpu', self._dtype, copy=True).contiguous()
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._bytes + size > SHARD_BYTES:
            self._flush()
        self._waiting[name] = tensor
        self._bytes, self._total = self._bytes + size, self._total + size
        self.dtypes.add(tensor.dtype)

    def finish(self) -> None:
        """Writes what is left, and the index."""
        self._flush()
        count, weight_map = len(self._files), {}
        for number, names in enumerate(self._files):
            final = f'model-{number + 1:05}-of-{count:05}.safetensors' if count > 1 else 'model.safetensors'
            (self._folder / _draft(number)).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {'metadata': {'total_size': self._total}, 'weight_map': weight_map}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + '\n')

    def _flush(self) -> None:
        save_file = package('safetensors.torch').save_file
        save_file(self._waiting, self._folder / _draft(len(self._files)), metadata={'format': 'pt'})
        self._files.append(list(self._waiting))
        self._waiting, self._bytes = {}, 0


def _draft(number: int) -> str:
    return f'part-{number}.safetensors'


def copy_beside(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copies configuration and tokenizer of a checkpoint; the configuration tells the new dtype."""
    for path in sorted(source.iterdir()):
        fits = any(fnmatch.fnmatch(path.name, pattern) for pattern in BESIDE)
        if path.is_file() and fits and not path.name.endswith('.index.json'):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / 'config.json').read_text())
    key = 'dtype' if 'dtype' in config else 'torch_dtype'  # transformers 4 knows the latter
    config[key] = str(dtype).removeprefix('torch.')
    (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')


def check_target(folder: Path, source: Path, overwrite: bool) -> None:
    """ValueError where a checkpoint cannot be written to `folder`."""
    if not folder.exists() and not folder.is_symlink():
        there = next(parent for parent in folder.parents if parent.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(f'{folder} cannot be made: {there} is no folder, or none that you may write to')
        return
    if folder.is_symlink() or not folder.is_dir():
        raise ValueError(f'{folder} must be a folder, or not be there yet, and is a file or a link')
    if folder.resolve() == source.resolve():
        raise ValueError(f'{folder} must be another folder than that of the checkpoint that was loaded')
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise ValueError(f'{folder} holds files already; remove it, or name another folder')
    if not (folder / 'config.json').is_file():
        raise ValueError(f'{folder} holds files and no config.json, so it is no checkpoint to overwrite')


@contextmanager
def written_whole(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `folder` to write to, which takes its place at the end. Where that fails or is interrupted,
    `folder` is what it was."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = folder.with_name(f'.{folder.name}.{uuid.uuid4().hex[:12]}.part')
    made.mkdir()
    try:
        yield made
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    old = made.with_suffix('.old')
    if overwrite and folder.is_dir():
        folder.rename(old)
    try:
        os.rename(made, folder)  # onto nothing, or onto an empty folder
    except OSError as error:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise ValueError(
            f'{folder} cannot be put in place: {error.strerror}. Did another process write there meanwhile? The '
            f'checkpoint is complete in {made}'
        ) from error
    shutil.rmtree(old, ignore_errors=True)
