"""Makes a loss from what a person hands to `set_loss`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arguments import by_name
from .cross_entropy import ChunkedCrossEntropyLoss, CrossEntropyLoss
from .gkd import GKDLoss
from .grpo import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss
from .infonce import InfonceLoss
from .mse import MSELoss
from .preference import CPOLoss, DPOLoss, ORPOLoss, SimPOLoss

_CLASSES = (
    CrossEntropyLoss, ChunkedCrossEntropyLoss, DPOLoss, SimPOLoss, CPOLoss, ORPOLoss, GKDLoss, GRPOLoss, GSPOLoss,
    SAPOLoss, CISPOLoss, BNPOLoss, DRGRPOLoss, InfonceLoss, MSELoss,
)  # fmt: skip
LOSSES: dict[str, type] = {cls.__name__: cls for cls in _CLASSES}


def build_loss(loss: Any, **init: Any) -> Callable[..., Any]:
    """A loss from its class (made with `init`), its name, or a callable `(inputs, outputs, **extra)`.

    ValueError for an unknown name, for `init` beside what is made already, and for reduction 'none'.
    """
    if isinstance(loss, str):
        loss = by_name(loss, LOSSES, 'loss')
    if isinstance(loss, type):
        loss = loss(**init)
    elif init:
        raise ValueError(f'{_name(loss)} is made already and takes no {sorted(init)}; pass the class')
    if not callable(loss):
        raise ValueError(f'loss must be a loss class, an instance, a name or a callable, got {type(loss).__name__}')
    if getattr(loss, 'reduction', 'mean') == 'none':
        raise ValueError("reduction='none' gives no number to train; use 'mean' (or 'sum', which trains the same mean)")
    return loss


def _name(loss: Any) -> str:
    return getattr(loss, '__name__', type(loss).__name__)
