"""How many rows a vocabulary is padded to. Imports nothing that takes time."""

from __future__ import annotations


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """An equal share for each of `tp` ranks, of a multiple of 128 ids, which GPUs multiply quickly."""
    multiple = 128 * tp
    return -(-vocab_size // multiple) * multiple
