"""What a training on rollouts shows and leaves behind."""

from __future__ import annotations

import argparse

from launch.figures.progress import Figures, Recorder, draw_panels

PANELS = {
    'approx_kl': 'KL from the policy that sampled (nats per token)',
    'clip_ratio': 'share clipped',
    'entropy': 'entropy (nats per token)',
}


class PolicyRecorder(Recorder):
    """Shows and writes the figures of a training on rollouts."""

    def __init__(self, args: argparse.Namespace, *, active: bool) -> None:
        super().__init__(args, 'policy.png', active=active)

    def train(self, step: int, values: dict[str, float]) -> None:
        """Shows the figures since the last call: means over tokens, nats; rewards over rollouts."""
        if not self._active:
            return
        policy = {name.removeprefix('train/'): value for name, value in values.items() if name.startswith('train/')}
        figures: Figures = {'step': step, 'loss': values['loss'], 'reward': values['mean_reward']}
        figures |= {'reward_std': values['reward_std'], **policy, **self._of_training(values)}
        self._keep(self._train, figures)
        self._say(
            f'{self._at(step)}  reward {figures["reward"]:.3f}  loss {figures["loss"]:7.4f}  '
            f'KL {figures["approx_kl"]:.4f}  clipped {figures["clip_ratio"]:5.1%}  entropy {figures["entropy"]:.3f}  '
            f'grad norm {figures["grad_norm"]:.3f}  lr {figures["learning_rate"]:.1e}  '
            f'{figures["tokens_per_second"]:,.0f} tokens/s'
        )

    def finish(self) -> None:
        """Draws the picture and says what came out, and where it lies."""
        if not self._active:
            return
        draw_panels(self._picture_file, {PANELS[key]: [('', 'tab:blue', self._train, key)] for key in PANELS})
        if not self._train:  # of a run that was over, whose figures were lost
            self._end('policy         its figures are gone')
            return
        last = self._train[-1]
        self._end(
            f'policy         KL {last["approx_kl"]:.4f} nats per token from the one that sampled, entropy '
            f'{self._train[0]["entropy"]:.3f} at the start, {last["entropy"]:.3f} at the end'
        )
