"""Real megatron-core on CPU with gloo: schedules, DDP, optimizers, checkpoints, MoE, without a GPU.

    from twinkle_megatron.megatron import cpu

    cpu.install()       # before or after the import of megatron.core
    ...
    cpu.uninstall()     # every attribute is what it was

What is changed stands in one table, `cpu.PATCHES`: one entry a reason, applied to the module it names as soon as that
module is imported. Megatron's `jit_fuser` functions run eagerly; `torch.compile` elsewhere still compiles. Only code
under `megatron.` sees the stand-in for CUDA: a script of your own asks for `device='cpu'`, not for `torch.cuda`.
"""

from __future__ import annotations

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from ._cpu_patches import PATCHES, Patch, Undo

__all__ = ['PATCHES', 'Patch', 'check_config', 'install', 'installed', 'uninstall']


class _AdaptImports(importlib.abc.MetaPathFinder):
    """Applies the table to Megatron's modules as they are imported."""

    def __init__(self, undo: Undo) -> None:
        self.undo = undo

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if not _is_megatron(name):
            return None
        found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_adapt(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    _adapt(module, self.undo)

            spec.loader.exec_module = execute_and_adapt
        return spec


def _is_megatron(name: str) -> bool:
    return name.startswith('megatron.')


def _adapt(module: ModuleType, undo: Undo) -> None:
    for patch in PATCHES:
        if patch.module == module.__name__ or (patch.module is None and _is_megatron(module.__name__)):
            patch.apply(module, undo)


_active: Undo | None = None


def installed() -> bool:
    """Whether `install()` is in force in this process."""
    return _active is not None


def install() -> None:
    """Makes Megatron-Core run on the CPU in this process, until `uninstall()`. A second call changes nothing.

    May come before or after the import of Megatron; forked processes inherit it. Imports nothing itself. Functions
    that Megatron wraps in `jit_fuser` run eagerly; those imported while this is in force stay so after `uninstall()`.

    RuntimeError where CUDA is available: there Megatron needs no such thing.
    """
    global _active
    if torch.cuda.is_available():
        raise RuntimeError(
            f'cpu.install() is for machines without CUDA, but torch sees {torch.cuda.device_count()} CUDA device(s); '
            'run Megatron on them with the NCCL backend, or hide them by CUDA_VISIBLE_DEVICES="" to test on the CPU'
        )
    if _active is not None:
        return
    _active = undo = Undo()
    finder = _AdaptImports(undo)
    sys.meta_path.insert(0, finder)
    undo.later(lambda: sys.meta_path.remove(finder))
    try:
        for module in [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]:
            _adapt(module, undo)
    except BaseException:
        uninstall()  # a version of Megatron without what an entry names leaves nothing half done
        raise


def uninstall() -> None:
    """Puts back every attribute that `install()` changed. Does nothing where it is not in force."""
    global _active
    if _active is not None:
        _active.run()
        _active = None


def check_config(config: Any, num_chunks: int = 1) -> None:
    """ValueError where `config` would train wrongly, or fail obscurely, on the CPU. Does nothing without `install()`.

    Args:
        config: the chunks' `TransformerConfig`, as it is when the schedule runs.
        num_chunks: model chunks of this rank, more than one for the interleaved pipeline.
    """
    if _active is None:
        return
    for wrong, message in _refused(config, num_chunks):
        if wrong:
            raise ValueError(message)


def _refused(config: Any, num_chunks: int) -> list[tuple[bool, str]]:
    stages, params, pipeline = config.pipeline_model_parallel_size, config.params_dtype, config.pipeline_dtype
    hidden = torch.float32 if config.fp32_residual_connection else params
    return [
        (
            num_chunks > 1 and stages == 2 and config.batch_p2p_comm,
            f'config must have overlap_p2p_comm=True and batch_p2p_comm=False for {num_chunks} chunks on 2 pipeline '
            'stages, got batch_p2p_comm=True: both neighbours are the same rank, so activations and gradients sent in '
            'one batch get mixed up and every gradient is wrong, with no error',
        ),
        (
            num_chunks > 1 and config.overlap_p2p_comm and config.deallocate_pipeline_outputs,
            'config must have deallocate_pipeline_outputs=False with overlap_p2p_comm=True on the CPU, got True: gloo '
            'may still be sending the memory that is freed, which makes gradients wrong, with no error',
        ),
        (
            stages > 1 and pipeline is not None and pipeline != hidden,
            f'config must have pipeline_dtype={hidden}, the dtype of the hidden states, got {pipeline}: gloo ends the '
            'process when a message has another size than expected',
        ),
        (
            config.gradient_accumulation_fusion,
            'config must have gradient_accumulation_fusion=False on the CPU, got True: the fused kernel is CUDA code',
        ),
        (
            config.masked_softmax_fusion and params in (torch.bfloat16, torch.float16),
            f'config must have masked_softmax_fusion=False for {params} on the CPU, got True: the fused kernel is CUDA '
            'code',
        ),
    ]
