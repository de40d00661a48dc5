"""What a training on pairs shows and leaves behind."""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple

import numpy as np

from launch.figures.intervals import INTERVAL, Interval, compared, head, row
from launch.figures.progress import Curve, Figures, Recorder, draw_panels

SHOWN = ('loss', 'margin', 'accuracy', 'chosen_logps', 'rejected_logps', 'rewards/chosen', 'rewards/rejected')


class Line(NamedTuple):
    """A line of the table: its name, intervals before, after and of the difference, and their decimals."""

    name: str
    of: dict[str, Interval]
    digits: int


class PreferenceRecorder(Recorder):
    """Shows and writes the figures of a training on pairs. `beta` is that of the rewards."""

    def __init__(self, args: argparse.Namespace, beta: float, *, active: bool) -> None:
        super().__init__(args, 'preference.png', active=active)
        self._pairs_file, self._beta = args.run / 'held_out.jsonl', beta
        if active:
            self._pairs_file.unlink(missing_ok=True)

    def start(self, before: np.ndarray) -> None:
        """Shows the held-out pairs before the first step, from the log-probs of their responses `[pairs, 2]`: there the
        policy is the reference, and no pair has a margin."""
        if self._active:
            chosen, rejected = before.mean(0).tolist()
            start = {'chosen_logps': chosen, 'rejected_logps': rejected, 'margin': 0.0, 'accuracy': 0.0}
            self.held_out(0, start)

    def train(self, step: int, values: dict[str, float]) -> None:
        """Shows the training figures since the last call, means over pairs."""
        if not self._active:
            return
        figures = {'step': step, **_known(values), **self._of_training(values)}
        self._keep(self._train, figures)
        self._say(
            f'{self._at(step)}  loss {values["loss"]:7.4f}  {_as_text(figures)}  grad norm '
            f'{figures["grad_norm"]:6.3f}  lr {values["lr"]:.1e}  {figures["tokens_per_second"]:,.0f} tokens/s'
        )

    def held_out(self, step: int, values: dict[str, float]) -> None:
        """Shows the figures of the held-out pairs; the time that they took does not count as training time."""
        if not self._active:
            return
        known = _known(values)
        self._keep(self._held_out, {'step': step, **{f'held_out_{name}': x for name, x in known.items()}})
        self._say(f'{self._at(step)}  held out        {_as_text(known)}')

    def finish(self, before: np.ndarray, after: np.ndarray) -> None:
        """Draws the picture and says what came out, and where it lies.

        `before` and `after` are the log-probs of the chosen and the rejected response of each held-out pair, nats,
        `[pairs, 2]`, of the policy of the start and of the end.
        """
        if not self._active:
            return
        self._write_pairs(before, after)
        draw_panels(self._picture_file, self._panels())
        table = '\n'.join(
            row(line.name, line.of, 34, line.digits) for line in held_out_table(before, after, self._beta)
        )
        self._end(
            f'\nof {len(before):,} held-out pairs: mean ± {INTERVAL} standard errors\n\n{head(34)}\n{table}\n\n'
            f'pairs          {self._pairs_file}'
        )

    def _write_pairs(self, before: np.ndarray, after: np.ndarray) -> None:
        names = ('ref_chosen_logp', 'ref_rejected_logp', 'chosen_logp', 'rejected_logp')
        lines = [dict(zip(names, pair)) for pair in np.concatenate([before, after], 1).tolist()]
        self._pairs_file.write_text(''.join(json.dumps(line) + '\n' for line in lines))

    def _panels(self) -> dict[str, list[Curve]]:
        def curves(key: str) -> list[Curve]:
            return [
                ('train', 'tab:blue', self._train, key),
                ('held out', 'tab:orange', self._held_out, f'held_out_{key}'),
            ]

        sides = [('chosen', 'tab:green'), ('rejected', 'tab:red')]
        return {
            'margin over the reference (reward of chosen − of rejected)': curves('margin'),
            'accuracy (share of pairs with a margin above 0)': curves('accuracy'),
            'log-prob of a held-out response (nats)': [
                (side, color, self._held_out, f'held_out_{side}_logps') for side, color in sides
            ],
        }


def held_out_table(before: np.ndarray, after: np.ndarray, beta: float) -> list[Line]:
    """From log-probs `[pairs, 2]` of chosen and rejected responses, nats."""
    gap = [x[:, 0] - x[:, 1] for x in (before, after)]
    margin = beta * (gap[1] - gap[0])
    nothing = np.zeros(len(before))
    return [
        Line('margin over the policy of before', compared(nothing, margin), 3),
        Line('accuracy: share above 0', compared(nothing, (margin > 0).astype(float)), 3),
        Line('chosen is more likely: share', compared(*((x > 0).astype(float) for x in gap)), 3),
        Line('log-prob of chosen, nats', compared(before[:, 0], after[:, 0]), 2),
        Line('log-prob of rejected, nats', compared(before[:, 1], after[:, 1]), 2),
    ]


def _known(values: dict[str, float]) -> Figures:
    return {name: values[name] for name in SHOWN if name in values}


def _as_text(of: Figures) -> str:
    measured = f'margin {of["margin"]:7.3f}  accuracy {of["accuracy"]:6.1%}  ' if 'margin' in of else ''
    return f'{measured}log-prob {of["chosen_logps"]:.2f} of chosen, {of["rejected_logps"]:.2f} of rejected'
