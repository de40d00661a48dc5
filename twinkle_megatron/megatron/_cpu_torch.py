"""`torch` as Megatron's modules see it while `cpu.install()` is in force: every CUDA name means the CPU.

Only the global name `torch` of modules under `megatron.` is swapped for `TORCH`. The real `torch`, and with it
everybody else's code and `torch.compile`, stays as it is: no function mode is active and `torch.cuda` is untouched.
"""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import Any

import torch

CPU = torch.device('cpu')

# fmt: off
_FACTORIES = (
    'arange', 'as_tensor', 'empty', 'empty_like', 'eye', 'full', 'full_like', 'linspace', 'ones', 'ones_like', 'rand',
    'rand_like', 'randint', 'randn', 'randn_like', 'randperm', 'scalar_tensor', 'tensor', 'tril_indices',
    'triu_indices', 'zeros', 'zeros_like',
)
# fmt: on


class StandIn(ModuleType):
    """A module with some names of its own; every other one is looked up in `_real` at the moment of use."""

    def __init__(self, real: ModuleType, **own: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(own, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__['_real'], name)


def _on_cpu(device: Any) -> Any:
    """The CPU for 'cuda', 'cuda:0' and CUDA device objects; everything else as it came."""
    is_cuda = device.startswith('cuda') if isinstance(device, str) else getattr(device, 'type', None) == 'cuda'
    return CPU if is_cuda else device


def _factory(make: Any) -> Any:
    """`torch.zeros(..., device='cuda', pin_memory=True)` makes an ordinary CPU tensor."""

    @functools.wraps(make)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop('pin_memory', None)
        if 'device' in kwargs:
            kwargs['device'] = _on_cpu(kwargs['device'])
        return make(*args, **kwargs)

    return on_cpu


class _Stream:
    """Stands for a CUDA stream or event: on the CPU all work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes and ignores device, priority and timing."""

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to wait for."""

    wait = wait_stream = wait_event = synchronize = record = _nothing

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return _Stream() if event is None else event

    def query(self) -> bool:
        return True


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A CUDA call without a meaning on the CPU."""


def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Sets the CPU generator; the device and graph arguments of the CUDA calls are ignored."""
    torch.set_rng_state(state)


_CUDA = StandIn(
    torch.cuda,
    current_device=lambda: CPU,
    set_device=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
    set_rng_state=set_rng_state,
    manual_seed=torch.manual_seed,
    random=StandIn(torch.cuda.random, get_rng_state=lambda *args, **kwargs: torch.get_rng_state()),
    Stream=_Stream,
    Event=_Stream,
    current_stream=_Stream,
    default_stream=_Stream,
    stream=lambda stream: contextlib.nullcontext(),
)

TORCH = StandIn(torch, cuda=_CUDA, **{name: _factory(getattr(torch, name)) for name in _FACTORIES})
