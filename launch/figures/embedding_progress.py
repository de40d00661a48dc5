"""What a training of a sentence encoder shows and leaves behind."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import numpy as np

from launch.figures.intervals import INTERVAL, compared, head, row
from launch.figures.progress import Curve, Figures, Recorder, draw_panels

SHOWN = ('loss', 'pos_sim', 'pos_sim_min', 'pos_sim_max', 'neg_sim')


@dataclass(frozen=True)
class Similarities:
    """Of each of `n` anchors, all `[n]`: its cosine with its own positive, and the highest and the mean of those with
    the positives of all other groups; `nearest` is the number of the group whose positive has the highest of all."""

    own: np.ndarray
    best_other: np.ndarray
    mean_other: np.ndarray
    nearest: np.ndarray

    @classmethod
    def of(cls, anchors: np.ndarray, positives: np.ndarray) -> Similarities:
        """From embeddings of length 1, `[n, D]`."""
        cosines = anchors @ positives.T
        others = ~np.eye(len(cosines), dtype=bool)
        own, best = cosines.diagonal().copy(), np.where(others, cosines, -np.inf).max(1)
        return cls(own, best, np.where(others, cosines, 0).sum(1) / (len(cosines) - 1), cosines.argmax(1))

    @property
    def found(self) -> np.ndarray:
        """1 for each anchor that is nearest to its own positive, else 0. The mean is recall@1; a tie is no find."""
        return (self.own > self.best_other).astype(float)

    @property
    def figures(self) -> Figures:
        """Means over the anchors."""
        return {
            'recall@1': float(self.found.mean()),
            'pos_sim': float(self.own.mean()),
            'neg_sim': float(self.mean_other.mean()),
        }


class EmbeddingRecorder(Recorder):
    """Shows and writes the figures of a training of a sentence encoder."""

    def __init__(self, args: argparse.Namespace, *, active: bool) -> None:
        super().__init__(args, 'embedding.png', active=active)
        self._groups_file = args.run / 'held_out.jsonl'
        if active:
            self._groups_file.unlink(missing_ok=True)

    def train(self, step: int, values: dict[str, float]) -> None:
        """Shows the training figures since the last call, means over groups."""
        if not self._active:
            return
        known = {name: values[name] for name in SHOWN if name in values}
        figures = {'step': step, **known, **self._of_training(values)}
        self._keep(self._train, figures)
        self._say(
            f'{self._at(step)}  loss {values["loss"]:7.4f}  {_as_text(figures)}  grad norm '
            f'{figures["grad_norm"]:6.3f}  lr {values["lr"]:.1e}  {figures["tokens_per_second"]:,.0f} tokens/s'
        )

    def held_out(self, step: int, similarities: Similarities) -> None:
        """Shows the figures of the held-out groups; the time that they took does not count as training time."""
        if not self._active:
            return
        figures, chance = similarities.figures, 1 / len(similarities.own)
        line = {'step': step, **{f'held_out_{name}': x for name, x in figures.items()}, 'chance': chance}
        self._keep(self._held_out, line)
        self._say(f'{self._at(step)}  held out       {_as_text(figures)}  recall@1 {figures["recall@1"]:6.1%}')

    def finish(self, before: Similarities, after: Similarities) -> None:
        """Draws the picture and says what came out, and where it lies, from the held-out groups before and after."""
        if not self._active:
            return
        self._write_groups(before, after)
        draw_panels(self._picture_file, self._panels())
        lines = {
            'recall@1': (before.found, after.found),
            'cosine with its own positive': (before.own, after.own),
            'highest cosine with another': (before.best_other, after.best_other),
            'mean cosine with the others': (before.mean_other, after.mean_other),
        }
        table = '\n'.join(row(name, compared(*values), 34) for name, values in lines.items())
        count = len(before.own)
        self._end(
            f'\nof {count:,} held-out groups: mean ± {INTERVAL} standard errors; a guess has a recall@1 of '
            f'1/{count:,} = {1 / count:.3f}\n\n{head(34)}\n{table}\n\ngroups         {self._groups_file}'
        )

    def _write_groups(self, before: Similarities, after: Similarities) -> None:
        of = {'before': before, 'after': after}
        columns = {
            f'{name}_{when}': values.tolist() for when, which in of.items() for name, values in vars(which).items()
        }
        lines = [dict(zip(columns, values)) for values in zip(*columns.values())]
        self._groups_file.write_text(''.join(json.dumps(line) + '\n' for line in lines))

    def _panels(self) -> dict[str, list[Curve]]:
        sides = [('positives', 'tab:green', 'pos_sim'), ('positives of other groups', 'tab:red', 'neg_sim')]
        train: list[Curve] = [(f'train, {label}', color, self._train, key) for label, color, key in sides]
        light = {'tab:green': 'yellowgreen', 'tab:red': 'lightcoral'}
        held_out: list[Curve] = [
            (f'held out, {label}', light[color], self._held_out, f'held_out_{key}') for label, color, key in sides
        ]
        return {
            'recall@1 (share of anchors nearest to their own positive)': [
                ('held out', 'tab:orange', self._held_out, 'held_out_recall@1'),
                ('a guess', 'gray', self._held_out, 'chance'),
            ],
            'cosine of anchors with': train + held_out,
            'loss (nats per anchor)': [('train', 'tab:blue', self._train, 'loss')],
        }


def _as_text(of: Figures) -> str:
    negatives = f'  neg_sim {of["neg_sim"]:6.3f}' if 'neg_sim' in of else ''
    return f'pos_sim {of["pos_sim"]:6.3f}{negatives}'
