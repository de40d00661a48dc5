"""Takes the logits off the last pipeline stage, or what they are made of, before Megatron computes its own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from ..vocab_parallel import Logits
from .compatibility import why_not_plain
from .lazy_logits import LazyLogits

OnLogits = Callable[[Logits, Tensor], Tensor]
"""(logits `[b, s, V/tp]`, labels `[b, s]`) -> per-token cross entropy `[b, s]`."""
TakeHead = Callable[[Any, OnLogits], AbstractContextManager[None]]
"""Hooks a last-stage chunk while the context is open: `logits_taken`, or `head_taken`."""


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

    def compute_language_model_loss(labels: Tensor, logits: Any) -> Tensor:
        return on_logits(logits.transpose(0, 1), labels)  # Megatron's are [s, b, V/tp]

    check_no_hook([model])
    model.compute_language_model_loss = compute_language_model_loss
    try:
        yield
    finally:
        del model.compute_language_model_loss


@contextmanager
def head_taken(model: Any, on_logits: OnLogits, max_workspace_mb: float | None = None) -> Iterator[None]:
    """`logits_taken` before the logits are made: `on_logits` gets a `LazyLogits`, in which they are still a product.

    The output layer is called as ever, so the hooks of modules run (Megatron's DDP gathers the weight in one, under
    `overlap_param_gather`); its `forward` is replaced on the instance, and removed again. A model that is asked for
    logits (no labels, inference) gets them.
    """
    layer = model.output_layer

    def forward(
        input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[LazyLogits, None]:
        return LazyLogits(layer, input_, weight, runtime_gather_output, max_workspace_mb), None

    with logits_taken(model, on_logits):
        layer.forward = forward
        try:
            yield
        finally:
            del layer.forward


def why_no_linear_head(model: Any, config: Any) -> str | None:
    """What keeps the head of this unwrapped last-stage chunk from being taken; None if it can be."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    layer = getattr(model, 'output_layer', None)
    if not has_loss_hook(model) or layer is None:
        return f'the last stage, {type(model).__name__}, has no output_layer like that of GPTModel'
    if not isinstance(layer, ColumnParallelLinear):
        return (
            f"the output layer is {type(layer).__name__}, not Megatron's ColumnParallelLinear, and may do more to the "
            'logits, as an adapter (LoRA) does, or multiply in FP8 (config.fp8_output_proj)'
        )
    for name in ('forward', '_forward_impl'):
        if name in vars(layer) or getattr(type(layer), name) is not getattr(ColumnParallelLinear, name):
            return f'the output layer, {type(layer).__name__}, has a {name} of its own, which may do more to the logits'
    if layer._backward_hooks or layer._backward_pre_hooks:
        return 'the output layer has hooks on its backward pass, which would not be run'
    if getattr(config, 'defer_embedding_wgrad_compute', False):
        return 'config.defer_embedding_wgrad_compute collects the gradients of the logits, which never exist'
    if layer.skip_bias_add and layer.bias is not None:
        return 'the output layer leaves its bias to its caller (skip_bias_add)'
    if layer.explicit_expert_comm or layer.disable_grad_reduce or getattr(layer, 'gtp_remat_size', 1) > 1:
        return 'the output layer does not sum the gradient of its input over the tensor parallel group'
    tied = getattr(model, 'share_embeddings_and_output_weights', False)
    return why_not_plain(model.shared_embedding_or_output_weight() if tied else layer.weight)
