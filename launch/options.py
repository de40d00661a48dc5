"""The options of the training example, checked before anything is started."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch import model_options, option_checks, weights
from launch.kinds import DISTILLATION, EMBEDDINGS, LOSSES, OPTIONS, PAIRS, ROLLOUTS, TEXT, losses_with

DEFAULT_NAME = 'python-reference'
SIZES = {'layers': 4, 'hidden_size': 128, 'heads': 4}
Option = tuple[str, Any, Any, str]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options in `argv` (None: the command line). A wrong one ends the program with a message and exit code 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _complete(args)
        _check(args)
    except ValueError as e:
        parser.error(str(e))
    stem = args.data.stem if args.data else DEFAULT_NAME
    layout = f'tp{args.tp}-pp{args.pp}' + (f'-dp{args.dp}' if args.dp > 1 else '')
    layout += '' if args.head == 'auto' else f'-{args.head}'
    layout = layout if LOSSES[args.loss] is TEXT else f'{args.loss}-{layout}'
    args.run = args.runs / (args.name or f'{stem}-{layout}')
    args.start = 0
    return args


def steps_of(args: argparse.Namespace, samples: int) -> int:
    """Optimizer steps over that many samples."""
    if args.steps is not None:
        return args.steps
    return math.ceil(args.epochs * samples / (args.micro_batches * args.micro_batch_size))


def _options() -> dict[str, list[Option]]:
    size, share, positive = _number(int, 1), _number(float, 0), _number(float, 0, above=True)
    not_negative = _number(float, 0)
    text, grpo, dpo, simpo, cpo, gkd, infonce = (
        OPTIONS[loss] for loss in ('cross-entropy', 'grpo', 'dpo', 'simpo', 'cpo', 'gkd', 'infonce')
    )
    of_each = '{:g}; of rollouts {:g}; of pairs {:g}; of embeddings {:g}'.format
    return {
        'data': [
            ('data', Path, None, "JSON lines to train on: text (default: Python's language reference), rollouts,"
             " pairs, a teacher's best tokens or groups of texts"),
            ('vocab-size', _number(int, 300), text['vocab_size'], 'entries of the BPE vocabulary, at most'),
            ('seq-length', _number(int, 8), 128, 'tokens of a sample, at most; longer documents and texts of groups'
             ' are cut, longer pairs left out'),
        ],
        'layout': [
            ('tp', size, 1, 'tensor parallel size'),
            ('pp', size, 1, 'pipeline parallel size'),
            ('dp', size, 1, 'data parallel size'),
            ('doctor', bool, None, 'look at layout, versions, network and machines first, and end where something is'
             ' wrong (docs/doctor.md tells more)'),
        ],
        'model': [
            ('init-weights', Path, None, 'weights to start from; they bring the sizes of the model and its tokenizer'),
            ('model', str, None, 'Hugging Face checkpoint to start from in place of them: a folder, or the name of a'
             ' repository, group/name (docs/huggingface.md tells more)'),
            ('revision', str, None, "branch, tag or commit of the repository of --model; default: the main branch"),
            ('layers', size, SIZES['layers'], 'transformer layers'),
            ('hidden-size', size, SIZES['hidden_size'], 'width of the model'),
            ('heads', size, SIZES['heads'], 'attention heads'),
            ('head', _one_of('auto', 'logits', 'linear'), 'auto', "whether logits are built: 'linear' never does, nor"
             " does a loss of embeddings"),
        ],
        'training': [
            ('loss', _one_of(*LOSSES), TEXT.losses[0], f'{TEXT.losses[0]} trains on text; {", ".join(ROLLOUTS.losses)}'
             f' on rollouts; {", ".join(PAIRS.losses)} on pairs; {", ".join(DISTILLATION.losses)} on text'
             f" beside a teacher, or on a teacher's best tokens; {', '.join(EMBEDDINGS.losses)} on groups of texts"),
            ('steps', size, f'{TEXT.steps}; of rollouts, pairs and embeddings as --epochs says', 'optimizer steps'),
            ('epochs', size, f'{ROLLOUTS.epochs} of rollouts; {PAIRS.epochs} of pairs; {EMBEDDINGS.epochs} of'
             ' embeddings', 'times to go over the data, in place of --steps'),
            ('micro-batch-size', size, 4, 'samples of a micro-batch; a pair or a group is one'),
            ('micro-batches', size, 2, 'micro-batches of a step, over all of dp'),
            ('lr', positive, of_each(TEXT.lr, ROLLOUTS.lr, PAIRS.lr, EMBEDDINGS.lr), 'highest learning'
             ' rate, which then falls along a cosine to a tenth; with --model the default is a hundredth of this'),
            ('warmup', share, 0.1, 'share of the steps over which the learning rate rises'),
            ('weight-decay', share, 0.1, "Adam's decoupled weight decay"),
            ('clip-grad', positive, 1.0, 'highest gradient norm'),
            ('seed', _number(int, 0), 1234, 'of the weights and of the order of the samples'),
        ],
        'losses of rollouts (docs/rollouts.md tells what the file must hold)': [
            ('clip-range', not_negative, grpo['clip_range'], 'how far from 1 a ratio still counts'),
            ('clip-range-high', not_negative, 'that of --clip-range', 'the same, above 1'),
            ('entropy-coef', not_negative, grpo['entropy_coef'], 'weight of the entropy'),
            ('advantages', _one_of('group', 'batch', 'none'), grpo['advantages'], 'whose standard deviation divides the'
             ' rewards less the mean of their group: group, batch or none'),
        ],
        'losses of pairs (docs/pairs.md tells what the file must hold)': [
            ('reference-cache', Path, None, 'folder to keep the log-probs of the reference in'),
            ('loss-type', _one_of('sigmoid', 'hinge', 'ipo', 'kto'), dpo['loss_type'], 'of dpo: sigmoid, hinge, ipo or'
             ' kto'),
            ('label-smoothing', not_negative, dpo['label_smoothing'], 'of dpo, sigmoid: share of the pairs taken to be'
             ' the wrong way round, at most 0.5'),
            ('sft-weight', not_negative, dpo['sft_weight'], 'of dpo: weight of the likelihood of chosen responses'),
            ('cpo-alpha', not_negative, cpo['cpo_alpha'], 'of cpo: the same'),
            ('gamma', not_negative, simpo['gamma'], 'of simpo: the margin that is asked for'),
        ],
        'distillation (docs/distillation.md tells more)': [
            ('teacher-weights', Path, None, 'the teacher of gkd, of the same tokenizer; with cross-entropy the student'
             ' is only measured by it, by --beta too'),
            ('topk', size, None, "of gkd: compares the teacher's best so many tokens; default: the whole vocabulary"),
            ('topk-tail', _one_of('renormalize', 'bucket'), gkd['topk_tail'], 'of gkd, what becomes of all other'
             ' tokens: renormalize leaves them out, bucket makes them one more'),
            ('tokenizer', Path, None, "tokenizer.json of the teacher, where --data is a file of its best tokens and"
             ' --init-weights brings none'),
        ],
        'embeddings (docs/embeddings.md tells what the file must hold)': [
            ('pooling', _one_of('last', 'mean', 'first'), infonce['pooling'], 'what the embedding of a text is made'
             ' from: the hidden state of its last token, their mean, or that of the first'),
            ('hard-negatives', size, None, 'of its own negatives each group has so many, drawn again where there are'
             ' fewer; default: those that there are'),
        ],
        'losses of several kinds': [
            ('held-out', Path, None, 'pairs or groups to measure by, like --data; default: a tenth of those in'
             ' --data'),
            ('temperature', positive, f'{gkd["temperature"]:g} of gkd; {infonce["temperature"]:g} of infonce', 'of gkd:'
             ' logits of both are divided by it; of infonce: cosines are'),
            ('beta', not_negative, f'{grpo["beta"]:g} of rollouts; {dpo["beta"]:g} of pairs, but {simpo["beta"]:g} of'
             f' simpo; {gkd["beta"]:g} of gkd', 'of rollouts: weight of the KL divergence to the weights of the start;'
             ' of pairs: how sharply they are told apart, of orpo the weight of that; of gkd: weight of the teacher in'
             ' the mixture, from 0, KL(teacher|student), to 1, KL(student|teacher)'),
            ('packed', bool, None, 'of rollouts, pairs and embeddings: a micro-batch is one packed row, without'
             ' padding'),
        ],
        'output': [
            ('log-every', size, 10, 'steps between two lines of figures'),
            ('eval-every', size, f'{text["eval_every"]}; of pairs and embeddings {dpo["eval_every"]}', 'steps between'
             ' two looks at what is held out'),
            ('save-weights', Path, None, 'file that the weights are written to at the end'),
            ('save-model', Path, None, 'folder that the model of --model is written to at the end, as a Hugging Face'
             ' checkpoint'),
            ('save-dtype', _one_of('float32', 'bfloat16', 'float16'), 'float32', 'of its weights; they are trained in'
             ' float32'),
            ('runs', Path, Path('runs'), 'folder of all runs'),
            ('resume', _one_of('auto', 'never'), 'never', 'auto goes on from the last checkpoint of this run, where'
             ' there is one; with never a run that has some does not start'),
            ('save-every', size, None, 'steps between two checkpoints; default: none but where a signal ends the run'),
            ('keep', size, 2, 'checkpoints that are kept, the last ones'),
            ('hang-timeout', positive, 600.0, 'seconds that a step may take before the process ends and says what it'
             ' waits for'),
            ('name', str, None, 'folder of this run in there; default: made from the data and the layout'),
        ],
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='launch/local.sh',
        usage='%(prog)s [OPTION ...]',
        description='Trains a small GPT with Megatron-Core, split over tp * pp * dp processes on this machine.',
        allow_abbrev=False,
    )
    later = {*SIZES, 'steps', 'epochs', 'lr'}.union(*OPTIONS.values())  # what they are depends on others
    for title, options in _options().items():
        group = parser.add_argument_group(title)
        for name, kind, default, what in options:
            if kind is bool:
                group.add_argument(f'--{name}', action='store_true', default=None, help=what)
                continue
            about = what if default is None else f'{what} ({default})'
            metavar = {Path: 'PATH', str: 'NAME'}.get(kind, 'NAME' if getattr(kind, 'names', False) else 'N')
            stands = None if name.replace('-', '_') in later else default
            group.add_argument(f'--{name}', type=kind, default=stands, metavar=metavar, help=about)
    parser.add_argument('--dataset', type=Path, help=argparse.SUPPRESS)  # launch/local.sh says where the samples lie
    return parser


def _one_of(*names: str) -> Callable[[str], str]:
    """A type for argparse: one of `names`."""

    def parse_name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f'must be {", ".join(names[:-1])} or {names[-1]}, got {text!r}')
        return text

    parse_name.names = names  # type: ignore[attr-defined]
    return parse_name


def _number(kind: type[int] | type[float], least: float, above: bool = False) -> Callable[[str], int | float]:
    """A type for argparse: a finite number of at least (or above) `least`."""
    what = 'a whole number' if kind is int else 'a number'

    def parse_number(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not (value > least if above else value >= least) or value == float('inf'):
            raise argparse.ArgumentTypeError(
                f'must be {what} {"above" if above else "of at least"} {least:g}, got {text!r}'
            )
        return value

    return parse_number


def _complete(args: argparse.Namespace) -> None:
    """Gives every option that was left out the default that suits the loss and the weights."""
    kind, own = LOSSES[args.loss], OPTIONS[args.loss]
    model_options.complete(args)
    for name in dict.fromkeys(name for options in OPTIONS.values() for name in options):
        if name not in own and getattr(args, name) is not None:
            raise ValueError(f'{_flag(name)} is for --loss {", ".join(losses_with(name))}, got --loss {args.loss}')
    if kind.policy is not None:
        if args.data is None:
            raise ValueError(
                f'--loss {args.loss} needs --data FILE, the {kind.lines or kind.data}; {kind.page} tells what it must '
                'hold'
            )
        if args.init_weights is None:
            raise ValueError(f'--loss {args.loss} needs --init-weights FILE or --model, {kind.policy}')
    if args.steps is not None and args.epochs is not None:
        raise ValueError('--steps and --epochs say the same; give one of them')
    if args.steps is None and args.epochs is None:
        args.steps, args.epochs = kind.steps, kind.epochs
    args.lr = args.lr or (kind.lr if args.model is None else kind.lr / 100)
    for name in ('model', 'init_weights', 'teacher_weights'):
        if args.vocab_size is not None and getattr(args, name) is not None:
            raise ValueError(f'--vocab-size is for a new tokenizer, and {_flag(name)} brings its own')
    if kind is TEXT and args.beta is not None and args.teacher_weights is None:
        raise ValueError(
            f'--beta with --loss {args.loss} is of the divergence from --teacher-weights FILE, and needs it'
        )
    _fill(args, own)
    _fill_sizes(args)


def _fill_sizes(args: argparse.Namespace) -> None:
    if args.init_weights is None:
        _fill(args, SIZES)
        return
    about = weights.read_about(args.init_weights)
    for name in SIZES:
        given, there = getattr(args, name), getattr(about, name)
        if given not in (None, there):
            raise ValueError(f'{_flag(name)} must be that of {args.init_weights}, {there}, got {given}')
        setattr(args, name, there)


def _fill(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def _flag(name: str) -> str:
    return '--' + name.replace('_', '-')


def _check(args: argparse.Namespace) -> None:
    sizes = (
        ('--heads', args.heads, '--tp', args.tp),
        ('--hidden-size', args.hidden_size, '--heads', args.heads),
        ('--layers', args.layers, '--pp', args.pp),
    )
    for name, value, part, size in (
        *(sizes if args.model is None else ()),  # a checkpoint has rules of its own, and was checked
        ('--micro-batches', args.micro_batches, '--dp', args.dp),
    ):
        if value % size:
            near = sorted({d for d in range(1, value + 1) if value % d == 0}, key=lambda d: (abs(d - size), d))[:2]
            raise ValueError(
                f'{name} {value} must be a multiple of {part} {size}; try {part} {" or ".join(map(str, sorted(near)))}'
            )
    if args.model is None and args.hidden_size // args.heads % 2:
        raise ValueError(f'--hidden-size {args.hidden_size} / --heads {args.heads} must be even, for rotary embeddings')
    if args.warmup >= 1:
        raise ValueError(f'--warmup must be a share of the steps below 1, got {args.warmup:g}')
    if args.name is not None and (Path(args.name).name != args.name or args.name == '..'):
        raise ValueError(f'--name must be the name of one folder, got {args.name!r}')
    if args.name == 'data':
        raise ValueError(f'--name must not be data, where {args.runs} keeps what was prepared')
    option_checks.check(args)
