"""`make demo-gkd`: a small model is distilled into one of half the width.

1. A GPT, the teacher, is trained on Python's language reference, unless its weights are there from an earlier run.
2. `launch/local.sh --loss gkd` trains a student of half its width on the same text: on the teacher's distribution of
   each token in place of the token.
3. For comparison the same student, from the same weights and on the same batches, learns from the tokens alone.

Compared are the loss on held-out text and there the divergence from the teacher, at beta 0 KL(teacher|student).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from launch import demo
from launch.figures.progress import Curve, draw_panels
from launch.options import SIZES

STUDENTS = {'distilled': ('gkd', 'tab:orange'), 'from-text': ('cross-entropy', 'tab:blue')}


def main() -> None:
    args = _parser().parse_args()
    demo.carry_out(lambda: steps(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='launch.demo_gkd', description='Distils a small model into a smaller one and shows what it has learnt.'
    )
    for name, default, what in (
        ('tp', 2, 'tensor parallel size'),
        ('pp', 2, 'pipeline parallel size'),
        ('teacher-steps', 150, 'optimizer steps of the teacher'),
        ('steps', 100, 'optimizer steps of each student'),
        ('log-every', 10, 'steps between two lines of figures'),
    ):
        parser.add_argument(f'--{name}', type=int, default=default, metavar='N', help=f'{what} ({default})')
    parser.add_argument('--beta', type=float, default=0.0, metavar='N', help='of the divergence, 0 to 1 (0)')
    parser.add_argument('--folder', type=Path, default=Path('runs/demo-gkd'), help='for all files (runs/demo-gkd)')
    return parser


def steps(args: argparse.Namespace) -> None:
    """The whole demo."""
    this, width = demo.Demo(args.folder, args.tp, args.pp), SIZES['hidden_size'] // 2
    batch = ['--seq-length=96', '--micro-batch-size=8']
    pace = [f'--log-every={args.log_every}', f'--eval-every={max(args.steps // 4, 1)}']
    this.pretrain(None, 'the language reference of Python', args.teacher_steps, '--vocab-size=2000', *batch)
    for name, (loss, _) in STUDENTS.items():
        how = 'from the teacher' if loss == 'gkd' else 'from the tokens alone, for comparison'
        demo.say(f'student   of half the width learns {how}')
        this.local(
            name,
            f'--loss={loss}',
            f'--teacher-weights={this.base}',
            f'--hidden-size={width}',
            f'--save-weights={this.folder / f"{name}.npz"}',
            f'--steps={args.steps}',
            f'--beta={args.beta}',
            *batch,
            *pace,
        )
    report(this.folder)


def report(folder: Path) -> None:
    """Prints losses and divergences, writes them to `result.json` and draws `demo.png`."""
    lines = {name: _held_out(folder / name / 'metrics.jsonl') for name in STUDENTS}
    of_teacher = lines['distilled'][0]['teacher_loss_nats']
    result: dict[str, Any] = {'teacher': {'held_out_loss_nats': of_teacher, 'held_out_divergence_nats': 0.0}}
    result['student before'] = _figures(lines['distilled'][0])
    result |= {f'student {name.replace("-", " ")}': _figures(of[-1]) for name, of in lines.items()}
    print(f'\non held-out text, nats per token\n\n{"":22}{"loss":>9}{"divergence from the teacher":>30}')
    for name, figures in result.items():
        print(f'{name:22}{figures["held_out_loss_nats"]:9.3f}{figures["held_out_divergence_nats"]:30.4f}')
    (folder / 'result.json').write_text(json.dumps(result, indent=1) + '\n')
    draw_panels(folder / 'demo.png', _panels(lines))
    print(f'\npicture        {folder / "demo.png"}\nfigures        {folder / "result.json"}')


def _held_out(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if 'held_out_loss_nats' in line]


def _figures(line: dict[str, Any]) -> dict[str, float]:
    return {key: line[key] for key in ('held_out_loss_nats', 'held_out_divergence_nats')}


def _panels(lines: dict[str, list[dict[str, Any]]]) -> dict[str, list[Curve]]:
    def curves(key: str) -> list[Curve]:
        return [(name.replace('-', ' '), color, lines[name], key) for name, (_, color) in STUDENTS.items()]

    teacher: Curve = ('teacher', 'gray', lines['distilled'], 'teacher_loss_nats')
    return {
        'held-out loss (nats per token)': [*curves('held_out_loss_nats'), teacher],
        'divergence from the teacher (nats per token)': curves('held_out_divergence_nats'),
    }


if __name__ == '__main__':
    main()
