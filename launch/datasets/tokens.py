"""The tokenizers that are trained here, and what they make of a document."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from launch.datasets.documents import ROLES, Document

START, END = '<|start|>', '<|end|>'
SPECIAL_IDS = {token: i for i, token in enumerate([START, END, *(f'<|{role}|>' for role in ROLES)])}


def train_tokenizer(documents: list[Document], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries, fewer for little text. Text never turns into special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL_IDS),  # they get the first ids, in this order
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((turn.text for d in documents for turn in d), trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_tokenizer(text: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True  # which the file does not say
    return tokenizer


def encode(document: Document, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids, and which are trained on: running text, or what the assistant says and the end of its turn."""
    ids, trained = [SPECIAL_IDS[START]], [False]
    for turn in document:
        if turn.role is not None:
            ids.append(SPECIAL_IDS[f'<|{turn.role}|>'])
            trained.append(False)
        tokens = [*tokenizer.encode(turn.text).ids, SPECIAL_IDS[END]]
        ids += tokens
        trained += [turn.trained] * len(tokens)
    return ids, trained
