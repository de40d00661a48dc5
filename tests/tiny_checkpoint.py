"""Tiny checkpoints as `transformers` saves them, and the log-probs that it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 301  # Megatron pads it, to 512 on two tensor parallel ranks
NAMES = {'qwen2': 'Qwen2', 'qwen3': 'Qwen3', 'llama': 'Llama'}
SIZES = {
    'hidden_size': 32,
    'num_hidden_layers': 4,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'intermediate_size': 48,
    'max_position_embeddings': 64,
    'vocab_size': VOCAB,
}


def write(folder: Path, kind: str = 'qwen2', dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A checkpoint with sure opinions: random weights, norms and biases among them."""
    config, model_class = (getattr(transformers, NAMES[kind] + what) for what in ('Config', 'ForCausalLM'))
    rope = {'rope_type': 'default', 'rope_theta': 1000.0}  # not the default of any
    own = {'head_dim': 12} if kind == 'qwen3' else {}
    shard = {'max_shard_size': changes.pop('max_shard_size')} if 'max_shard_size' in changes else {}
    settings = {**SIZES, 'rope_parameters': rope, 'rms_norm_eps': 1e-5, **own, **changes}
    torch.manual_seed(7)
    model = model_class(config(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.2)
            if 'norm' in name:
                parameter.add_(1)
    model.to(dtype).save_pretrained(folder, **shard)
    return folder


def tokens(rows: int = 3, length: int = 11) -> torch.Tensor:
    """Token ids, the same every time."""
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def log_probs(folder: Path, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of each token but the first its log-prob, `[b, s - 1]`, as `transformers` gives it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.double()
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def after_a_step(folder: Path, ids: torch.Tensor, lr: float) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint after a step of gradient descent on the mean cross entropy, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    stepped = {name: x.detach() - lr * x.grad for name, x in model.named_parameters()}  # a tied one once
    return {name: x.float() for name, x in stepped.items()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in the files of a checkpoint."""
    from safetensors.torch import load_file

    return {name: x for file in sorted(folder.glob('*.safetensors')) for name, x in load_file(file).items()}


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)


def write_tokenizer(folder: Path, text: str, chat: str | None = CHAT, vocab_size: int = VOCAB - 10) -> Any:
    """A byte-level BPE as Qwen has it, trained on `text`; smaller than the vocabulary of the model, as Qwen's is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens(special)  # after the words, as Qwen has them
    tokenizer.add_special_tokens([f'<|{i}|>' for i in range(vocab_size - tokenizer.get_vocab_size())])
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token='<|im_end|>', pad_token='<|endoftext|>', chat_template=chat
    )
    whole.save_pretrained(folder)
    return whole
