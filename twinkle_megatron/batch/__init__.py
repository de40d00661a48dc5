"""Micro-batches: their rows, their sequences, and the tokens that a loss is taken over.

Plain tensors on explicit sizes and groups; nothing here knows Megatron.
"""

from .budget import Packed, in_input_order, pack
from .checks import check_mask, check_micro_batch, explain_fault, value_faults
from .context import context_positions, join_context, split_context, zigzag
from .extras import (
    CONSTANT,
    HEADS,
    LOG_PROBS,
    OUTPUTS,
    PER_PAIR,
    PER_TOKEN,
    VECTORS,
    align_extras,
    split_by_pair,
    split_extra,
)
from .micro_batches import as_micro_batches, describe, pad_micro_batch
from .pair_layout import check_layout, check_pairs, counted_pairs, pair_counts, split_pairs
from .pairs import Pairs, collated
from .sequences import Packing, packing_of, sequence_ids, shift_labels, spread_out
from .targets import PER_SEQUENCE, PER_TOKEN_NUMBER, POOLINGS, TOKEN_IDS, Labelling, targets_of, without_labels
from .tokens import Counts, TokenBatch, trained_labels
from .whole_rows import WholeRows

__all__ = [
    'CONSTANT',
    'HEADS',
    'LOG_PROBS',
    'OUTPUTS',
    'PER_PAIR',
    'PER_SEQUENCE',
    'PER_TOKEN',
    'PER_TOKEN_NUMBER',
    'POOLINGS',
    'TOKEN_IDS',
    'VECTORS',
    'Counts',
    'Labelling',
    'Packed',
    'Packing',
    'Pairs',
    'TokenBatch',
    'WholeRows',
    'align_extras',
    'as_micro_batches',
    'check_layout',
    'check_mask',
    'check_micro_batch',
    'check_pairs',
    'collated',
    'context_positions',
    'counted_pairs',
    'describe',
    'explain_fault',
    'in_input_order',
    'join_context',
    'pack',
    'packing_of',
    'pad_micro_batch',
    'pair_counts',
    'sequence_ids',
    'shift_labels',
    'split_by_pair',
    'split_context',
    'split_extra',
    'split_pairs',
    'spread_out',
    'targets_of',
    'trained_labels',
    'value_faults',
    'without_labels',
    'zigzag',
]
