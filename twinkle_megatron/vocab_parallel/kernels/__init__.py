"""Kernels on one tile of logits, with one signature: `row_stats` and `row_grad`.

`select` chooses among them: eager torch everywhere, the same arithmetic through `torch.compile` where it pays.
"""

from .select import Kernels, select

__all__ = ['Kernels', 'select']
