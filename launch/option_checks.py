"""What the options of one kind of loss must be beside each other."""

from __future__ import annotations

import argparse

from launch import model_options, weights
from launch.kinds import DISTILLATION, EMBEDDINGS, LOSSES, PAIRS


def check(args: argparse.Namespace) -> None:
    """ValueError, which says what is wrong."""
    if LOSSES[args.loss] is PAIRS:
        _check_pairs(args)
    if LOSSES[args.loss] is EMBEDDINGS and args.head != 'auto':
        raise ValueError(f'--head is for losses of tokens, got --head {args.head} with --loss {args.loss}')
    if args.teacher_weights is not None:
        _check_teacher(args)
        if args.beta > 1:
            raise ValueError(f'--beta must be at most 1 for a divergence, got {args.beta:g}')
    if LOSSES[args.loss] is DISTILLATION:
        _check_distillation(args)


def _check_pairs(args: argparse.Namespace) -> None:
    if args.beta == 0 and args.loss != 'orpo':
        raise ValueError(f'--beta must be above 0 with --loss {args.loss}, got 0')
    if args.label_smoothing and args.label_smoothing > 0.5:
        raise ValueError(f'--label-smoothing must be at most 0.5, got {args.label_smoothing:g}')
    if args.label_smoothing and args.loss_type != 'sigmoid':
        raise ValueError(f'--label-smoothing is for --loss-type sigmoid, got --loss-type {args.loss_type}')


def _check_teacher(args: argparse.Namespace) -> None:
    if args.teacher_weights.is_dir():
        model_options.check_teacher(args)
        return
    about = weights.read_about(args.teacher_weights)
    for what, value, part, size in (('heads', about.heads, '--tp', args.tp), ('layers', about.layers, '--pp', args.pp)):
        if value % size:
            raise ValueError(
                f'{args.teacher_weights} has {value} {what}, which must be a multiple of {part}, got {part} {size}'
            )
    if args.init_weights is not None and weights.read_about(args.init_weights).tokenizer != about.tokenizer:
        raise ValueError(f'{args.init_weights} must have the tokenizer of {args.teacher_weights}, and has another one')
    if args.tokenizer is not None:
        raise ValueError('--tokenizer is for a file of best tokens, and --teacher-weights brings its own')


def _check_distillation(args: argparse.Namespace) -> None:
    if args.beta > 1:
        raise ValueError(f'--beta must be at most 1 with --loss {args.loss}, got {args.beta:g}')
    if args.teacher_weights is not None:
        if args.topk_tail == 'bucket' and args.topk is None:
            raise ValueError('--topk-tail bucket needs --topk N')
        return
    if args.data is None:
        raise ValueError(
            f'--loss {args.loss} needs --teacher-weights FILE, or --data FILE with the best tokens of a teacher; '
            f'{DISTILLATION.page} tells what it must hold'
        )
    if (args.init_weights is None) == (args.tokenizer is None):
        raise ValueError(
            f'--loss {args.loss} without --teacher-weights needs either --init-weights FILE, or --tokenizer FILE with '
            'the tokenizer.json of the teacher'
        )
    if args.topk is not None:
        raise ValueError('--topk is for --teacher-weights; a file of best tokens holds as many as it holds')
    if args.topk_tail == 'bucket' and args.temperature != 1:
        raise ValueError(
            f'--topk-tail bucket must be at --temperature 1 without --teacher-weights, got {args.temperature:g}: the '
            'other tokens of the teacher cannot be tempered'
        )
