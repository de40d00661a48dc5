"""What the last stage found on one micro-batch, for the loss and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from .batch import PER_SEQUENCE, PER_TOKEN_NUMBER
from .data_format import ModelOutput
from .groups import Groups
from .vocab_parallel import LinearHead, Logits, TokenStats, VocabShard


class Seen(NamedTuple):
    """Logits `[b, s, V/tp]` and the statistics `[b, s]` of one sweep over them."""

    logits: Logits
    shard: VocabShard
    stats: TokenStats

    @property
    def name(self) -> str:
        """The key of `source` in `outputs`."""
        return 'logits'

    @property
    def source(self) -> Logits:
        """What a custom loss starts from."""
        return self.logits

    @property
    def end(self) -> Logits:
        """What zeros are sent back to where a loss has failed: past a loss that may have spoilt the logits which the
        sweep saved, but into the sweep over a linear head, whose backward pass is collective."""
        return self.log_prob if isinstance(self.logits, LinearHead) else self.logits

    @property
    def result(self) -> Tensor:
        """What is kept of it: log-probs of the labels."""
        return self.log_prob.detach()

    @property
    def log_prob(self) -> Tensor:
        assert self.stats.log_prob is not None
        return self.stats.log_prob

    def outputs(self) -> ModelOutput:
        """As losses and metrics get it, but for the logits."""
        outputs = ModelOutput(token_stats=self.stats, logps=self.log_prob, vocab_shard=self.shard)
        if self.stats.entropy is not None:
            outputs['entropies'] = self.stats.entropy
        return outputs

    def kept(self) -> Seen:
        """Without a history, and without logits: what a loss of statistics can be computed from later."""
        return self._replace(logits=self.log_prob.detach()[..., :0], stats=self.stats.detach())

    def first_rows(self, rows: int) -> Seen:
        """Without the others."""
        return self._replace(logits=self.logits.narrow(0, 0, rows), stats=self.stats.first_rows(rows))


class Pooled(NamedTuple):
    """What a head gave in place of logits: `embeddings` `[n, D]`, or `values` `[n]` or, per token, `[b, s]`."""

    name: str
    found: Tensor
    per_token: bool

    @property
    def source(self) -> Tensor:
        """What a custom loss starts from."""
        return self.found

    @property
    def end(self) -> Tensor:
        """What zeros are sent back to where a loss has failed: into the pooling, whose backward pass is collective."""
        return self.found

    @property
    def result(self) -> Tensor:
        """What is kept of it."""
        return self.found.detach()

    def outputs(self) -> ModelOutput:
        """As losses and metrics get it."""
        return cast(ModelOutput, {self.name: self.found})

    def kept(self) -> Pooled:
        """Without a history."""
        return self._replace(found=self.found.detach())

    def first_rows(self, rows: int) -> Pooled:
        """Without the others."""
        return self._replace(found=self.found[:rows]) if self.per_token else self


class PooledHead:
    """What is made of the hidden states of the last stage in place of logits."""

    gives: ClassVar[str]
    """The key in `outputs`: 'embeddings' or 'values'."""

    pooling: str | None

    @property
    def labels(self) -> str:
        """What the labels of a call are."""
        return PER_TOKEN_NUMBER if self.pooling is None else PER_SEQUENCE

    def read(self, model: Any, logits: Logits, batch: dict[str, Any], groups: Groups) -> Pooled:
        """From the logits that the output layer of the unwrapped chunk `model` did not build; `batch` is this rank's
        slice of a micro-batch, with the weights of its tokens where they are pooled."""
        raise NotImplementedError

    def check_targets(self, targets: Tensor) -> None:
        """ValueError for labels of a micro-batch that cannot belong to what it gives."""

    def why_not(self, model: Any) -> str | None:
        """What keeps this unwrapped last-stage chunk from having such a head; None if it can."""
        raise NotImplementedError


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *tensors: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in tensors]
        return torch.zeros(shape, dtype=torch.float32, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like))


def nothing(x: Logits, shape: tuple[int, ...] = ()) -> Tensor:
    """Zeros that send exact zeros back to `x`, whatever it holds: keeps a pipeline going without training anything."""
    return _Nothing.apply(shape, *(x.tensors if isinstance(x, LinearHead) else (x,)))


def nothing_for(tensors: Sequence[Tensor]) -> Tensor:
    """Zero, which sends exact zeros back to these tensors."""
    return _Nothing.apply((), *tensors)
