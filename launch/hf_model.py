"""The model of `--model`: a Hugging Face checkpoint, built, and saved as one again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from launch.datasets.about import Checkpoint
from twinkle_megatron.megatron import hf_files, huggingface
from twinkle_megatron.megatron.hf_config import check_layout, in_one_line, package, read_config

_TOKENIZERS = ('tokenizer.json', 'tokenizer.model', 'vocab.json')
_WORDS = ('bos_token', 'eos_token', 'pad_token', 'unk_token')


def folder_of(model: str, revision: str | None, *, fetched: bool) -> Path:
    """The folder that `--model` means, of a repository that of its snapshot; `fetched`: that is in the cache.
    ValueError, with every reason that there is for one."""
    try:
        if huggingface.names_folder(model, revision):
            return Path(model).expanduser().absolute()
        return huggingface.snapshot(model, revision, offline=True if fetched else None).folder
    except (ValueError, ConnectionError, ImportError) as error:
        raise ValueError(f'--model {model}: {error}') from error


def check(folder: Path, args: argparse.Namespace) -> None:
    """ValueError unless this is a checkpoint that can be built in the layout of the options, from weights that are all
    there."""
    try:
        config = read_config(folder)
        check_layout(config, tp=args.tp, pp=args.pp)
        hf_files.shapes_in(folder)
    except ImportError as error:
        raise ValueError(str(error)) from error


def check_saving(args: argparse.Namespace) -> None:
    """ValueError where the model could not be saved at the end."""
    hf_files.check_target(args.save_model.expanduser().absolute(), args.init_weights, overwrite=False)


def read_about(folder: Path) -> Checkpoint:
    """Sizes and tokenizer of a checkpoint. ValueError where one of them is not there, or they do not fit together."""
    config = read_config(folder)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ValueError(
            f'{folder} has no tokenizer ({", ".join(_TOKENIZERS)}): put that of the model there, as its '
            'save_pretrained writes it'
        )
    try:
        tokenizer = package('transformers').AutoTokenizer.from_pretrained(folder, local_files_only=True)
        text = tokenizer.backend_tokenizer.to_str()
        chat_template = tokenizer.get_chat_template() if tokenizer.chat_template else ''
    except Exception as error:  # of many kinds
        raise ValueError(f'the tokenizer in {folder} cannot be read: {in_one_line(error)}') from error
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= highest < config.vocab_size:
        raise ValueError(
            f'the tokenizer in {folder} has ids up to {highest}, and the model a vocabulary of {config.vocab_size}: it '
            'is that of another model'
        )
    end = _first(tokenizer.eos_token_id, config.eos_token_id)
    if end is None:
        raise ValueError(f'neither the tokenizer nor config.json in {folder} has an end of text, eos_token')
    start = tokenizer.bos_token_id
    return Checkpoint(
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.vocab_size,
        text,
        folder=folder,
        start=() if start is None else (start,),
        end=end,
        chat_template=chat_template,
        special_words=tuple((name, str(word)) for name in _WORDS if (word := getattr(tokenizer, name, None))),
    )


def _first(*ids: Any) -> int | None:
    """The first id that is told; config.json may have a list."""
    flat = [x for given in ids for x in (given if isinstance(given, list) else [given])]
    return next((x for x in flat if x is not None), None)


def chunk(folder: Path) -> Any:
    """This rank's chunk of the model, with its weights. Collective."""
    return huggingface.load_chunks(folder).chunks[0]


def save(args: argparse.Namespace, chunk: Any) -> None:
    """Writes the model to the folder `args.save_model`. Collective."""
    huggingface.save(args.save_model, chunk, args.init_weights, dtype=getattr(torch, args.save_dtype))
