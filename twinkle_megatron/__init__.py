"""Twinkle's training losses and metrics on Megatron-Core's sharded logits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .megatron.embedding import EmbeddingHead, ScalarHead
    from .model import MegatronModel

__all__ = ['EmbeddingHead', 'MegatronModel', 'ScalarHead']
__version__ = '0.1.0'

_WHERE = {'EmbeddingHead': 'megatron.embedding', 'MegatronModel': 'model', 'ScalarHead': 'megatron.embedding'}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f'.{_WHERE[name]}', __name__), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
