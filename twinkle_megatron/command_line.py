"""What the commands of this package have in common. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from typing import Any

SIZES = {
    'tp': 'tensor',
    'pp': 'pipeline',
    'cp': 'context',
    'vpp': 'virtual pipeline',
    'ep': 'expert',
}
"""The parallel sizes of a layout, but for the data parallel one, which is what is left."""


class Parser(argparse.ArgumentParser):
    """Raises a ValueError for a wrong call in place of ending the program: which rank says it is for the command."""

    def error(self, message: str) -> Any:
        raise ValueError(message)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each of SIZES, 1 by default."""
    for name, what in SIZES.items():
        parser.add_argument(f'--{name}', type=int, default=1, metavar='N', help=f'{what} parallel size (1)')
