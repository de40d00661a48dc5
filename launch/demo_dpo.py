"""`make demo-dpo`: a small model learns to prefer real sentences to the same with their words shuffled.

1. A GPT is trained for a short while on the text of Python's language reference, unless its weights are there from an
   earlier run.
2. Pairs are made of the sentences of that text: the prompt is what stands before a sentence, the sentence is chosen,
   and rejected is the same one with its words shuffled. Held-out pairs come from documents that were not trained on.
3. `launch/local.sh --loss dpo` trains on the file of these pairs, and measures by the held-out ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from launch import demo
from launch.datasets.sentences import Pair, material
from launch.kinds import PAIRS

SEQUENCE = 96
MORE = {'orpo': ['--beta=1']}  # at its default, likelihood outweighs preference, and one epoch shows little


def main() -> None:
    args = _parser().parse_args()
    demo.carry_out(lambda: steps(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='launch.demo_dpo', description='Trains a small model on pairs of sentences and shows what it prefers.'
    )
    for name, default, what in (
        ('tp', 2, 'tensor parallel size'),
        ('pp', 2, 'pipeline parallel size'),
        ('pretrain-steps', 100, 'optimizer steps of the training on text'),
        ('pairs', 1300, 'pairs to train on, at most'),
        ('epochs', 1, 'times to go over the pairs'),
        ('log-every', 10, 'steps between two lines of figures'),
    ):
        parser.add_argument(f'--{name}', type=int, default=default, metavar='N', help=f'{what} ({default})')
    parser.add_argument('--loss', choices=PAIRS.losses, default='dpo', help='loss of the pairs (dpo)')
    parser.add_argument('--folder', type=Path, default=Path('runs/demo-dpo'), help='for all files (runs/demo-dpo)')
    return parser


def steps(args: argparse.Namespace) -> None:
    """The whole demo."""
    found, this = material(), demo.Demo(args.folder, args.tp, args.pp)
    sizes = ['--vocab-size=2000', f'--seq-length={SEQUENCE}', '--micro-batch-size=16']
    this.pretrain(found.text, 'paragraphs of the language reference', args.pretrain_steps, *sizes)
    pairs, held_out = (this.folder / name for name in ('pairs.jsonl', 'held-out.jsonl'))
    _write(pairs, found.pairs[: args.pairs])
    _write(held_out, found.held_out)
    demo.say(f'{args.loss:9} trains on pairs of sentences, real ones before shuffled ones; the first held-out pairs:')
    for pair in found.held_out[:3]:
        print(f'\nprompt    {pair.prompt}\nchosen   {pair.chosen}\nrejected {pair.rejected}', flush=True)
    print(flush=True)
    this.local(
        args.loss,
        f'--loss={args.loss}',
        f'--data={pairs}',
        f'--held-out={held_out}',
        f'--init-weights={this.base}',
        f'--save-weights={this.folder / f"{args.loss}.npz"}',
        f'--seq-length={SEQUENCE}',
        f'--epochs={args.epochs}',
        f'--log-every={args.log_every}',
        '--eval-every=10',
        '--micro-batch-size=16',
        '--micro-batches=2',
        '--packed',
        *MORE.get(args.loss, []),
    )


def _write(path: Path, pairs: Iterable[Pair]) -> None:
    path.write_text(''.join(json.dumps(pair._asdict()) + '\n' for pair in pairs))


if __name__ == '__main__':
    main()
