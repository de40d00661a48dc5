"""What the config.json of a Hugging Face checkpoint says, and whether it can be built here, in a layout."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUPPORTED = ('llama', 'qwen2', 'qwen3')
"""Values of `model_type` whose chunks give the log-probs of `transformers`, as tests show."""
_ELSEWHERE = (
    'where Transformer Engine is installed, megatron-bridge and mcore-bridge build the chunks of many more, which '
    'MegatronModel takes'
)


def check_extra() -> None:
    """ImportError, with the command to install it, where a package of the extra `hf` is not there. Imports none."""
    lacks = [name for name in ('mbridge', 'transformers', 'safetensors', 'einops') if find_spec(name) is None]
    if lacks:
        raise ImportError(
            f"Hugging Face checkpoints need {', '.join(lacks)}, not installed here: pip install -e '.[hf]' in a "
            'checkout of twinkle-megatron'
        )


def package(name: str) -> Any:
    """A package of the extra `hf`, or a module of it; slow to import, so not before it is needed."""
    check_extra()
    return importlib.import_module(name)


def read_config(folder: Path) -> Any:
    """The configuration of the model in a folder, as `transformers` reads it. ValueError where it is none that can be
    built here with the same numbers; ImportError without `transformers`."""
    if not folder.is_dir():
        what = 'is a file' if folder.exists() else 'does not exist'
        raise ValueError(f'{folder} must be the folder of a Hugging Face checkpoint, and {what}')
    if not (folder / 'config.json').is_file():
        raise ValueError(f'{folder} has no config.json, so it is no Hugging Face checkpoint')
    auto = package('transformers').AutoConfig
    try:
        config = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, some of them with a long advice
        raise ValueError(f'{folder}/config.json cannot be read: {in_one_line(error)}') from error
    wrong = _unsupported(config)
    if wrong:
        raise ValueError(f'{folder}/config.json {wrong}')
    return config


def in_one_line(error: Exception) -> str:
    """The message of an error of `transformers`, without the advice that follows."""
    return ' '.join(str(error).split())[:300]


def _unsupported(config: Any) -> str | None:
    if config.model_type not in SUPPORTED:
        return f'must have a "model_type" of {", ".join(SUPPORTED)}, got {config.model_type!r}; {_ELSEWHERE}'
    rope = rotary(config)
    kind = rope.get('rope_type', rope.get('type', 'default'))
    layers = set(getattr(config, 'layer_types', None) or ['full_attention'])
    checks = (
        (kind == 'default', f'must have rotary embeddings without scaling, got rope_type {kind!r}'),
        (rope.get('partial_rotary_factor', 1) == 1, 'must have rotary embeddings of whole heads'),
        (config.hidden_act == 'silu', f'must have "hidden_act" silu, got {config.hidden_act!r}'),
        (layers == {'full_attention'}, f'must have full attention in every layer, got {sorted(layers)}'),
        (
            getattr(config, 'quantization_config', None) is None,
            'must be of plain weights, got a "quantization_config"; give the checkpoint before its quantization',
        ),
    )
    return next((f'{message}; {_ELSEWHERE}' for fine, message in checks if not fine), None)


def rotary(config: Any) -> dict[str, Any]:
    """The settings of the rotary embeddings: `transformers` 5 has them in one place, 4 in two."""
    found = dict(getattr(config, 'rope_parameters', None) or getattr(config, 'rope_scaling', None) or {})
    found.setdefault('rope_theta', getattr(config, 'rope_theta', 10000.0))
    return found


def check_layout(config: Any, *, tp: int, pp: int, vpp: int = 1) -> None:
    """ValueError where the model cannot be cut so."""
    stages = f'pp {pp}' if vpp == 1 else f'pp · vpp = {pp * vpp}'
    for name, size, part in (
        ('num_attention_heads', tp, f'tp {tp}'),
        ('num_key_value_heads', tp, f'tp {tp}'),
        ('intermediate_size', tp, f'tp {tp}'),
        ('num_hidden_layers', pp * vpp, stages),
    ):
        value = getattr(config, name)
        if value % size:
            fits = [d for d in range(1, value + 1) if value % d == 0 and d <= size]
            raise ValueError(f'{name} {value} of the checkpoint must be a multiple of {part}; try {fits[-1]}')


def padded(vocab_size: int, tp: int) -> int:
    """Rows of the embedding: an equal share of the vocabulary on each tensor parallel rank, of a size that is quick."""
    multiple = 128 * tp if vocab_size > 128 * tp else tp
    return -(-vocab_size // multiple) * multiple
