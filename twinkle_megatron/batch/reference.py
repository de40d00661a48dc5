"""The keywords by which a reference policy is given to a loss or a metric of pairs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .extras import LOG_PROBS, OUTPUTS, PER_PAIR

REFERENCE: Mapping[str, str] = {
    'ref_outputs': OUTPUTS,
    'ref_logps': LOG_PROBS,
    'ref_chosen_logps': PER_PAIR,
    'ref_rejected_logps': PER_PAIR,
}


def check_reference(given: Collection[str]) -> bool:
    """Whether there is a reference among the keywords. ValueError for half a one, or two."""
    pair = [key for key in ('ref_chosen_logps', 'ref_rejected_logps') if key in given]
    if len(pair) == 1:
        raise ValueError(f'ref_chosen_logps and ref_rejected_logps must be given together, got {pair[0]} only')
    ways = [key for key in ('ref_logps', 'ref_outputs', 'ref_chosen_logps') if key in given]
    if len(ways) > 1:
        raise ValueError(f'the reference must be given in one way, got {" and ".join(ways)}')
    return bool(ways)
