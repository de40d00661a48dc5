"""A custom loss on a linear head: the tensor parallel ranks stay together, whatever it does on each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..groups import all_gather_rows
from ..seen import nothing
from .lazy_logits import LazyLogits

_DONE, _FAILED, _BUILDS = range(3)


class Together:
    """Runs a custom loss, which may build the logits of a linear head, or fail, on some TP ranks only.

    Logits that are built have collectives of their own, forward under sequence parallelism and backward: a rank says
    that it is about to build, and those that have finished build too, with a gradient of zero. Where one has failed
    they all stop. One small collective over TP for each product, and one at the end.
    """

    def __init__(self, head: LazyLogits, group: Any) -> None:
        self._head, self._group = head, group
        self._built: list[Tensor] = []
        self._over = False

    def run(self, loss: Callable[[], Tensor]) -> Tensor | None:
        """What `loss` returns, or None where it has failed on another rank."""
        self._head.builder = self
        try:
            share = loss()
            while self._build_with_others():
                pass
        except _Stopped:
            return None
        except Exception:
            if not self._over:
                self._tell(_FAILED)
            raise
        finally:
            self._head.builder = None
        return share + sum((nothing(x) for x in self._built), torch.zeros((), device=share.device))

    def about_to_build(self) -> None:
        """Called before a product of the head."""
        self._tell(_BUILDS)
        if self._over:
            raise _Stopped

    def built(self, logits: Tensor) -> None:
        """Called after it. Its backward pass is entered on every rank, even if this rank's loss does not use it."""
        if logits.requires_grad:
            self._built.append(logits)

    def _build_with_others(self) -> bool:
        states = self._tell(_DONE)
        if self._over:
            raise _Stopped
        if (states == _DONE).all():
            return False
        head = self._head * 1
        head.builder = None
        self.built(head.logits())
        return True

    def _tell(self, state: int) -> Tensor:
        states = all_gather_rows(torch.tensor(state, device=self._head.device), self._group)
        self._over = bool((states == _FAILED).any())
        return states


class _Stopped(BaseException):
    """The loss has failed on another rank. Passes through a loss that catches every Exception."""
