"""What a metric keeps between two calls of `calculate`: a few named float64 numbers, and how they merge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """How one number of the state starts, and how two of them become one. `merge` is associative, `empty` neutral.

    Whatever merges like this (the bins of a histogram, a bounded list of the largest values) is a field of several
    numbers, and would be packed and reduced in the same collective.
    """

    empty: float
    merge: Callable[[Tensor, Tensor], Tensor]


SUM = Field(0.0, torch.add)
MINIMUM = Field(math.inf, torch.minimum)
MAXIMUM = Field(-math.inf, torch.maximum)


def as_scalar(value: Any, name: str, device: torch.device) -> Tensor:
    """`value`, a number or a one-element tensor, as a detached float64 scalar on `device`; no host sync.

    ValueError, naming `name`, for anything else.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f'{name} must be one number, got a tensor of shape {tuple(value.shape)}; is it reduced yet?'
            )
        return value.detach().reshape(()).to(device, torch.float64)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f'{name} must be one number or a one-element tensor, got {type(value).__name__}') from error
    return torch.full((), number, dtype=torch.float64, device=device)


class State:
    """Named float64 scalars, kept on the device where the values come from, so that adding needs no host sync.

    Every rank declares the same fields in the same order: a rank that saw no data packs the same vector.
    """

    def __init__(self, fields: Mapping[str, Field]):
        self._fields = dict(fields)
        self.clear()

    def clear(self) -> None:
        """Every field back to its start."""
        self._device = torch.device('cpu')
        self._scalars = {
            name: torch.full((), field.empty, dtype=torch.float64, device=self._device)
            for name, field in self._fields.items()
        }

    def fold(self, **values: Any) -> None:
        """Merges numbers or one-element tensors into the fields of those names."""
        self._update(values, merge=True)

    def put(self, **values: Any) -> None:
        """Replaces the fields of those names: the last value given counts."""
        self._update(values, merge=False)

    def packed(self) -> Tensor:
        """All fields as one float64 vector, in the declared order."""
        scalars = list(self._scalars.values())
        return torch.stack(scalars) if scalars else torch.empty(0, dtype=torch.float64, device='cpu')

    def unpack(self, vector: Tensor) -> None:
        """Replaces all fields by those of a packed vector."""
        scalars = vector.detach().double().to(self._device).unbind(0)
        self._scalars = dict(zip(self._fields, scalars, strict=True))

    def merged(self, rows: Tensor) -> Tensor:
        """The vectors of all ranks, `rows[ranks, fields]`, merged in rank order."""
        columns = rows.unbind(1)
        return torch.stack([_fold(field.merge, column) for field, column in zip(self._fields.values(), columns)])

    def named(self, vector: Tensor) -> dict[str, float]:
        """A packed vector as numbers by name. One host sync."""
        return dict(zip(self._fields, vector.tolist(), strict=True))

    def _update(self, values: Mapping[str, Any], merge: bool) -> None:
        self._follow(values)
        new = {name: as_scalar(value, name, self._device) for name, value in values.items()}
        # Never in place: a scalar made inside inference mode could not be written to outside of it.
        self._scalars |= {n: self._fields[n].merge(self._scalars[n], x) for n, x in new.items()} if merge else new

    def _follow(self, values: Mapping[str, Any]) -> None:
        """Moves the state from the CPU to the accelerator that the first values lie on."""
        devices = [v.device for v in values.values() if isinstance(v, Tensor) and v.device.type != 'cpu']
        if self._device.type == 'cpu' and devices:
            self._device = devices[0]
            self._scalars = {name: scalar.to(self._device) for name, scalar in self._scalars.items()}


def _fold(merge: Callable[[Tensor, Tensor], Tensor], column: Tensor) -> Tensor:
    total, *rest = column.unbind(0)
    for value in rest:
        total = merge(total, value)
    return total
