"""Whether logits are built or not."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..groups import Groups, group_size, raise_together
from ..vocab_parallel.workspace import check_workspace, default_workspace_mb, free_memory
from .forward_step import device_of
from .heads import TakeHead, head_taken, logits_taken, why_no_linear_head

logger = logging.getLogger('twinkle_megatron')

HEADS = ('auto', 'logits', 'linear')
_SHARE = 4
"""'auto' builds logits only while they and their gradient take less than this part of the free memory."""


class _Known(NamedTuple):
    """What the ranks have told each other: bytes free on the fullest one, the output layer of the last stage, and the
    largest workspace."""

    free: float
    possible: bool
    columns: float
    hidden: float
    itemsize: float
    workspace_mb: float


class HeadChoice:
    """'logits' or 'linear', the same on every rank.

    The linear head multiplies a part of the logits out twice, so 'auto' takes it for its memory alone: from the number
    of tokens on at which the logits of a micro-batch and their gradient would take a quarter of the memory that is free
    at the first call, and twice what the linear head needs itself, which grows with the hidden size. Once linear it
    stays linear.

    ValueError, on every rank, for a head that cannot be had. Collective over the layout for 'linear'.
    """

    def __init__(
        self, wanted: str, models: Sequence[Any], config: Any, groups: Groups, max_workspace_mb: float | None
    ) -> None:
        if wanted not in HEADS:
            raise ValueError(f"head must be 'auto', 'logits' or 'linear', got {wanted!r}")
        check_workspace(max_workspace_mb)
        self.max_workspace_mb = max_workspace_mb
        self._wanted, self._model, self._config, self._groups = wanted, models[-1], config, groups
        self._obstacle = self._find_obstacle()
        if wanted == 'linear':
            self._raise_for_obstacle()
        self._linear = wanted == 'linear'
        self._known: _Known | None = None

    def state_dict(self) -> dict[str, Any]:
        """What has been found out, by which 'auto' decides; for a checkpoint."""
        return {'linear': self._linear, 'known': None if self._known is None else list(self._known)}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Decides from now on as the run that kept this, whatever memory is free; nothing unless 'auto'."""
        if self._wanted == 'auto':
            self._linear, known = bool(kept['linear']), kept['known']
            self._known = None if known is None else _Known(*known)

    def taken(self, tokens: int) -> TakeHead:
        """How to take the head for micro-batches of up to `tokens` tokens a rank.

        The first call under 'auto' is collective over the layout, and so is each that takes 'linear': ValueError on
        every rank if somebody has changed the output layer since.
        """
        if not self._decide(tokens):
            return logits_taken
        self._obstacle = self._find_obstacle()
        self._raise_for_obstacle()
        return functools.partial(head_taken, max_workspace_mb=self.max_workspace_mb)

    def _find_obstacle(self) -> str | None:
        return why_no_linear_head(self._model, self._config) if self._groups.is_last_stage else None

    def _raise_for_obstacle(self) -> None:
        told = f"head='linear' cannot be had: {self._obstacle}; use head='logits'"
        raise_together(self._groups, None if self._obstacle is None else ValueError(told))

    def _decide(self, tokens: int) -> bool:
        """Whether to go without logits."""
        if self._wanted != 'auto' or self._linear:
            return self._linear
        first = self._known is None
        known = self._known = self._known or self._ask()
        logits, linear = 2 * tokens * known.columns * known.itemsize, self._needs(tokens, known)
        self._linear = known.possible and logits > known.free / _SHARE and logits > 2 * linear
        if (first or self._linear) and self._groups.owns_output:
            logger.warning(
                "twinkle_megatron takes head='%s': the logits of %s tokens x %s ids a rank and their gradient take "
                '%.1f GiB of the %.1f GiB of free memory, a linear head %.1f GiB%s',
                'linear' if self._linear else 'logits',
                f'{tokens:,}',
                f'{known.columns:,.0f}',
                logits / 2**30,
                known.free / 2**30,
                linear / 2**30,
                '' if known.possible else f' (but {self._obstacle})',
            )
        return self._linear

    def _needs(self, tokens: int, known: _Known) -> float:
        """Bytes of a linear head: its hidden states, gathered and as a gradient, and its workspace."""
        return tokens * known.hidden * (4 + 2 * known.itemsize) + known.workspace_mb * 2**20

    def _ask(self) -> _Known:
        device = device_of(self._model)
        free = free_memory(device.type)
        if free is not None and device.type != 'cuda':  # the ranks of a host share it
            free //= int(os.environ.get('LOCAL_WORLD_SIZE', '1'))
        columns = hidden = 0
        if self._groups.is_last_stage:  # an adapter around the output layer may not tell its sizes
            layer, ids = getattr(self._model, 'output_layer', None), getattr(self._model, 'vocab_size', None) or 0
            columns = getattr(layer, 'output_size_per_partition', ids // group_size(self._groups.tp))
            hidden = getattr(layer, 'input_size', getattr(self._config, 'hidden_size', 0))
        itemsize = next((p.dtype.itemsize for p in self._model.parameters()), 4)
        workspace = self.max_workspace_mb or default_workspace_mb(device.type)
        row = [math.inf if free is None else free, float(self._obstacle is None), columns, hidden, itemsize, workspace]
        table = self._groups.gather_everyone(torch.tensor(row, dtype=torch.float64, device=device))
        (least, possible, *_), (_, _, *sizes) = table.amin(0).tolist(), table.amax(0).tolist()
        return _Known(least, bool(possible), *sizes)
