"""What a training shows and leaves behind: a progress bar, lines of figures, JSON lines, a picture."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from launch.figures.boards import Boards
from launch.whole_file import whole_file

Figures = dict[str, Any]


class Clock:
    """Seconds since it was last started, which go on with the run."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._since

    def state_dict(self) -> dict[str, Any]:
        return {'seconds': self.seconds}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self._since = time.perf_counter() - kept['seconds']


class Recorder:
    """What recorders of any training do. On processes that are not `active` every method does nothing.

    Args:
        args: the options; the run's folder is `args.run`, emptied of the figures of an earlier run, or of those behind
            the step `args.start`, after which this one goes on.
        picture: name of the picture that is drawn at the end.
        active: one process of the run, usually rank 0.

    `clock` measures the speed since the last figures; it has a state to be kept in checkpoints.
    """

    def __init__(self, args: argparse.Namespace, picture: str, *, active: bool) -> None:
        self._active = active
        self._train: list[Figures] = []
        self._held_out: list[Figures] = []
        self._start = args.start
        self._digits = len(str(args.steps))
        self._figures_file, self._picture_file = args.run / 'metrics.jsonl', args.run / picture
        self._weights_file = getattr(args, 'save_model', None) or args.save_weights
        if active:
            args.run.mkdir(parents=True, exist_ok=True)
            there = self._start and self._figures_file.is_file()
            self._go_on_with(self._figures_file.read_text(errors='replace').splitlines() if there else [])
            self._picture_file.unlink(missing_ok=True)
            quiet = not sys.stderr.isatty()
            self._bar = tqdm(
                total=args.steps,
                initial=self._start,
                desc='training',
                unit='step',
                disable=quiet,
                leave=False,
                dynamic_ncols=True,
            )
            self._boards = Boards(args.run, self._start, vars(args))
        self.clock = Clock()

    def _go_on_with(self, lines: list[str]) -> None:
        """Takes up the figures of an earlier part of the run; a line may have been cut by its end."""
        known = []
        for line in lines:
            with contextlib.suppress(ValueError):
                known.append(read_figures(line))
        known = [figures for figures in known if figures['step'] <= self._start]
        with whole_file(self._figures_file) as file:
            file.writelines(json.dumps(figures) + '\n' for figures in known)
        for figures in known:
            of_held_out = any(name.startswith('held_out') for name in figures)
            (self._held_out if of_held_out else self._train).append(figures)

    def step(self) -> None:
        """Moves the progress bar on."""
        if self._active:
            self._bar.update()

    def _of_training(self, values: dict[str, float]) -> Figures:
        """What is the same for every training, over what came since the last call."""
        speed = values['total_tokens'] / self.clock.seconds
        return {
            'grad_norm': values.get('grad_norm', 0.0),
            'learning_rate': values['lr'],
            'tokens': int(values['total_tokens']),
            'tokens_per_second': speed,
            'seconds': values['elapsed_seconds'],
        }

    def _at(self, step: int) -> str:
        return f'step {step:{self._digits}}'

    def _say(self, line: str) -> None:
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def _keep(self, history: list[Figures], figures: Figures) -> None:
        self.clock.start()
        if any(figures['step'] == kept['step'] for kept in history):
            return  # it is there, from an earlier part of the run
        history.append(figures)
        with self._figures_file.open('a', encoding='utf-8') as file:
            file.write(json.dumps(figures) + '\n')
        self._boards.write(figures)

    def _end(self, result: str) -> None:
        self._bar.close()
        self._boards.close()
        lines = [result, f'picture        {self._picture_file}', f'figures        {self._figures_file}']
        if self._weights_file is not None:
            lines.append(f'weights        {self._weights_file}')
        print('\n'.join(lines), flush=True)


def read_figures(line: str) -> Figures:
    """Those of a line of metrics.jsonl. ValueError where it has none, of which JSONDecodeError is one."""
    figures = json.loads(line)
    if not isinstance(figures, dict) or 'step' not in figures:
        raise ValueError(f'must be an object of figures with a "step", got {line[:40]}')
    return figures


class TextRecorder(Recorder):
    """Shows and writes the figures of a training on text. `unigram_nats`: a loss to compare with, that of a model that
    knows only token frequencies."""

    def __init__(self, args: argparse.Namespace, unigram_nats: float, *, active: bool) -> None:
        super().__init__(args, 'loss.png', active=active)
        self._unigram_nats = unigram_nats

    def train(self, step: int, values: dict[str, float]) -> None:
        """Shows the training figures since the last call."""
        if not self._active:
            return
        figures = {'step': step, 'train_loss_nats': values['loss'], 'token_accuracy': values['accuracy']}
        figures |= self._of_training(values)
        self._keep(self._train, figures)
        self._say(
            f'{self._at(step)}  loss {values["loss"]:6.3f}  accuracy {values["accuracy"]:5.1%}  '
            f'grad norm {figures["grad_norm"]:6.3f}  lr {values["lr"]:.2e}  '
            f'{figures["tokens_per_second"]:,.0f} tokens/s'
        )

    def held_out(self, step: int, values: dict[str, float]) -> None:
        """Shows a held-out loss; the time that it took does not count as training time."""
        if not self._active:
            return
        figures = {'step': step, 'held_out_loss_nats': values['loss'], 'held_out_token_accuracy': values['accuracy']}
        self._keep(self._held_out, figures)
        self._say(
            f'{self._at(step)}  held-out loss {values["loss"]:.3f} nats per token, accuracy {values["accuracy"]:.1%}'
        )

    def finish(self) -> None:
        """Draws the loss curve and says what came out, and where it lies."""
        if not self._active:
            return
        draw(self._picture_file, self._train, self._held_out, self._unigram_nats)
        before, after = (self._held_out[i]['held_out_loss_nats'] for i in (0, -1))
        self._end(
            f'held-out loss  {before:.3f} nats per token before, {after:.3f} after; token frequencies alone would give '
            f'{self._unigram_nats:.3f}'
        )


Curve = tuple[str, str, list[Figures], str]
"""Label, colour, lines of figures, and the key in these."""


def draw_panels(
    path: Path, panels: dict[str, list[Curve]], title: str | None = None, *, from_zero: bool = True
) -> None:
    """Curves over the steps as a picture: below each other those of each title, without what has no figures.

    `title`: by default the name of the run. `from_zero`: whether axes of numbers above 0 begin there.
    """
    from matplotlib.figure import Figure  # slow to import, and only one process draws

    figure = Figure(figsize=(7.5, 8), layout='constrained')
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (what, curves) in zip(all_axes, panels.items()):
        lowest = 0.0
        for label, color, lines, key in curves:
            known = [line for line in lines if key in line]
            if known:
                steps, values = ([line[name] for line in known] for name in ('step', key))
                axes.plot(steps, values, color=color, marker='.', label=label)
                lowest = min(lowest, *values)
        if from_zero and lowest == 0:
            axes.set_ylim(bottom=0)
        axes.set_title(what, fontsize='medium', loc='left')
        axes.grid(alpha=0.3)
        if any(label for label, *_ in curves):
            axes.legend()
    all_axes[-1].set_xlabel('optimizer step')
    figure.suptitle(path.parent.name if title is None else title)
    figure.savefig(path, dpi=150)


def draw(path: Path, train: list[Figures], held_out: list[Figures], unigram_nats: float) -> None:
    """The loss curve as a picture."""
    from matplotlib.figure import Figure  # slow to import, and only one process draws

    figure = Figure(figsize=(7.5, 4.5), layout='constrained')
    axes = figure.add_subplot()
    axes.plot([f['step'] for f in train], [f['train_loss_nats'] for f in train], color='tab:blue', label='train')
    steps, losses = [f['step'] for f in held_out], [f['held_out_loss_nats'] for f in held_out]
    axes.plot(steps, losses, color='tab:orange', marker='o', label=f'held-out, {losses[-1]:.2f} at the end')
    axes.axhline(unigram_nats, color='gray', linestyle='--', label=f'token frequencies alone, {unigram_nats:.2f}')
    axes.set(xlabel='optimizer step', ylabel='loss (nats per token)', title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
