"""`make demo-embed`: a small language model becomes an encoder that finds the text which belongs to a title.

1. A GPT is trained for a short while on the text of Python's language reference, unless its weights are there from an
   earlier run.
2. Groups are made of that text: the anchor is the title of a section and a sentence, the positive the sentences around
   that one. Held-out are the first sentences of sections of topics that were not trained on.
3. `launch/local.sh --loss infonce` trains on the file of these groups. Measured is how often the body that belongs to a
   held-out title and first sentence is nearer than that of any other held-out section: recall@1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from launch import demo
from launch.datasets.passages import Group, material

SEQUENCE = 96


def main() -> None:
    args = _parser().parse_args()
    demo.carry_out(lambda: steps(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='launch.demo_embed', description='Makes an encoder of a small model and shows which texts it finds.'
    )
    for name, default, what in (
        ('tp', 2, 'tensor parallel size'),
        ('pp', 2, 'pipeline parallel size'),
        ('pretrain-steps', 80, 'optimizer steps of the training on text'),
        ('groups', 1200, 'groups to train on, at most'),
        ('epochs', 3, 'times to go over the groups'),
        ('log-every', 10, 'steps between two lines of figures'),
    ):
        parser.add_argument(f'--{name}', type=int, default=default, metavar='N', help=f'{what} ({default})')
    parser.add_argument('--folder', type=Path, default=Path('runs/demo-embed'), help='for all files (runs/demo-embed)')
    return parser


def steps(args: argparse.Namespace) -> None:
    """The whole demo."""
    found, this = material(), demo.Demo(args.folder, args.tp, args.pp)
    sizes = ['--vocab-size=2000', f'--seq-length={SEQUENCE}', '--micro-batch-size=16', '--layers=2']
    this.pretrain(found.text, 'paragraphs of the language reference', args.pretrain_steps, *sizes)
    groups, held_out = (this.folder / name for name in ('groups.jsonl', 'held-out.jsonl'))
    _write(groups, found.groups[: args.groups])
    _write(held_out, found.held_out)
    demo.say('encoder   trains on titles and sentences, and the texts around these')
    print(flush=True)
    this.local(
        'encoder',
        '--loss=infonce',
        f'--data={groups}',
        f'--held-out={held_out}',
        f'--init-weights={this.base}',
        f'--save-weights={this.folder / "encoder.npz"}',
        f'--seq-length={SEQUENCE}',
        f'--epochs={args.epochs}',
        f'--log-every={args.log_every}',
        '--eval-every=20',
        '--pooling=mean',
        '--lr=3e-4',
        '--micro-batch-size=32',
        '--micro-batches=1',  # several would need a second forward pass each
        '--packed',
    )
    _show(found.held_out, this.folder / 'encoder/held_out.jsonl')


def _write(path: Path, groups: Iterable[Group]) -> None:
    path.write_text(''.join(json.dumps(group._asdict()) + '\n' for group in groups))


def _show(groups: list[Group], figures: Path) -> None:
    """Some held-out groups, and where their own bodies stood among all, before and after."""
    lines = [json.loads(line) for line in figures.read_text().splitlines()]
    print('\nsome held-out titles with their first sentences, and the bodies that are nearest to them:')
    for group, line in list(zip(groups, lines))[:4]:
        print(f'\nanchor    {group.anchor}')
        for when in ('before', 'after'):
            nearest = groups[line[f'nearest_{when}']].positive
            right = 'right' if nearest == group.positive else 'wrong'
            print(f'{when:8}  {right}: {nearest[:100]}')
    print()


if __name__ == '__main__':
    main()
