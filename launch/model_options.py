"""What `--model` is beside other options. It stands for `--init-weights` once it was found."""

from __future__ import annotations

import argparse

from tokenizers import Tokenizer


def complete(args: argparse.Namespace) -> None:
    """Finds the checkpoint, and puts its folder in `args.init_weights`. ValueError, which says what is wrong."""
    if args.init_weights is not None and args.init_weights.is_dir():
        raise ValueError(
            f'--init-weights must be a file, as --save-weights writes it, and {args.init_weights} is a folder; a '
            f'Hugging Face checkpoint is --model {args.init_weights}'
        )
    if args.model is None:
        for name in ('revision', 'save_model'):
            if getattr(args, name) is not None:
                raise ValueError(f'--{name.replace("_", "-")} is for --model, which is not given')
        return
    if args.init_weights is not None:
        raise ValueError('--model and --init-weights say the same; give one of them')
    if args.save_weights is not None:
        raise ValueError('--save-weights is for the built-in GPT; --save-model FOLDER writes the checkpoint of --model')
    if args.tokenizer is not None:
        raise ValueError('--tokenizer is for a model without one, and --model brings its own')
    from launch import hf_model  # slow to import

    prepared = args.dataset is not None
    args.init_weights = hf_model.folder_of(args.model, args.revision, fetched=prepared)
    if prepared:
        return
    hf_model.check(args.init_weights, args)
    if args.save_model is not None:
        hf_model.check_saving(args)


def check_teacher(args: argparse.Namespace) -> None:
    """ValueError where the teacher, a Hugging Face checkpoint, does not fit."""
    from launch import hf_model

    if args.model is None:
        raise ValueError(
            f'--teacher-weights {args.teacher_weights} is a Hugging Face checkpoint, and teaches one: give --model'
        )
    if args.dataset is not None:
        return
    hf_model.check(args.teacher_weights, args)
    student, teacher = map(hf_model.read_about, (args.init_weights, args.teacher_weights))
    if Tokenizer.from_str(student.tokenizer).get_vocab() != Tokenizer.from_str(teacher.tokenizer).get_vocab():
        raise ValueError(f'{args.init_weights} must have the tokens of {args.teacher_weights}, and has others')
