"""A file of weights: whole tensors by their names in the whole model, whatever layout they were trained under.

It is a `.npz` of float32 arrays, with what a later run must know beside: the sizes of the model and its tokenizer.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from launch.datasets.about import About
from launch.whole_file import whole_file

_ABOUT = 'about'


def save(path: Path, tensors: Mapping[str, np.ndarray], about: About) -> None:
    """Writes the file, all of it or nothing: an interrupted run leaves the one that was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, 'wb') as file:
        np.savez(file, allow_pickle=False, **{_ABOUT: np.array(json.dumps(asdict(about))), **tensors})


def read_about(path: Path) -> About:
    """What the file says of its model, or the folder of a Hugging Face checkpoint. ValueError, naming it, where it is
    neither."""
    if path.is_dir():
        from launch import hf_model  # slow to import

        return hf_model.read_about(path)
    with _opened(path) as file:
        return About(**json.loads(str(file[_ABOUT])))


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors by name. ValueError, naming the file, where it is not such a file."""
    with _opened(path) as file:
        return {name: file[name] for name in file.files if name != _ABOUT}


def _opened(path: Path) -> np.lib.npyio.NpzFile:
    try:
        file = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f'{path} does not exist (looked from {Path.cwd()})') from None
    except OSError as e:
        raise ValueError(f'{path} cannot be read: {e.strerror or e}') from None
    except (ValueError, EOFError, zipfile.BadZipFile):
        file = None
    if not isinstance(file, np.lib.npyio.NpzFile) or _ABOUT not in file.files:
        raise ValueError(f'{path} is no file of weights, as --save-weights writes them')
    return file
