"""Cross entropy over a vocabulary that is split over tensor parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import checked_arguments
from ..vocab_parallel import TokenStats
from ..vocab_parallel.functions import check_weights, cross_entropy_of
from .base import TokenLoss


class CrossEntropyLoss(TokenLoss):
    """Cross entropy of the next token, in nats.

    Per token, with y the logits over the V ids of the true vocabulary, z = log Σ exp(y), p = exp(y[label] − z) and
    ε = label_smoothing:

        (1 − ε)·w·(z − y[label]) + ε·(z − mean(y)) + z_loss · z²,   w = stop_gradient(p) with dft, else 1

    Args:
        ignore_index: label of tokens without loss. Their value is 0 and their gradient exactly 0.
        reduction: 'mean' (over trained tokens), 'sum' or 'none'; see `TokenLoss`.
        dft: dynamic fine-tuning, −sg(p)·log p (Wu et al., arXiv 2508.05629, eq. 9).
        label_smoothing: torch's formula, over the true vocabulary (arXiv 1512.00567).
        z_loss: weight of z² (arXiv 2204.02311).
        inplace_backward: opt-in; the gradient of the logits is written into their own storage.

    Shapes: logits `[..., V/tp]`, sharded over TP; labels and completion_mask `[...]`, replicated over TP. The loss is
    float32 (float64 for float64 logits), the gradient has the dtype of the logits. One all-gather over TP forward, none
    backward; kept for backward: the logits and a few numbers a token. ValueError for an unknown argument or reduction,
    for labels outside the vocabulary, and for logits that are not this rank's shard.
    """

    @checked_arguments
    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = 'mean',
        dft: bool = False,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        inplace_backward: bool = False,
        **unknown: Any,
    ) -> None:
        super().__init__(ignore_index, reduction)
        check_weights(label_smoothing, z_loss)
        self.dft = dft
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.inplace_backward = inplace_backward

    @property
    def needs(self) -> frozenset[str]:
        wanted = {'log_prob'}
        if self.label_smoothing > 0:
            wanted |= {'log_normalizer', 'mean_logit'}
        if self.z_loss > 0:
            wanted |= {'log_normalizer'}
        return frozenset(wanted)

    def token_losses(self, stats: TokenStats) -> Tensor:
        assert stats.log_prob is not None
        nll = -stats.log_prob
        if self.dft:
            p = stats.log_prob.detach().exp()
            nll = torch.where(p == 0, 0, p * nll)  # p log p is 0 in the limit
        return cross_entropy_of(nll, stats, self.label_smoothing, self.z_loss)


class ChunkedCrossEntropyLoss(CrossEntropyLoss):
    """`CrossEntropyLoss` that handles `chunk_size` vocabulary entries at once, to bound its working memory.

    `chunk_size` counts columns of this rank's shard and changes no value beyond rounding. No tensor of tokens ×
    vocabulary is made but the gradient itself, for any `chunk_size`. Other arguments are those of `CrossEntropyLoss`.
    """

    @checked_arguments
    def __init__(
        self,
        chunk_size: int = 1024,
        reduction: str = 'mean',
        ignore_index: int = -100,
        dft: bool = False,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        inplace_backward: bool = False,
        **unknown: Any,
    ) -> None:
        super().__init__(ignore_index, reduction, dft, label_smoothing, z_loss, inplace_backward)
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(f'chunk_size must be an int >= 1 (vocabulary entries handled at once), got {chunk_size!r}')
        self.chunk_size = chunk_size
