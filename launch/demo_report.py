"""What `make demo-grpo` says at its end: rewards with their intervals, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch.figures.intervals import INTERVAL, WHEN, compared, head, row


def report(folder: Path, seeds: Sequence[int], examples: Sequence[tuple[str, str, str]]) -> None:
    """Prints rewards before and after, writes them to `result.json` and draws `demo.png`."""
    rewards = {when: np.stack([_of_prompts(folder / f'{when}-{s}.jsonl', 'reward') for s in seeds]) for when in WHEN}
    lengths = {when: np.mean([_of_prompts(folder / f'{when}-{s}.jsonl', 'tokens') for s in seeds]) for when in WHEN}
    rows = [(f'seed {seed}', *(rewards[when][i] for when in WHEN)) for i, seed in enumerate(seeds)]
    rows.append(('all seeds', *(rewards[when].mean(0) for when in WHEN)))
    result = {name: compared(before, after) for name, before, after in rows}
    last = {f'seed {seed}': _metrics(folder, seed)[-1] for seed in seeds}
    prompts = rewards['before'].shape[1]
    print(
        f'\nreward of completions of {prompts} held-out prompts: mean over prompts ± {INTERVAL} standard errors\n'
        f'(all seeds: of the mean that each prompt has over the seeds)\n\n{head()}'
    )
    for name, figures in result.items():
        print(row(name, figures) + _policy(last.get(name)))
    print(f'\n{"a prompt":32}{"before":>28}  after')
    for prompt, before, after in examples:
        print(f'{prompt:32}{before:>28}  {after}')
    tokens = {'completion tokens': {when: float(length) for when, length in lengths.items()}}
    (folder / 'result.json').write_text(json.dumps({**result, **tokens}, indent=1) + '\n')
    draw(folder / 'demo.png', result, {f'seed {seed}': _metrics(folder, seed) for seed in seeds})
    print(
        f'\nlength         {lengths["before"]:.1f} tokens of a completion before, {lengths["after"]:.1f} after\n'
        f'picture        {folder / "demo.png"}\n'
        f'figures        {folder / "result.json"}, {folder / "seed-*/metrics.jsonl"}'
    )


def _of_prompts(path: Path, what: str) -> np.ndarray:
    """The mean over the completions of each prompt, `[prompts]`."""
    found: dict[int, list[float]] = {}
    for line in path.read_text().splitlines()[1:]:
        rollout = json.loads(line)
        found.setdefault(rollout['group'], []).append(
            rollout['reward'] if what == 'reward' else len(rollout['completion'])
        )
    return np.array([np.mean(values) for values in found.values()])


def _policy(last: dict[str, Any] | None) -> str:
    return '' if last is None else f'  KL {last["approx_kl"]:.3f}, {last["clip_ratio"]:.0%} clipped at the end'


def _metrics(folder: Path, seed: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f'seed-{seed}' / 'metrics.jsonl').read_text().splitlines()]


def draw(path: Path, result: dict[str, Any], runs: dict[str, list[dict[str, Any]]]) -> None:
    """Rewards before and after; KL and clip ratio over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout='constrained')
    grid = figure.add_gridspec(2, 2)
    left, right = figure.add_subplot(grid[:, 0]), [figure.add_subplot(grid[k, 1]) for k in (0, 1)]
    for i, when in enumerate(WHEN):
        of = [result[name][when] for name in (*runs, 'all seeds')]
        bars = left.bar(
            [place + 0.4 * (i - 0.5) for place in range(len(of))],
            [x['mean'] for x in of],
            0.4,
            yerr=[x['plus_or_minus'] for x in of],
            capsize=4,
            label=when,
            color=('tab:gray', 'tab:blue')[i],
        )
        left.bar_label(bars, fmt='%.2f', label_type='center', color='white')
    left.set_xticks(range(len(runs) + 1), [*runs, 'all seeds'])
    left.set(ylim=(0, 1), title=f'reward of held-out prompts, ± {INTERVAL} standard errors')
    left.legend(loc='upper left')
    names = {'approx_kl': 'KL from the initial policy (nats per token)', 'clip_ratio': 'share clipped'}
    for axes, (key, title) in zip(right, names.items()):
        for name, lines in runs.items():
            axes.plot([line['step'] for line in lines], [line[key] for line in lines], marker='.', label=name)
        axes.set(title=title, ylim=(0, None))
        axes.grid(alpha=0.3)
    right[0].legend()
    right[1].set_xlabel('optimizer step')
    figure.savefig(path, dpi=150)
