"""The figures of a run where people watch: TensorBoard and Weights & Biases, each where it is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any


class Boards:
    """Writes figures to TensorBoard, into `folder/tensorboard`, where the package tensorboard is installed; and to
    Weights & Biases, as the run of the folder's name in the project WANDB_PROJECT (`twinkle_megatron`), where wandb is
    installed and WANDB_API_KEY or WANDB_MODE is set.

    Args:
        folder: of the run.
        start: the step that the run goes on after; what a board has of later ones is replaced.
        options: of the run, for Weights & Biases.
    """

    def __init__(self, folder: Path, start: int, options: Mapping[str, Any]) -> None:
        self._tensorboard: Any = None
        self._wandb: Any = None
        if importlib.util.find_spec('tensorboard') is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / 'tensorboard'), purge_step=start + 1 if start else 0)
        wanted = os.environ.get('WANDB_API_KEY') or os.environ.get('WANDB_MODE')
        if wanted and importlib.util.find_spec('wandb') is not None:
            import wandb  # pyright: ignore[reportMissingImports]

            project = os.environ.get('WANDB_PROJECT', 'twinkle_megatron')
            known = {name: str(value) for name, value in options.items()}
            self._wandb = wandb.init(
                project=project, name=folder.name, id=folder.name, dir=str(folder), config=known, resume='allow'
            )

    def write(self, figures: Mapping[str, Any]) -> None:
        """Those of one step: numbers by name, and the `step`."""
        step = figures['step']
        numbers = {name: x for name, x in figures.items() if isinstance(x, Real) and name != 'step'}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, float(value), step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
