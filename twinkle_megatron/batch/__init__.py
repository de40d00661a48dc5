"""Micro-batches: their rows, their sequences, and the tokens that a loss is taken over.

Plain tensors on explicit sizes and groups; nothing here knows Megatron.
"""

from .checks import check_micro_batch, explain_fault, value_faults
from .context import context_positions, join_context, split_context, zigzag
from .extras import CONSTANT, PER_TOKEN, WholeRows, align_extras, split_extra
from .micro_batches import as_micro_batches, describe, pad_micro_batch
from .sequences import Packing, packing_of, sequence_ids, shift_labels, spread_out
from .tokens import Counts, TokenBatch, trained_labels

__all__ = [
    'CONSTANT',
    'PER_TOKEN',
    'Counts',
    'Packing',
    'TokenBatch',
    'WholeRows',
    'align_extras',
    'as_micro_batches',
    'check_micro_batch',
    'context_positions',
    'describe',
    'explain_fault',
    'join_context',
    'packing_of',
    'pad_micro_batch',
    'sequence_ids',
    'shift_labels',
    'split_context',
    'split_extra',
    'spread_out',
    'trained_labels',
    'value_faults',
    'zigzag',
]
