"""Versions, and which of the packages that make training quick are found, can be imported, and are used."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import __version__
from .report import FAIL, OK, WARN, Line, alike, of_ranks

VERSIONS = ('python', 'torch', 'megatron-core', 'twinkle_megatron', 'CUDA', 'NCCL', 'driver')
_DRIVER = Path('/proc/driver/nvidia/version')


def versions() -> dict[str, str | None]:
    """Of this process; None for what is not there."""
    import torch
    from torch.cuda import nccl as torch_nccl

    nccl = '.'.join(map(str, torch_nccl.version())) if torch.cuda.is_available() else None
    driver = re.search(r'Module\s+(?:for \S+\s+)?([\d.]+)', _DRIVER.read_text()) if _DRIVER.is_file() else None
    return {
        'python': platform.python_version(),
        'torch': torch.__version__,
        'megatron-core': version_of('megatron-core'),
        'twinkle_megatron': __version__,
        'CUDA': torch.version.cuda,
        'NCCL': nccl,
        'driver': driver and driver.group(1),
    }


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def version_lines(ranks: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    """One line a version, over all ranks."""
    found: list[Line] = []
    for name in VERSIONS:
        told = {rank: facts['versions'].get(name) for rank, facts in ranks.items()}
        if name == 'megatron-core' and not any(told.values()):
            fix = "pip install 'megatron-core>=0.16,<0.20'"
            found.append(Line(name, FAIL, 'not installed', fix))
            continue
        fix = f'install the same {name} on every host, in the environment that the ranks start from'
        line = alike('NCCL version' if name == 'NCCL' else name, told, fix, WARN if name == 'driver' else FAIL)
        found.append(Line(line.check, OK, 'none: CPU only') if line.value == 'none' else line)
    return found


# What is asked of a package that is found: the module to import, and who uses it.
_IMPORTS = {
    'Transformer Engine': ('transformer_engine', 'transformer_engine.pytorch'),
    'Apex': ('apex', 'apex.normalization, apex.multi_tensor_apply, amp_C'),
    'flash-attention': ('flash_attn', 'flash_attn'),
    'Triton': ('triton', 'triton'),
}
_DISTRIBUTIONS = {'Transformer Engine': 'transformer_engine', 'flash-attention': 'flash_attn'}
_WITHOUT = {
    'Transformer Engine': 'Megatron takes its local layers; FP8 and context parallelism on GPUs need it',
    'Apex': "torch's norms and optimizers; gradient_accumulation_fusion needs it, or Transformer Engine",
    'flash-attention': 'Transformer Engine has attention of its own',
    'Triton': 'the kernels of this package run eagerly on GPUs, slower',
}
_USED = {
    'Transformer Engine': 'used by the layers of Megatron on GPUs',
    'Apex': 'used by Megatron for norms and optimizers, where Transformer Engine is not',
    'flash-attention': 'used by Transformer Engine where it is the quickest',
    'Triton': 'used by torch.compile for the kernels of this package on GPUs',
}


def packages(seconds: float) -> dict[str, dict[str, str]]:
    """`{name: {'status', 'value', 'fix'}}` of what this host has. Each one that is found is imported in a process of
    its own, since a broken one may end it."""
    from torch import cuda

    look = partial(_package, gpus=cuda.is_available(), seconds=seconds)
    with ThreadPoolExecutor() as at_once:  # each may take the whole time
        found = dict(zip(_IMPORTS, at_once.map(look, _IMPORTS)))
    found['NCCL'] = _nccl()
    found['C++ compiler'] = _compiler()
    return {name: {'status': line.status, 'value': line.value, 'fix': line.fix} for name, line in found.items()}


def _package(name: str, gpus: bool, seconds: float) -> Line:
    module, imports = _IMPORTS[name]
    spec = find_spec(module)
    if spec is None:
        return Line(name, OK, f'not found: {_WITHOUT[name]}')
    where = next(iter(spec.submodule_search_locations or ()), spec.origin or '')
    if name == 'Apex' and not (Path(where) / 'multi_tensor_apply').is_dir():
        told = f'the package in {where} is not the one of NVIDIA, but Megatron would take it for that'
        return Line(name, FAIL, told, 'pip uninstall apex; NVIDIA has its own on github.com/NVIDIA/apex only')
    version = version_of(_DISTRIBUTIONS.get(name, module)) or 'of unknown version'
    error = _import(imports, seconds)
    if error is None:
        return Line(name, OK, f'{version}, {_USED[name] if gpus else "not used: there is no GPU"}')
    status = FAIL if gpus or name in ('Transformer Engine', 'Apex') else WARN
    fix = f'build it again for the torch and CUDA of this environment, or pip uninstall {module}'
    return Line(name, status, f'{version} is found, but cannot be imported: {error}', fix)


def _import(modules: str, seconds: float) -> str | None:
    """None, or why they cannot be imported."""
    environ = {**os.environ, 'PYTHONPATH': os.pathsep.join(path for path in sys.path if path)}
    try:
        run = subprocess.run(
            [sys.executable, '-c', f'import {modules}'],
            env=environ,
            capture_output=True,
            text=True,
            errors='replace',
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f'no end after {seconds:g} s'
    if run.returncode == 0:
        return None
    if run.returncode < 0:
        return f'the process ended by signal {-run.returncode}'
    lines = run.stderr.strip().splitlines()
    return lines[-1][:300] if lines else f'exit code {run.returncode}'


def _nccl() -> Line:
    import torch

    if not torch.cuda.is_available():
        return Line('NCCL', OK, 'not used: there is no GPU, gloo is')
    if not torch.distributed.is_nccl_available():
        fix = 'install a torch for CUDA, from the index of pytorch.org'
        return Line('NCCL', FAIL, 'there are GPUs, but this torch was built without NCCL', fix)
    return Line('NCCL', OK, 'used between GPUs')


def _compiler() -> Line:
    wanted = os.environ.get('CXX')
    for name in [wanted] if wanted else ['c++', 'g++', 'clang++']:
        path = shutil.which(name)
        if path is not None:
            try:
                told = subprocess.run([path, '--version'], capture_output=True, text=True, timeout=10)
            except (OSError, subprocess.TimeoutExpired) as error:
                return Line('C++ compiler', WARN, f'{path} does not run: {error}', 'install g++, or set CXX')
            first = (told.stdout.strip().splitlines() or ['of unknown version'])[0]
            return Line('C++ compiler', OK, f'{first} ({path})')
    told = f'CXX={wanted} is not found' if wanted else 'not found'
    fix = "install g++, or set CXX: torch.compile on CPUs and Megatron's index of data sets are built with it"
    return Line('C++ compiler', WARN, told, fix)


def package_lines(ranks: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    """One line a package; where hosts differ, one for each thing that is said, with the ranks that say it."""
    said: dict[tuple[str, str, str, str], list[int]] = {}
    for rank, facts in ranks.items():
        for name, told in (facts.get('packages') or {}).items():
            said.setdefault((name, told['status'], told['value'], told['fix']), []).append(rank)
    names = [key[0] for key in said]
    found: list[Line] = []
    for (name, status, value, fix), by in sorted(said.items(), key=lambda item: names.index(item[0][0])):
        if names.count(name) == 1:
            found.append(Line(name, status, value, fix))
            continue
        hosts = ', '.join(sorted({ranks[rank]['host'] for rank in by}))
        told = f'{value} (host {hosts}, {of_ranks(by)})'
        fix = fix or 'hosts differ: install the same on all of them'
        found.append(Line(name, WARN if status == OK else status, told, fix, tuple(sorted(by))))
    return found
