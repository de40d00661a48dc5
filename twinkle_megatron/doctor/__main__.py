"""The command `python -m twinkle_megatron.doctor`."""

from __future__ import annotations

from .command import listen, main
from .report import leave

if __name__ == '__main__':
    listen()
    leave(main())
