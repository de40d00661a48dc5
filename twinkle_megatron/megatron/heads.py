"""Takes the logits off the last pipeline stage, before Megatron computes its own cross entropy on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

OnLogits = Callable[[Tensor, Tensor], Tensor]
"""(logits `[b, s, V/tp]`, labels `[b, s]`) -> per-token cross entropy `[b, s]`."""


def has_loss_hook(model: Any) -> bool:
    """Whether this unwrapped chunk computes its own loss from labels, as GPTModel does on the last stage."""
    return callable(getattr(model, 'compute_language_model_loss', None)) and bool(getattr(model, 'post_process', True))


def check_no_hook(models: Iterable[Any]) -> None:
    """ValueError for a chunk whose head is hooked already."""
    if any('compute_language_model_loss' in vars(model) for model in models):
        raise ValueError(
            'the model already has a compute_language_model_loss of its own set on the instance; remove it first'
        )


@contextmanager
def logits_taken(model: Any, on_logits: OnLogits) -> Iterator[None]:
    """While open, the chunk hands its logits to `on_logits` instead of Megatron's cross entropy.

    Megatron calls the hook for each multi-token-prediction layer first and for the main head last, and trains the
    former on what it returns, so it must return plain cross entropy. The attribute is set on the instance and removed
    again.
    """

    def compute_language_model_loss(labels: Tensor, logits: Tensor) -> Tensor:
        return on_logits(logits.transpose(0, 1), labels)  # Megatron's are [s, b, V/tp]

    check_no_hook([model])
    model.compute_language_model_loss = compute_language_model_loss
    try:
        yield
    finally:
        del model.compute_language_model_loss
