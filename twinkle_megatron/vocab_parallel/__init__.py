"""Exact operations on logits whose vocabulary is split over tensor parallel ranks. Plain torch and process groups."""

from .divergence import generalized_jsd, recut
from .functions import argmax, cross_entropy, log_probs, log_probs_and_entropy
from .linear_head import LinearHead
from .logits import Logits
from .shard import VocabShard
from .tail import log_probs_and_tail
from .token_stats import TokenStats, token_stats
from .topk import gather, topk

__all__ = [
    'LinearHead',
    'Logits',
    'TokenStats',
    'VocabShard',
    'argmax',
    'cross_entropy',
    'gather',
    'generalized_jsd',
    'log_probs',
    'log_probs_and_entropy',
    'log_probs_and_tail',
    'recut',
    'token_stats',
    'topk',
]
