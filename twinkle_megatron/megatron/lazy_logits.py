"""What an output layer returns in place of logits: hidden states and weight, which become logits if somebody asks."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..vocab_parallel import LinearHead

logger = logging.getLogger('twinkle_megatron')


class LazyLogits(LinearHead):
    """Megatron's logits `[s, b, V/tp]` as a linear head. Used as a tensor, it is that tensor: the product is made.

    What GPTModel does to its logits before they reach a loss, a transposition and MuP's scale, leaves it lazy, and its
    shape is known. All else that a tensor can do (torch functions, operators, methods) builds the logits, by the
    layer's own forward, once. They cannot be written to: the statistics would not see it.

    Args:
        layer: the ColumnParallelLinear.
        hidden: its input, `[s/tp, b, H]` under sequence parallelism, else `[s, b, H]`.
        weight: a weight given at the call (tied embeddings), or None for the layer's own.
        gather: the layer's `runtime_gather_output` of the call.
        max_workspace_mb: see `LinearHead`.
    """

    def __init__(
        self, layer: Any, hidden: Tensor, weight: Tensor | None, gather: bool | None, max_workspace_mb: float | None
    ) -> None:
        used = layer.weight if weight is None else weight
        super().__init__(
            hidden,
            used,
            bias=layer.bias,
            sequence_parallel=bool(layer.sequence_parallel),
            max_workspace_mb=max_workspace_mb,
            main_grad=main_grad_of(used),
        )
        self._layer, self._gather = layer, layer.gather_output if gather is None else gather
        self._recorded = torch.is_grad_enabled()
        self._built: Tensor | None = None
        self.builder: Any = None
        """Is told of each product, before and after."""

    def logits(self) -> Tensor:
        """The logits as a tensor, differentiable, of the memory that a linear head exists to save. Kept for the next
        who asks."""
        built = self._built
        if built is None:
            if self.builder is not None:
                self.builder.about_to_build()
            with self._as_called() as layer:
                forward = type(layer).forward
                x = forward(layer, self.hidden, weight=self.weight, runtime_gather_output=self._gather)[0]
                x = x if self.logit_scale == 1 else x * self.logit_scale
                built = self._built = x.permute(*self.order, x.dim() - 1)
            if self.builder is not None:
                self.builder.built(built)
        return built

    @contextlib.contextmanager
    def _as_called(self) -> Iterator[Any]:
        """The layer as it was when it was called, whoever asks: autograd's mode, and a setting that Megatron's
        inference changes for one call."""
        layer = self._layer
        before, layer.sequence_parallel = layer.sequence_parallel, self.sequence_parallel
        mode = torch.inference_mode(False) if self.requires_grad else contextlib.nullcontext()
        try:
            with mode, torch.set_grad_enabled(self.requires_grad):
                yield layer
        finally:
            layer.sequence_parallel = before

    @property
    def requires_grad(self) -> bool:
        """Whether the logits do: whether autograd recorded the call."""
        return self._recorded and super().requires_grad

    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        tp = torch.distributed.get_world_size(self._layer.tp_group)
        columns = self.local_size * (tp if self._gather else 1)
        return torch.Size((*self.lead(tp), columns))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.order) + 1

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def ndim(self) -> int:
        return self.dim()

    def transpose(self, dim0: int, dim1: int) -> Any:
        dims = len(self.order) + 1
        if any(dim % dims == dims - 1 for dim in (dim0, dim1)):
            return self._told('transpose').transpose(dim0, dim1)
        return self._forgetting(super().transpose(dim0, dim1))

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """A part of the batch; along any other dim, of the tensor."""
        at = dim + self.dim() if dim < 0 else dim
        if not 0 <= at < len(self.order) or self.order[at] == 0:  # the sequence, which may be split over ranks
            return self._told('narrow').narrow(dim, start, length)
        return self._forgetting(super().narrow(dim, start, length))

    def detach(self) -> LazyLogits:
        return self._forgetting(super().detach())

    def __mul__(self, factor: Any) -> Any:
        if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            return self._told('mul') * factor
        out = self._forgetting(copy.copy(self))
        out.logit_scale = self.logit_scale * factor
        return out

    __rmul__ = __mul__

    def _forgetting(self, out: LazyLogits) -> LazyLogits:
        out._built = None
        return out

    def _told(self, asked: str) -> Tensor:
        if self._built is None:
            _say_once(asked)
        return self.logits()

    def __getattr__(self, name: str) -> Any:
        if name.startswith('_') or not hasattr(Tensor, name):
            raise AttributeError(f'{type(self).__name__} has no attribute {name!r}, and neither has a tensor')
        if name.endswith('_'):
            raise AttributeError(_READ_ONLY)
        return getattr(self._told(name), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, '__name__', str(func))
        if name.endswith('_') and not name.endswith('__') and args and isinstance(args[0], cls):
            raise AttributeError(_READ_ONLY)

        def real(x: Any) -> Any:
            if type(x) in (list, tuple):
                return type(x)(real(item) for item in x)
            return x._told(name) if isinstance(x, cls) else x

        return func(*map(real, args), **{key: real(value) for key, value in (kwargs or {}).items()})


_READ_ONLY = 'the logits of a linear head cannot be written to; work on a new tensor, as in logits / temperature'


def _forwarded(name: str) -> Any:
    def operator(self: LazyLogits, *args: Any) -> Any:
        return getattr(self._told(name.strip('_')), name)(*args)

    return operator


for _name in (
    'add', 'radd', 'sub', 'rsub', 'truediv', 'rtruediv', 'floordiv', 'mod', 'pow', 'rpow', 'matmul', 'rmatmul', 'neg',
    'abs', 'getitem', 'len', 'iter', 'lt', 'le', 'gt', 'ge', 'eq', 'ne',
):  # fmt: skip
    setattr(LazyLogits, f'__{_name}__', _forwarded(f'__{_name}__'))


@functools.cache
def _say_once(asked: str) -> None:
    logger.warning(
        'twinkle_megatron builds the logits of a linear head, because they are used as a tensor (%s): this takes the '
        "memory that head='linear' saves",
        asked,
    )


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The buffer that Megatron's DDP collects this weight's gradient in; None where autograd has to do it, as for a
    weight whose gradient somebody changes in a hook."""
    if not weight.requires_grad or hasattr(weight, '__fsdp_param__') or weight._backward_hooks:
        return None
    return getattr(weight, 'main_grad', None)
