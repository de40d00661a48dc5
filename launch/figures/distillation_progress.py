"""What a training beside a teacher shows and leaves behind."""

from __future__ import annotations

import argparse

from launch.figures.progress import Curve, Figures, Recorder, draw_panels


class DistillationRecorder(Recorder):
    """Shows and writes the figures of a training beside a teacher.

    `teacher_loss` is the cross entropy of the teacher on the held-out samples, nats per token; None: not known. Unless
    the loss is gkd, training figures have no divergence.
    """

    def __init__(self, args: argparse.Namespace, teacher_loss: float | None, *, active: bool) -> None:
        super().__init__(args, 'distillation.png', active=active)
        self._teacher_loss, self._learns = teacher_loss, args.loss == 'gkd'
        if active and teacher_loss is not None:
            self._say(f'teacher  held-out loss {teacher_loss:.3f} nats per token')

    def train(self, step: int, values: dict[str, float]) -> None:
        """Shows the training figures since the last call, means over tokens."""
        if not self._active:
            return
        figures: Figures = {'step': step, 'train_loss_nats': values['cross_entropy']}
        figures |= {'token_accuracy': values['accuracy'], **self._of_training(values)}
        if self._learns:
            figures['divergence_nats'] = values['loss']
        self._keep(self._train, figures)
        divergence = f'divergence {values["loss"]:7.4f}  ' if self._learns else ''
        self._say(
            f'{self._at(step)}  {divergence}loss {values["cross_entropy"]:6.3f}  accuracy {values["accuracy"]:5.1%}  '
            f'grad norm {figures["grad_norm"]:6.3f}  lr {values["lr"]:.2e}  '
            f'{figures["tokens_per_second"]:,.0f} tokens/s'
        )

    def held_out(self, step: int, values: dict[str, float]) -> None:
        """Shows the figures of the held-out samples; the time that they took does not count as training time."""
        if not self._active:
            return
        figures = {
            'step': step,
            'held_out_loss_nats': values['cross_entropy'],
            'held_out_token_accuracy': values['accuracy'],
            'held_out_divergence_nats': values['loss'],
        }
        if self._teacher_loss is not None:
            figures['teacher_loss_nats'] = self._teacher_loss
        self._keep(self._held_out, figures)
        self._say(
            f'{self._at(step)}  held-out divergence {values["loss"]:.4f} nats per token, loss '
            f'{values["cross_entropy"]:.3f}, accuracy {values["accuracy"]:.1%}'
        )

    def finish(self) -> None:
        """Draws the picture and says what came out, and where it lies."""
        if not self._active:
            return
        draw_panels(self._picture_file, self._panels())
        before, after = self._held_out[0], self._held_out[-1]
        known = '' if self._teacher_loss is None else f'; that of the teacher is {self._teacher_loss:.3f}'
        self._end(
            f'divergence     {before["held_out_divergence_nats"]:.4f} nats per held-out token before, '
            f'{after["held_out_divergence_nats"]:.4f} after\n'
            f'held-out loss  {before["held_out_loss_nats"]:.3f} nats per token before, '
            f'{after["held_out_loss_nats"]:.3f} after{known}'
        )

    def _panels(self) -> dict[str, list[Curve]]:
        def curves(key: str) -> list[Curve]:
            return [
                ('train', 'tab:blue', self._train, key.removeprefix('held_out_')),
                ('held out', 'tab:orange', self._held_out, key),
            ]

        losses = [('train', 'tab:blue', self._train, 'train_loss_nats'), *curves('held_out_loss_nats')[1:]]
        return {
            'divergence from the teacher (nats per token)': curves('held_out_divergence_nats'),
            'loss: cross entropy (nats per token)': [
                *losses,
                ('held out, teacher', 'gray', self._held_out, 'teacher_loss_nats'),
            ],
        }
