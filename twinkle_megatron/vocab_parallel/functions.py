"""Log-probs, entropy, cross entropy and argmax of vocabulary-sharded logits: thin faces of `token_stats`."""

from __future__ import annotations

from numbers import Real

from torch import Tensor

from .labels import check_given
from .linear_head import LinearHead
from .logits import Logits
from .shard import VocabShard
from .token_stats import TokenStats, token_stats


def log_probs(
    logits: Logits,
    target: Tensor,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    reuse_storage: bool = False,
) -> Tensor:
    """log softmax(logits / temperature)[target] of each token, `[...]`, nats; 0 where ignored.

    Arguments, dtypes, errors, collectives and memory are those of `token_stats`.
    """
    check_given(target)
    stats = token_stats(
        logits,
        target,
        shard=shard,
        temperature=temperature,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        reuse_storage=reuse_storage,
    )
    assert stats.log_prob is not None
    return stats.log_prob


def log_probs_and_entropy(
    logits: Logits,
    target: Tensor,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    reuse_storage: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of the target and entropy −Σ p log p of each token, both `[...]`, nats, from one sweep; 0 where ignored.

    Both are differentiable. Arguments, dtypes, errors, collectives and memory are those of `token_stats`.
    """
    check_given(target)
    stats = token_stats(
        logits,
        target,
        shard=shard,
        temperature=temperature,
        ignore_index=ignore_index,
        entropy=True,
        chunk_size=chunk_size,
        reuse_storage=reuse_storage,
    )
    assert stats.log_prob is not None
    assert stats.entropy is not None
    return stats.log_prob, stats.entropy


def cross_entropy(
    logits: Logits,
    target: Tensor,
    *,
    shard: VocabShard,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    temperature: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    reuse_storage: bool = False,
) -> Tensor:
    """Cross entropy of each token, `[...]`, nats; 0 with gradient exactly 0 where ignored.

    With y = logits / temperature over the V ids of the true vocabulary, ε = label_smoothing and z = log Σ exp(y):

        (1 − ε)·(z − y[target]) + ε·(z − mean(y)) + z_loss · z²

    Smoothing is that of torch.nn.functional.cross_entropy (Szegedy et al., arXiv 1512.00567) over the true vocabulary,
    not over a shard; the z-loss is that of PaLM (arXiv 2204.02311). Other arguments, dtypes, errors, collectives and
    memory are those of `token_stats`.
    """
    check_weights(label_smoothing, z_loss)
    check_given(target)
    stats = token_stats(
        logits,
        target,
        shard=shard,
        temperature=temperature,
        ignore_index=ignore_index,
        mean_logit=label_smoothing > 0,
        chunk_size=chunk_size,
        reuse_storage=reuse_storage,
    )
    assert stats.log_prob is not None
    return cross_entropy_of(-stats.log_prob, stats, label_smoothing, z_loss)


def cross_entropy_of(nll: Tensor, stats: TokenStats, label_smoothing: float, z_loss: float) -> Tensor:
    """`cross_entropy` from each token's negative log-likelihood and the statistics that a sweep has found."""
    loss = nll
    if label_smoothing > 0:
        assert stats.log_normalizer is not None
        assert stats.mean_logit is not None
        loss = (1 - label_smoothing) * loss + label_smoothing * (stats.log_normalizer - stats.mean_logit)
    if z_loss > 0:
        assert stats.log_normalizer is not None
        loss = loss + z_loss * stats.log_normalizer**2
    return loss


def check_weights(label_smoothing: float, z_loss: float) -> None:
    """ValueError unless 0 <= label_smoothing <= 1 and z_loss is finite and >= 0."""
    if not isinstance(label_smoothing, Real) or not 0 <= label_smoothing <= 1:
        raise ValueError(f'label_smoothing must be a number in [0, 1], got {label_smoothing!r}')
    if not isinstance(z_loss, Real) or not 0 <= z_loss < float('inf'):
        raise ValueError(f'z_loss must be a finite number >= 0, got {z_loss!r}')


def argmax(logits: Logits, *, shard: VocabShard, chunk_size: int | None = None) -> Tensor:
    """Global id of each token's largest logit, `[...]` int64; among equals the lowest id, on every layout.

    Padding never wins; a NaN does, as in torch.argmax. One all-gather of 2 numbers a token over TP. Not differentiable.
    """
    constant = logits.detach() if isinstance(logits, (Tensor, LinearHead)) else logits
    best = token_stats(constant, shard=shard, argmax=True, chunk_size=chunk_size).argmax
    assert best is not None
    return best
