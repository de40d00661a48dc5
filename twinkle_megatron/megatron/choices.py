"""What was chosen by the memory and the compiler that a run has found, and has to stay the same when it goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..vocab_parallel.kernels.select import VARIABLE, select
from ..vocab_parallel.workspace import default_workspace_mb, take_workspace
from .head_choice import HeadChoice

logger = logging.getLogger('twinkle_megatron')

_LARGE = 1 << 12


def choices(head: HeadChoice, device: torch.device) -> dict[str, Any]:
    """The head, the size of its tiles, and the kernels, for a checkpoint."""
    return {
        'head': head.state_dict(),
        'workspace_mb': default_workspace_mb(device.type),
        'kernels': select(device, _LARGE, _LARGE).name,
    }


def choose_as(kept: Mapping[str, Any], head: HeadChoice, device: torch.device) -> None:
    """The same choices again; a warning where the kernels cannot be the same."""
    head.load_state_dict(kept['head'])
    take_workspace(device.type, kept['workspace_mb'])
    here = select(device, _LARGE, _LARGE).name
    if here != kept['kernels']:
        logger.warning(
            'twinkle_megatron goes on with %s kernels from a checkpoint of a run with %s ones: equal to rounding, not '
            'to the bit (%s chooses)',
            here,
            kept['kernels'],
            VARIABLE,
        )
