"""Megatron chunks from a Hugging Face checkpoint, and back. Needs the extra `hf`.

    loaded = load_chunks('Qwen/Qwen3-0.6B')                   # after initialize_model_parallel(tp, pp)
    chunks = [DistributedDataParallel(loaded.config, DistributedDataParallelConfig(), c) for c in loaded.chunks]
    model = MegatronModel(chunks, optimizer, vocab_size=loaded.vocab_size)
    ...
    save('trained', model.chunks, loaded)                     # a folder that transformers loads

The weights go through mbridge.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..arguments import reject_unknown
from ..groups import check_megatron_groups
from ..hub import Snapshot, fetch
from ..ranks import Ranks
from . import cpu, hf_bridge, hf_files
from .hf_config import check_layout, package, read_config

_ID = re.compile(r'[A-Za-z0-9][\w.-]*(/[\w.-]+)?', re.ASCII)
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as Megatron chunks.

    Attributes:
        chunks: of this rank, `GPTModel`, in Megatron's Float16Module under bfloat16; not wrapped in its DDP.
        vocab_size: the true one, for `MegatronModel(vocab_size=...)`; the embedding has rows of padding after it.
        config: Megatron's TransformerConfig.
        folder: where the checkpoint lies on this machine.
        commit: of the repository that it came from; None for a folder.
    """

    chunks: list[Any]
    vocab_size: int
    config: Any
    folder: Path
    commit: str | None


def load_chunks(
    model: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    **config: Any,
) -> Loaded:
    """This rank's chunks of a checkpoint, in the layout of Megatron's groups, with its weights.

    Its log-probs are those of `transformers`, up to rounding, under every TP, PP and VPP layout; ids past the true
    vocabulary take no probability under `MegatronModel`. Llama, Qwen2 and Qwen3, tied or not; any dtype in the files,
    one file or many. Layers are those of Transformer Engine where it is installed, else of plain torch.

    Args:
        model: the folder of a checkpoint, or the name of a repository on the Hugging Face Hub. A folder goes first.
        dtype: of the parameters, float32 or bfloat16, whatever that of the files.
        revision: branch, tag or commit of the repository; None: the main branch.
        cache_dir: where the snapshot is kept; None: that of huggingface_hub. HF_HUB_OFFLINE=1 takes what is there.
        config: changes to Megatron's TransformerConfig, such as `recompute_granularity='full'`.

    Collective over all ranks: the first one downloads, then the first of each other host; every TP group reads its
    weights once and scatters them. An error on one rank is the same error on all. Errors: ValueError for a folder that
    is no such checkpoint, an architecture that would give other numbers here, a layout that does not divide it;
    ImportError where the extra is missing; ConnectionError where the hub cannot be reached.
    """
    ranks = Ranks(what='checkpoint')
    ranks.together(partial(_check_call, dtype, config))
    folder, commit = _folder(ranks, model, revision, cache_dir)
    hf = ranks.together(partial(read_config, folder))
    ranks.check_alike('config.json', hashlib.sha256((folder / 'config.json').read_bytes()).hexdigest())
    ranks.together(partial(_check_layout, hf))
    bridge = ranks.together(partial(hf_bridge.bridge_for, hf, folder, dtype, **config))
    chunks = hf_bridge.chunks_of(bridge)
    taken = set().union(*ranks.gather(hf_bridge.names_of(bridge, chunks)))
    ranks.together(partial(hf_files.check_tensors, folder, hf, taken))
    bridge.load_weights(chunks, str(folder), memory_efficient=True)  # a tensor at a time
    if dtype is torch.bfloat16:
        from megatron.core.transformer.module import Float16Module

        chunks = [Float16Module(bridge.config, chunk) for chunk in chunks]
    return Loaded(chunks, hf.vocab_size, bridge.config, folder, commit)


def save(
    folder: str | Path,
    chunks: Any,
    like: Loaded | str | Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Writes chunks as a Hugging Face checkpoint: safetensors, and configuration and tokenizer of the one they came
    from.

    Written beside `folder` and then put in its place, so that no half of a checkpoint is ever there; an interrupted
    call leaves a hidden folder, `.NAME.….part`, which can be removed.

    Args:
        folder: must not be there, or be empty.
        chunks: of this rank, wrapped or not: one or a list, as `load_chunks` gave them and training changed them.
        like: what `load_chunks` returned, or the folder of the checkpoint.
        dtype: of the weights in the files; None: that of the parameters, so that nothing is lost.
        overwrite: replaces a checkpoint in `folder`.

    Collective over all ranks: each tensor is broadcast over PP and gathered over TP, one at a time; the first rank
    keeps one file's worth and writes. An error on one rank is the same error on all: ValueError for a folder that
    cannot be written to, OSError of the disk.
    """
    ranks = Ranks(what='checkpoint')
    source = like.folder if isinstance(like, Loaded) else Path(like).expanduser().absolute()
    target = Path(folder).expanduser().absolute()
    ranks.together(partial(_check_saving, ranks, target, source, dtype, overwrite))
    hf = ranks.together(partial(read_config, source))
    chunks = list(chunks) if isinstance(chunks, list | tuple) else [chunks]
    bridge = ranks.together(partial(hf_bridge.bridge_for, hf, source, torch.float32))
    there = set().union(*ranks.gather(ranks.together(partial(_tensors_of, bridge, chunks))))
    ranks.together(partial(_check_whole, hf, there))
    tensors = bridge.export_weights(chunks)
    ranks.together(
        partial(_write, tensors, target, source, dtype, overwrite) if ranks.is_first else partial(_run, tensors)
    )


def _check_call(dtype: Any, config: dict[str, Any]) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    check_megatron_groups()
    if dtype not in _DTYPES:
        raise ValueError(f'dtype must be torch.float32 or torch.bfloat16, got {dtype!r}')
    reject_unknown(config, [field.name for field in fields(TransformerConfig)], 'TransformerConfig')
    if not torch.cuda.is_available() and not cpu.installed():
        raise ValueError(
            'there is no GPU: call twinkle_megatron.megatron.cpu.install() first, which lets Megatron-Core run on CPU'
        )


def _folder(
    ranks: Ranks, model: str | Path, revision: str | None, cache_dir: str | Path | None
) -> tuple[Path, str | None]:
    """The folder on this machine, and the commit of a repository."""
    ranks.check_alike('models', (str(model), revision))
    here = ranks.gather(ranks.together(partial(names_folder, model, revision)))
    if any(here) and not all(here):
        raise ValueError(f'{model} must be a folder on every host, and is one on {sum(here)} of {len(here)} ranks only')
    if all(here):
        return Path(model).expanduser().absolute(), None
    found = ranks.fetched(lambda at: snapshot(str(model), at, cache_dir), revision)
    return found.folder, found.commit


def snapshot(
    repository: str, revision: str | None = None, cache_dir: str | Path | None = None, offline: bool | None = None
) -> Snapshot:
    """The checkpoint of a repository on the Hugging Face Hub; see `twinkle_megatron.hub.fetch`. Not collective."""
    try:
        return fetch('hf', repository, revision, cache_dir, hf_files.WANTED, offline)
    except (ValueError, ConnectionError) as error:
        raise type(error)(f'{error}; nor is there a folder {repository} here, in {Path.cwd()}') from error


def names_folder(model: str | Path, revision: str | None) -> bool:
    """Whether a folder is meant, not a repository. ValueError where it can be neither."""
    path = Path(model).expanduser()
    if path.exists() or isinstance(model, Path) or not _ID.fullmatch(model):
        if not path.exists():
            raise ValueError(
                f'{model} does not exist (looked from {Path.cwd()}), and is no name of a repository, as group/name'
            )
        if revision is not None:
            raise ValueError(f'a folder has no revision, got {revision!r} for {model}')
        return True
    return False


def _check_layout(hf: Any) -> None:
    from megatron.core import parallel_state as ps

    check_layout(
        hf,
        tp=ps.get_tensor_model_parallel_world_size(),
        pp=ps.get_pipeline_model_parallel_world_size(),
        vpp=ps.get_virtual_pipeline_model_parallel_world_size() or 1,
    )


def _check_saving(ranks: Ranks, target: Path, source: Path, dtype: Any, overwrite: bool) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f'dtype must be one of floating point numbers, or None, got {dtype!r}')
    if ranks.is_first:
        hf_files.check_target(target, source, overwrite)


def _tensors_of(bridge: Any, chunks: Iterable[Any]) -> set[str]:
    """The tensors of the checkpoint that this rank's chunks have."""
    plain = [package('mbridge.core.util').unwrap_model(chunk) for chunk in chunks]
    for chunk in plain:
        rows = getattr(chunk, 'vocab_size', bridge.padded_vocab_size)
        if rows != bridge.padded_vocab_size:
            raise ValueError(
                f'chunks must have {bridge.padded_vocab_size} rows of vocabulary, as load_chunks pads them, got {rows}'
            )
    return hf_bridge.names_of(bridge, plain)


def _check_whole(hf: Any, there: set[str]) -> None:
    lacks = sorted(set(hf_files.shapes_by_config(hf)) - there)
    if lacks:
        raise ValueError(
            f'chunks must be all that this rank has, and no rank has {lacks[0]}; under the interleaved schedule there '
            'are several: give the list'
        )


def _write(tensors: Any, target: Path, source: Path, dtype: torch.dtype | None, overwrite: bool) -> None:
    """On the first rank. The others take part in each tensor: it goes on asking for them after an error."""
    with ExitStack() as stack:
        stack.callback(_run, tensors)
        made = stack.enter_context(hf_files.written_whole(target, overwrite))
        writer = hf_files.Writer(made, dtype)
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.finish()
        (written,) = writer.dtypes if len(writer.dtypes) == 1 else {torch.float32}
        hf_files.copy_beside(source, made, written)


def _run(tensors: Iterable[Any]) -> None:
    for _ in tensors:
        pass
