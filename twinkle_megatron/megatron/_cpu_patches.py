"""What `cpu.install()` changes: one entry of `PATCHES` a reason, each shown to be needed by the case it names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import torch

from ._cpu_torch import TORCH, set_rng_state

_MISSING = object()


class Undo:
    """Sets attributes and knows how to put back what was there."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`; undone by the very object that was there, unless somebody has replaced ours since."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def restore() -> None:
            if vars(owner).get(name) is value:
                delattr(owner, name) if before is _MISSING else setattr(owner, name, before)

        self.later(restore)

    def later(self, step: Callable[[], None]) -> None:
        self._steps.append(step)

    def run(self) -> None:
        while self._steps:
            self._steps.pop()()


@dataclass(frozen=True)
class Patch:
    """One change and its reason: `apply` on the named module, or on every one under `megatron.` where it is None."""

    name: str
    module: str | None
    reason: str
    apply: Callable[[ModuleType, Undo], None]


PATCHES: list[Patch] = []


Apply = Callable[[ModuleType, Undo], None]


def _patch(module: str | None, reason: str) -> Callable[[Apply], Apply]:
    """Makes a function an entry of the table."""

    def register(apply: Apply) -> Apply:
        PATCHES.append(Patch(getattr(apply, '__name__', '').strip('_'), module, reason, apply))
        return apply

    return register


@_patch(None, "every case: device='cuda', torch.cuda.current_device(), streams, RNG states")
def _cuda_means_cpu(module: ModuleType, undo: Undo) -> None:
    if vars(module).get('torch') is torch:
        undo.set(module, 'torch', TORCH)


@_patch('torch', 'rotary embeddings under CP, broadcast_data, checkpoint exchange: tensor.cuda()')
def _tensor_cuda(module: ModuleType, undo: Undo) -> None:
    undo.set(module.Tensor, 'cuda', lambda self, *args, **kwargs: self)


@_patch(None, 'every case: functions that jit_fuser has already wrapped would compile for seconds at their first call')
def _run_fused_eagerly(module: ModuleType, undo: Undo) -> None:
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    for owner in (module, *classes):
        for name, value in list(vars(owner).items()):
            plain = getattr(value, '_torchdynamo_orig_callable', None)
            if plain is not None:
                undo.set(owner, name, plain)
    if vars(module).get('jit_fuser') is torch.compile:
        undo.set(module, 'jit_fuser', _as_it_is)


def _as_it_is(function: Any) -> Any:
    return function


@_patch(
    'megatron.core.tensor_parallel.random',
    'dropout under tensor parallelism: setting a CUDA state does nothing, and ranks drop different hidden values',
)
def _rng_state(module: ModuleType, undo: Undo) -> None:
    undo.set(module, '_set_cuda_rng_state', set_rng_state)


@_patch(
    'megatron.core.tensor_parallel.random',
    'the same cases: the tracker warns when the CPU generator moves, here that is meant',
)
def _rng_warning(module: ModuleType, undo: Undo) -> None:
    logger = logging.getLogger(module.__name__)

    def unrelated(record: logging.LogRecord) -> bool:
        return 'CPU RNG state changed' not in record.getMessage()

    logger.addFilter(unrelated)
    undo.later(lambda: logger.removeFilter(unrelated))


@_patch(
    'megatron.core.transformer.torch_norm', 'sequence parallel: without Apex or Transformer Engine the norm refuses it'
)
def _norm_under_sequence_parallel(module: ModuleType, undo: Undo) -> None:
    build = module.WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = build(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():  # finalize_model_grads sums the gradients of such parameters over TP
            parameter.sequence_parallel = sequence_parallel
        return norm

    undo.set(module.WrappedTorchNorm, '__new__', staticmethod(new))


@_patch(
    'megatron.core.transformer.moe.token_dispatcher',
    'expert parallel: split sizes become lists only when they lie on a GPU',
)
def _moe_splits(module: ModuleType, undo: Undo) -> None:
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    undo.set(module, 'maybe_move_tensor_to_cpu', to_host)


@_patch(
    'megatron.core.transformer.moe.moe_utils',
    'MoE on 0.16: the router reads a name that only Transformer Engine defines',
)
def _moe_router(module: ModuleType, undo: Undo) -> None:
    if not hasattr(module, 'te_general_gemm'):
        undo.set(module, 'te_general_gemm', None)


@_patch(
    'megatron.core.transformer.multi_token_prediction',
    'MTP from 0.17: an isinstance check against None without Transformer Engine',
)
def _mtp(module: ModuleType, undo: Undo) -> None:
    if hasattr(module, 'is_inference_column_parallel_linear'):
        undo.set(module, 'is_inference_column_parallel_linear', lambda layer: False)


@_patch(
    'megatron.core.optimizer.optimizer', 'bf16 optimizer: parameter types are compared with the names of CUDA tensors'
)
def _optimizer_types(module: ModuleType, undo: Undo) -> None:
    _rename_types(module.Float16OptimizerWithFloat16Params.__init__, undo)


@_patch('megatron.core.optimizer.distrib_optimizer', 'distributed optimizer: the same comparison')
def _distributed_optimizer_types(module: ModuleType, undo: Undo) -> None:
    _rename_types(module.DistributedOptimizer.__init__, undo)
    _rename_types(module.DistributedOptimizer._build_model_and_main_param_groups.__func__, undo)


@_patch('megatron.core.optimizer.clip_grads', 'gradient clipping: the same comparison')
def _clipped_types(module: ModuleType, undo: Undo) -> None:
    _rename_types(module.clip_grad_by_total_norm_fp32, undo, _FullPrecision())


@_patch(
    'megatron.core.optimizer.distrib_optimizer',
    "'fully_reshardable' load into torch's Adam: its state dict holds no step",
)
def _adam_step(module: ModuleType, undo: Undo) -> None:
    load = module.DistributedOptimizer._set_main_param_and_optimizer_states

    def load_with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, index = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]['params'][index]]
        missing = {'step': state['step']} if 'step' in state and 'step' not in tensors else {}
        return load(self, model_param, {**tensors, **missing})

    undo.set(module.DistributedOptimizer, '_set_main_param_and_optimizer_states', load_with_step)


class _FullPrecision(str):
    """Equals the type names of float32 and float64 tensors: clipping is as good in both."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other in ('torch.FloatTensor', 'torch.DoubleTensor')

    def __ne__(self, other: object) -> bool:
        return not self == other


def _rename_types(function: Any, undo: Undo, full_precision: str = 'torch.FloatTensor') -> None:
    """Lets `function` compare `tensor.type()` with the names of CPU tensors: they are literals in its code."""
    names = {
        'torch.cuda.FloatTensor': full_precision,
        'torch.cuda.HalfTensor': 'torch.HalfTensor',
        'torch.cuda.BFloat16Tensor': 'torch.BFloat16Tensor',
    }
    code = function.__code__
    function.__code__ = _renamed(code, names)
    undo.later(lambda: setattr(function, '__code__', code))


def _renamed(constant: Any, names: dict[str, str]) -> Any:
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=_renamed(constant.co_consts, names))
    if isinstance(constant, tuple):
        return tuple(_renamed(item, names) for item in constant)
    return names.get(constant, constant) if isinstance(constant, str) else constant
