"""Micro-batches of the samples that text was cut into."""

from __future__ import annotations

import argparse

import numpy as np
import torch

from launch.datasets.data import Samples
from launch.parallel import share_of_replica
from twinkle_megatron.data_format import InputFeature


def micro_batches(samples: Samples, chosen: torch.Tensor, args: argparse.Namespace) -> list[InputFeature]:
    """The samples as micro-batches on this rank's device, every dp-th of them: those of its data parallel replica."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    mine = share_of_replica(chosen, args)

    def tensor(rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows).to(device, torch.int64)

    return [
        InputFeature(input_ids=tensor(samples.inputs[rows.numpy()]), labels=tensor(samples.labels[rows.numpy()]))
        for rows in mine
    ]
