"""Twinkle's training losses and metrics on Megatron-Core's sharded logits."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import MegatronModel

__all__ = ['MegatronModel']
__version__ = '0.1.0'


def __getattr__(name: str) -> Any:
    if name == 'MegatronModel':
        from .model import MegatronModel

        return MegatronModel
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
