"""The reference policy of a preference or policy loss: its log-probs for the micro-batches of a `MegatronModel`."""

from __future__ import annotations

import hashlib
import os
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batch import TokenBatch, collated, packing_of
from .evaluation import Evaluation
from .groups import raise_together
from .loss.base import SweepLoss
from .megatron.engine import NO_EXTRAS, Engine
from .megatron.plan import Plan
from .vocab_parallel import TokenStats

NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Nats per token, by the dtype of the weights: how far the log-probs of one policy may lie apart on average in two
runs, which may differ in layout; coarser dtypes: `NEAR_COARSE`, above the 0.02 that bfloat16 was seen to differ by."""
NEAR_COARSE = 5e-2


class Reference:
    """A frozen policy, of which log-probs are wanted for the micro-batches that a `MegatronModel` trains on.

    Made by `MegatronModel.reference`. Its chunks run in eval mode, without gradients, in the layout of the model.

    With a cache directory, the log-probs of each micro-batch lie in a file named by the SHA-256 of what the model reads
    of it, of the temperature and of `ignore_index`, so that none is taken for another. They do not depend on the
    layout. What is new is computed and written by every rank of the last stage that does not see its file, which need
    not be on a shared file system; files appear whole or not at all. The first call that finds files of an earlier run
    computes the first micro-batch again and compares: ValueError, on every rank, if it is that of another policy.
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
        self._own: set[Path] = set()
        self._checked = False
        raise_together(engine.groups, None if self._cache is None else _why_no_cache(self._cache))

    def logps(
        self, inputs: Any, micro_batch_size: int | None = None, *, max_tokens_per_micro_batch: int | None = None
    ) -> list[Tensor]:
        """The log-prob of each label under the reference, nats, at the temperature of the model's loss.

        On the last stage one tensor `[b, s]` a micro-batch, whole sequences, 0 where ignored, or with
        `max_tokens_per_micro_batch` (see `MegatronModel.forward_backward`) one `[s]` a sample; elsewhere none, and the
        keywords `ref_logps` and `old_logps` of a call may be empty there. Collective: all ranks call it, with the
        inputs that `forward_backward` gets.
        """
        like = self._like()
        loss = _LogProbs(like.ignore_index, like.temperature, like.labelling.layout)
        evaluation = Evaluation(loss, [], self._engine.groups, self._engine.shard, {})
        plan = self._engine.plan(
            inputs, micro_batch_size, NO_EXTRAS, evaluation, training=False, max_tokens=max_tokens_per_micro_batch
        )
        if self._cache is None:
            return plan.as_given(self._computed(plan, evaluation), per_token=True)
        return plan.as_given(self._cached(inputs, micro_batch_size, loss, plan, evaluation), per_token=True)

    def _computed(self, plan: Plan, evaluation: Evaluation) -> list[Tensor]:
        with ExitStack() as stack:
            error: Exception | None = None
            try:
                within = self._within()
                if not hasattr(within, '__enter__'):
                    raise ValueError(f'adapter_off() must return a context manager, got {type(within).__name__}')
                stack.enter_context(within)
            except Exception as caught:  # raised on every rank
                error = caught
            raise_together(self._engine.groups, error)
            return self._engine.forward(plan, evaluation).results

    def _cached(
        self, inputs: Any, micro_batch_size: int | None, loss: _LogProbs, plan: Plan, evaluation: Evaluation
    ) -> list[Tensor]:
        groups, error = self._engine.groups, None
        batches: list[dict[str, Any]] = []
        files: list[Path] = []
        found: list[Tensor | None] = []
        try:
            batches = collated(inputs, micro_batch_size, evaluation.labelling, plan.packed).batches
            files = self._files(batches, loss)
            shapes = [item.shape for item in plan.items if not item.is_padding]
            found = [_read(file, shape) for file, shape in zip(files, shapes)]
        except Exception as caught:  # raised on every rank
            error = caught
        raise_together(groups, error)
        foreign = any(one is not None and file not in self._own for file, one in zip(files, found))
        flags = torch.tensor([float(any(one is None for one in found)), float(foreign)])
        lacking, foreigners = groups.gather_everyone(flags).sum(0).tolist()
        if not lacking:
            if foreigners and not self._checked:  # one micro-batch tells whose they are
                first = self._engine.plan(batches[:1], None, NO_EXTRAS, evaluation, training=False)
                self._compare(found, self._computed(first, evaluation))
                self._checked = True
            return [one.to(self._engine.runner.device) for one in found if one is not None]
        computed = self._computed(plan, evaluation)
        self._compare(found, computed)
        try:
            for file, one, logps in zip(files, found, computed):
                if one is None:
                    _write(file, logps)
        except Exception as caught:  # raised on every rank
            error = caught
        raise_together(groups, error)
        self._own.update(files)
        self._checked = self._checked or foreigners > 0
        return computed

    def _files(self, batches: list[dict[str, Any]], loss: _LogProbs) -> list[Path]:
        """Of each micro-batch, on the last stage."""
        assert self._cache is not None
        about = f'{loss.temperature!r} {loss.ignore_index}'
        mine = batches if self._engine.groups.is_last_stage else []
        return [self._cache / f'{_fingerprint(batch, about)}.pt' for batch in mine]

    def _compare(self, found: list[Tensor | None], computed: list[Tensor]) -> None:
        """ValueError, on every rank, unless what was found is what this reference computes, as far as it was asked."""
        dtype = next((p.dtype for model in self._engine.models for p in model.parameters()), torch.float32)
        apart, tokens = torch.zeros((), dtype=torch.float64), 0
        for one, logps in zip(found, computed):
            if one is not None:
                apart = apart + (one.to(logps) - logps).abs().sum().double().cpu()
                tokens += int((logps != 0).sum())
        total, count = self._engine.groups.gather_everyone(torch.tensor([float(apart), float(tokens)])).sum(0).tolist()
        allowed = NEAR.get(dtype, NEAR_COARSE)
        if not total <= allowed * max(count, 1):
            raise ValueError(
                f'cache must hold the log-probs of this reference, but those in {self._cache} are '
                f'{total / max(count, 1):.2g} nats a token from what it computes (up to {allowed:g} may be rounding): '
                'another policy wrote them. Delete the directory or name another one'
            )


class _LogProbs(SweepLoss):
    """Trains nothing: for log-probs alone."""

    def __init__(self, ignore_index: int, temperature: float, layout: str | None) -> None:
        super().__init__(ignore_index)
        self.temperature, self.layout = temperature, layout

    def contribution(self, batch: TokenBatch, stats: TokenStats, **extra: Any) -> Tensor:
        assert stats.log_prob is not None
        return stats.log_prob.new_zeros(())


READ = ('input_ids', 'labels', 'completion_mask', 'position_ids', 'attention_mask')


def _fingerprint(batch: Mapping[str, Any], about: str) -> str:
    """SHA-256 over what the model reads of a micro-batch."""
    digest, packing = hashlib.sha256(about.encode()), packing_of(batch)
    read = {key: batch.get(key) for key in READ} | ({} if packing is None else packing._asdict())
    for key, value in read.items():
        if isinstance(value, Tensor):
            array = value.detach().cpu().contiguous().reshape(-1)
            digest.update(f'{key} {array.dtype} {tuple(value.shape)} '.encode())
            digest.update(array.view(torch.uint8).numpy().tobytes() if array.numel() else b'')
    return digest.hexdigest()


def _why_no_cache(directory: Path) -> Exception | None:
    """The error if nothing can be kept there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return ValueError(f'cache must be a directory that can be written to, got {directory} ({error})')


def _read(file: Path, shape: tuple[int, int]) -> Tensor | None:
    if not file.exists():
        return None
    try:
        found = torch.load(file, weights_only=True)
        if tuple(found.shape) != shape:
            raise ValueError(f'it holds {tuple(found.shape)}, not {shape}')
    except Exception as error:
        raise ValueError(f'{file} cannot be read as cached log-probs ({error}): delete it') from error
    return found


def _write(file: Path, logps: Tensor) -> None:
    """Whole or not at all, whoever else writes it."""
    partial = file.with_name(f'{file.stem}.{uuid.uuid4().hex}.part')
    torch.save(logps.cpu(), partial)
    os.replace(partial, file)
