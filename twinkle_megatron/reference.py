"""The reference policy of a preference or policy loss: its log-probs for the micro-batches of a `MegatronModel`."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batch import TokenBatch, collated
from .evaluation import Evaluation
from .groups import raise_together
from .loss.base import SweepLoss
from .megatron.engine import NO_EXTRAS, Engine
from .megatron.plan import Plan
from .vocab_parallel import TokenStats

NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Nats per token, by the dtype of the weights: how far the log-probs of one policy may lie apart on average in two
runs, which may differ in layout; coarser dtypes: `NEAR_COARSE`."""
NEAR_COARSE = 2e-2


class Reference:
    """A frozen policy, of which log-probs are wanted for the micro-batches that a `MegatronModel` trains on.

    Made by `MegatronModel.reference`. Its chunks run in eval mode, without gradients, in the layout of the model.

    With a cache directory, the log-probs of each micro-batch lie in a file named by the SHA-256 of its tensors, of the
    temperature and of `ignore_index`, so that none is taken for another. They do not depend on the layout. What is new
    is computed and written by every rank of the last stage that does not see its file, which need not be on a shared
    file system; files appear whole or not at all. The first call computes in any case and compares: ValueError, on
    every rank, if the directory holds the log-probs of another policy.
    """

    def __init__(
        self,
        engine: Engine,
        like: Callable[[], Evaluation],
        within: Callable[[], AbstractContextManager[Any]],
        cache: str | Path | None = None,
    ) -> None:
        self._engine, self._like, self._within = engine, like, within
        self._cache = None if cache is None else Path(cache)
        self._checked = False

    def logps(self, inputs: Any, micro_batch_size: int | None = None) -> list[Tensor]:
        """The log-prob of each label under the reference, nats, at the temperature of the model's loss.

        On the last stage one tensor `[b, s]` a micro-batch, whole sequences, 0 where ignored; elsewhere none, and the
        keywords `ref_logps` and `old_logps` of a call may be empty there. Collective: all ranks call it, with the
        inputs that `forward_backward` gets.
        """
        like = self._like()
        loss = _LogProbs(like.ignore_index, like.temperature, like.layout)
        evaluation = Evaluation(loss, [], self._engine.groups, self._engine.shard, {})
        plan = self._engine.plan(inputs, micro_batch_size, NO_EXTRAS, evaluation, training=False)
        if self._cache is None:
            return self._computed(plan, evaluation)
        return self._cached(self._files(inputs, micro_batch_size, loss), plan, evaluation)

    def _computed(self, plan: Plan, evaluation: Evaluation) -> list[Tensor]:
        with self._within():
            return self._engine.forward(plan, evaluation).logps

    def _files(self, inputs: Any, micro_batch_size: int | None, loss: _LogProbs) -> list[Path]:
        """Of each micro-batch, on the last stage."""
        assert self._cache is not None
        if not self._engine.groups.is_last_stage:
            return []
        about = f'{loss.temperature!r} {loss.ignore_index}'
        batches = collated(inputs, micro_batch_size, loss.ignore_index, loss.layout).batches
        return [self._cache / f'{_fingerprint(batch, about)}.pt' for batch in batches]

    def _cached(self, files: list[Path], plan: Plan, evaluation: Evaluation) -> list[Tensor]:
        groups, found, error = self._engine.groups, [], None
        try:
            found = [_read(file) for file in files]
        except Exception as caught:  # raised on every rank
            error = caught
        raise_together(groups, error)
        lacks = torch.tensor([float(not self._checked or any(one is None for one in found))])
        if not groups.gather_everyone(lacks).any():
            return [one.to(self._engine.runner.device) for one in found if one is not None]
        computed = self._computed(plan, evaluation)
        try:
            self._compare(files, found, computed)
            for file, one, logps in zip(files, found, computed):
                if one is None:
                    _write(file, logps)
        except Exception as caught:  # raised on every rank
            error = caught
        raise_together(groups, error)
        self._checked = True
        return computed

    def _compare(self, files: list[Path], found: list[Tensor | None], computed: list[Tensor]) -> None:
        """ValueError unless what was found is what this reference computes."""
        dtype = next((p.dtype for model in self._engine.models for p in model.parameters()), torch.float32)
        for file, one, logps in zip(files, found, computed):
            if one is None:
                continue
            apart = (one.to(logps) - logps).abs().sum() / (logps != 0).sum().clamp(min=1)
            if not apart <= NEAR.get(dtype, NEAR_COARSE):
                raise ValueError(
                    f'cache must hold the log-probs of this reference, but {file} is {apart:.2g} nats a token from '
                    'what it computes: another policy wrote it. Delete the directory or name another one'
                )


class _LogProbs(SweepLoss):
    """Trains nothing: for log-probs alone."""

    def __init__(self, ignore_index: int, temperature: float, layout: str | None) -> None:
        super().__init__(ignore_index)
        self.temperature, self.layout = temperature, layout

    def contribution(self, batch: TokenBatch, stats: TokenStats, **extra: Any) -> Tensor:
        assert stats.log_prob is not None
        return stats.log_prob.new_zeros(())


def _fingerprint(batch: Mapping[str, Any], about: str) -> str:
    """SHA-256 over the tensors of a micro-batch, in any order of keys."""
    digest = hashlib.sha256(about.encode())
    for key in sorted(batch):
        value = batch[key]
        if isinstance(value, Tensor):
            array = value.detach().cpu().contiguous().reshape(-1)
            digest.update(f'{key} {array.dtype} {tuple(value.shape)} '.encode())
            digest.update(array.view(torch.uint8).numpy().tobytes() if array.numel() else b'')
    return digest.hexdigest()


def _read(file: Path) -> Tensor | None:
    if not file.exists():
        return None
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:
        raise ValueError(f'{file} cannot be read as cached log-probs ({error}): delete it') from error


def _write(file: Path, logps: Tensor) -> None:
    """Whole or not at all, whoever else writes it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f'{file.stem}.{uuid.uuid4().hex}.part')
    torch.save(logps.cpu(), partial)
    os.replace(partial, file)
