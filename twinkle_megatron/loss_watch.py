"""What is done about a loss that is not finite, or unusually large: it is located, and Megatron is told."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from .arguments import above_0


class LossWatch:
    """Which losses of the global batch are worth a look: those that are not finite, and those more than `spike` times
    the largest before."""

    def __init__(self, spike: float, top: int) -> None:
        self.spike, self.top = above_0('spike', spike), int(above_0('top', top))
        self._largest = 0.0

    def complaint(self, loss: float) -> str | None:
        """What is wrong with it; None: nothing, and it is remembered."""
        if not math.isfinite(loss):
            return f'the loss is {loss}'
        if self._largest and abs(loss) > self.spike * self._largest:
            return f'the loss {loss:g} is more than {self.spike:g} times the largest before, {self._largest:g}'
        self._largest = max(self._largest, abs(loss))
        return None


def rerun_state_machine() -> Any:
    """Megatron's, while it watches a forward-backward pass; None where nobody has set it up, or between passes."""
    module = sys.modules.get('megatron.core.rerun_state_machine')
    machine = getattr(module, '_GLOBAL_RERUN_STATE_MACHINE', None)  # its getter would make one
    if module is None or machine is None or machine.get_mode() == module.RerunMode.DISABLED:
        return None
    return None if machine.state == module.RerunState.NOT_RUNNING_YET else machine


def is_rerun() -> bool:
    """Whether Megatron runs a step once more, to see whether its result comes again."""
    machine = rerun_state_machine()
    return machine is not None and machine.state.name.startswith('RERUNNING')


def validate(share: Tensor) -> None:
    """Tells Megatron's machine the loss of a micro-batch, as its own loss functions do: where that is not finite it
    will ask for the step again. Reads from the device; nothing where the machine does not watch."""
    machine = rerun_state_machine()
    if machine is not None:
        machine.validate_result(
            result=share.detach().sum(),
            rejection_func=lambda loss: not torch.isfinite(loss),
            message='the loss of a micro-batch is not finite',
            tolerance=0.0,
            fatal=True,
        )
