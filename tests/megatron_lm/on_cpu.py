"""Runs pretrain_gpt.py of a Megatron-LM checkout on the CPU: that script and all it imports are those of the checkout.

    torchrun --nproc-per-node 4 tests/megatron_lm/on_cpu.py CHECKOUT/pretrain_gpt.py ARGUMENTS
    torchrun --nproc-per-node 4 tests/megatron_lm/on_cpu.py --loss cross_entropy -- CHECKOUT/pretrain_gpt.py ARGUMENTS

The second form hands everything to `twinkle_megatron.run`. What needs CUDA or a CUDA compiler in Megatron's set-up is
left out. The checkout's requirements (einops, regex, pydantic, pyyaml) have to be installed. It ran with:

    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant
    --log-interval 1 --eval-interval 2 --eval-iters 1 --split 99,1,0 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 126 --transformer-impl local --distributed-backend gloo --use-cpu-initialization
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-persist-layer-norm
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import runpy
import sys
from types import ModuleType
from typing import Any

import torch

_HELPERS = 'megatron.core.datasets.helpers_cpp'
_MEMORY = (
    'allocated_bytes.all.current',
    'allocated_bytes.all.peak',
    'reserved_bytes.all.current',
    'reserved_bytes.all.peak',
)


class _Anything:
    """Properties of a device that is not there."""

    name, major, minor, multi_processor_count, total_memory = 'CPU', 0, 0, 1, 1


class _Kernels(ModuleType):
    """Triton kernels that nothing calls."""

    @staticmethod
    def is_batch_invariant_mode_enabled() -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return None


def main(argv: list[str]) -> int:
    torch.set_num_threads(1)
    ours = '--' in argv
    script, *arguments = argv[argv.index('--') + 1 :] if ours else argv
    checkout = os.path.dirname(os.path.realpath(script))
    sys.path.insert(0, checkout)
    os.chdir(checkout)
    prepare()
    if ours:
        from twinkle_megatron import run

        return run.main(argv)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name='__main__')
    return 0


def prepare() -> None:
    """Megatron on the CPU, and its set-up without a GPU."""
    from twinkle_megatron.megatron import cpu
    from twinkle_megatron.megatron._cpu_torch import TORCH

    cpu.install()
    TORCH.cuda.device_count = lambda: 1
    TORCH.cuda.is_available = lambda: True
    TORCH.cuda.get_device_properties = lambda *args: _Anything()
    TORCH.cuda.get_device_capability = lambda *args: (0, 0)
    for name in ('max_memory_allocated', 'memory_allocated', 'memory_reserved', 'max_memory_reserved'):
        setattr(TORCH.cuda, name, lambda *args: 0)
    TORCH.cuda.memory_stats = lambda *args: dict.fromkeys(_MEMORY, 0)
    TORCH.cuda.reset_peak_memory_stats = lambda *args: None
    sys.modules[_HELPERS] = _installed_helpers()
    sys.modules['megatron.core.transformer.custom_layers.batch_invariant_kernels'] = _Kernels('batch_invariant_kernels')

    initialize: Any = importlib.import_module('megatron.training.initialize')
    initialize._compile_dependencies = lambda: None
    _gloo_schedules(importlib.import_module('megatron.training.arguments'))
    from twinkle_megatron.megatron.cpu_attention import CpuCoreAttention

    backends: Any = importlib.import_module('megatron.core.models.backends')
    backends.LocalSpecProvider.core_attention = lambda self: CpuCoreAttention  # also does context parallelism


def _gloo_schedules(arguments: Any) -> None:
    """What gloo cannot do, as `cpu.check_config` says: to free what it may still be sending, and to tell two neighbours
    of the same rank apart."""
    make = arguments.core_transformer_config_from_args

    def made(*args: Any, **kwargs: Any) -> Any:
        config = make(*args, **kwargs)
        config.deallocate_pipeline_outputs = False
        if config.virtual_pipeline_model_parallel_size is not None:
            config.overlap_p2p_comm, config.batch_p2p_comm = True, False
        return config

    arguments.core_transformer_config_from_args = made


def _installed_helpers() -> ModuleType:
    """The index builder of data sets as the installed wheel of megatron-core has it: a checkout would compile it."""
    files = importlib.metadata.files('megatron-core') or []
    path = next(str(file.locate()) for file in files if file.name.startswith('helpers_cpp.'))
    spec = importlib.util.spec_from_file_location(_HELPERS, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
