"""What each loss trains on, and the options and defaults that go with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """Losses that train on the same kind of data.

    `policy` says what `--init-weights` must be, where there must be some. Without `--steps` and `--epochs` there are
    `steps`, or `epochs`. `lines` is what lines of the data are called, where they are not called like it.
    """

    data: str
    losses: tuple[str, ...]
    policy: str | None
    lr: float
    steps: int | None = None
    epochs: int | None = None
    lines: str | None = None

    @property
    def page(self) -> str:
        """Where it is told what the data must hold."""
        return f'docs/{self.data}.md'


TEXT = Kind('text', ('cross-entropy',), None, lr=2e-3, steps=250)
ROLLOUTS = Kind(
    'rollouts',
    ('grpo', 'gspo', 'sapo', 'cispo', 'bnpo', 'dr-grpo'),
    'the policy that sampled the rollouts',
    lr=5e-4,
    epochs=2,
)
PAIRS = Kind(
    'pairs', ('dpo', 'simpo', 'cpo', 'orpo'), 'the policy to start from, which is the reference', lr=2e-4, epochs=1
)
DISTILLATION = Kind('distillation', ('gkd',), None, lr=2e-3, steps=250)
"""On text beside a teacher, or on a file of a teacher's best tokens."""
EMBEDDINGS = Kind(
    'embeddings', ('infonce',), 'the language model that becomes an encoder', lr=1e-3, epochs=2, lines='groups of texts'
)
KINDS = (TEXT, ROLLOUTS, PAIRS, DISTILLATION, EMBEDDINGS)
LOSSES = {loss: kind for kind in KINDS for loss in kind.losses}

_OF_ROLLOUTS = {
    'clip_range': 0.2,
    'clip_range_high': None,
    'beta': 0.0,
    'entropy_coef': 0.0,
    'advantages': 'group',
    'packed': False,
}
_OF_PAIRS = {'held_out': None, 'reference_cache': None, 'packed': False, 'eval_every': 20}
OPTIONS: dict[str, dict[str, Any]] = {
    'cross-entropy': {'vocab_size': 8000, 'eval_every': 50, 'teacher_weights': None, 'beta': 0.5},
    **dict.fromkeys(ROLLOUTS.losses, _OF_ROLLOUTS),
    'dpo': {'beta': 0.1, 'loss_type': 'sigmoid', 'sft_weight': 0.0, 'label_smoothing': 0.0, **_OF_PAIRS},
    'simpo': {'beta': 2.5, 'gamma': 0.5, **_OF_PAIRS},
    'cpo': {'beta': 0.1, 'cpo_alpha': 1.0, **_OF_PAIRS},
    'orpo': {'beta': 0.1, **_OF_PAIRS},
    'gkd': {
        'beta': 0.5,
        'temperature': 1.0,
        'topk': None,
        'topk_tail': 'renormalize',
        'teacher_weights': None,
        'tokenizer': None,
        'eval_every': 50,
    },
    'infonce': {
        'temperature': 0.05,
        'pooling': 'last',
        'hard_negatives': None,
        'held_out': None,
        'packed': False,
        'eval_every': 20,
    },
}
"""Of each loss the options that not every loss has, with their defaults."""


def losses_with(option: str) -> list[str]:
    """The losses that have this option."""
    return [loss for loss, options in OPTIONS.items() if option in options]
