"""The command `python -m twinkle_megatron.doctor`."""

from __future__ import annotations

from ..leaving import leave
from .command import listen, main

if __name__ == '__main__':
    listen()
    leave(main())
