"""Hugging Face checkpoints as Megatron chunks: the log-probs of `transformers`, and the same tensors back."""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks

pytest.importorskip('transformers', reason='the extra hf is not installed')

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from safetensors.torch import save_file

from tests import tiny_checkpoint as tiny
from twinkle_megatron import MegatronModel
from twinkle_megatron.loss import CrossEntropyLoss
from twinkle_megatron.megatron import hf_bridge, hf_files
from twinkle_megatron.megatron.cpu_attention import cpu_layer_spec
from twinkle_megatron.megatron.huggingface import load_chunks, save

BF16 = torch.bfloat16


@pytest.fixture(scope='module', autouse=True)
def _mbridge():
    """Imported where ranks are forked from, so that each need not; not while tests are collected, as that is slow."""
    import mbridge.models  # noqa: F401


def groups(tp=1, pp=1, vpp=1):
    """Megatron's groups of that layout."""
    stages = vpp if vpp > 1 else None
    parallel_state.initialize_model_parallel(tp, pp, virtual_pipeline_model_parallel_size=stages)


def model_of(loaded, lr=None):
    """A model to measure with, or to train by plain gradient descent."""
    chunks = [DistributedDataParallel(loaded.config, DistributedDataParallelConfig(), c) for c in loaded.chunks]
    model = MegatronModel(chunks, vocab_size=loaded.vocab_size)
    model.set_loss(CrossEntropyLoss)
    return model


def log_probs(model, ids):
    """Of each token but the first its log-prob, on the last stage."""
    out = model.forward_only(inputs=[{'input_ids': ids[:, :-1], 'labels': ids[:, 1:]}])
    return out['logps'][0] if out['logps'] else None


def there_and_back(folder, out, layout, **load):
    """The log-probs of a checkpoint under a layout, and those after a step of training; it is saved before and after
    that."""
    groups(*layout)
    loaded = load_chunks(folder, **load)
    model, ids = model_of(loaded), tiny.tokens()
    before = log_probs(model, ids)
    save(out / 'same', model.chunks if len(model.chunks) > 1 else model.chunks[0], loaded)
    if load:
        return [before]
    model.forward_backward(inputs=[{'input_ids': ids[:, :-1], 'labels': ids[:, 1:]}])
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            parameter.data.sub_(0.05 * parameter.main_grad)
    save(out / 'trained', model.chunks, folder)
    return [before, log_probs(model, ids)]


def on_ranks(folder, out, layout, **more):
    found = run_ranks(partial(there_and_back, **more), layout[0] * layout[1], folder, out, layout, timeout=60)
    return [x.double() for x in next(of for of in found if of[0] is not None)]


def assert_same_tensors(one, other):
    left, right = tiny.tensors(one), tiny.tensors(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize(
    ('kind', 'tied', 'layout'),
    [
        ('qwen2', False, (2, 2)),
        ('qwen2', True, (2, 2)),
        ('qwen3', False, (2, 1)),
        ('qwen3', True, (2, 2, 2)),
        ('llama', True, (1, 2)),
    ],
)
def test_numbers_are_those_of_transformers_and_every_bit_comes_back(kind, tied, layout, tmp_path):
    source = tiny.write(tmp_path / 'source', kind, tie_word_embeddings=tied)
    before, after = on_ranks(source, tmp_path, layout)
    expected = tiny.log_probs(source, tiny.tokens())
    assert expected.std() > 0.9  # opinions, so that a wrong weight shows
    torch.testing.assert_close(before, expected, rtol=0, atol=1e-5)
    assert_same_tensors(source, tmp_path / 'same')
    assert json.loads((tmp_path / 'same/config.json').read_text()) == json.loads((source / 'config.json').read_text())

    stepped, saved = tiny.after_a_step(source, tiny.tokens(), 0.05), tiny.tensors(tmp_path / 'trained')
    assert saved.keys() == stepped.keys()
    for name, tensor in stepped.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-5, msg=name)
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(after, tiny.log_probs(tmp_path / 'trained', tiny.tokens()), rtol=0, atol=1e-5)


def test_a_bfloat16_checkpoint_in_several_files_is_read_exactly_and_stays_so(tmp_path, monkeypatch):
    source = tiny.write(tmp_path / 'source', 'qwen2', BF16, max_shard_size='20KB')
    assert len(list(source.glob('*.safetensors'))) > 2
    monkeypatch.setattr(hf_files, 'SHARD_BYTES', 30_000)
    found = on_ranks(source, tmp_path, (2, 1))[0]
    torch.testing.assert_close(found, tiny.log_probs(source, tiny.tokens()), rtol=0, atol=1e-5)
    torch.testing.assert_close(found, tiny.log_probs(tmp_path / 'same', tiny.tokens()), rtol=0, atol=1e-5)
    files = sorted(tmp_path.joinpath('same').glob('*.safetensors'))
    assert len(files) > 2
    assert all(file.stat().st_size < 40_000 or 'embed' in file.name for file in files[1:-1])
    left, right = tiny.tensors(source), tiny.tensors(tmp_path / 'same')
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name].float(), right[name]) for name in left)
    assert json.loads((tmp_path / 'same/config.json').read_text())['dtype'] == 'float32'


def test_bfloat16_parameters_are_saved_as_such(tmp_path):
    source = tiny.write(tmp_path / 'source', 'qwen3', BF16)
    found = on_ranks(source, tmp_path, (2, 2), dtype=BF16)[0]
    expected = tiny.log_probs(source, tiny.tokens())
    ours, theirs = ((x - expected).abs().mean() for x in (found, tiny.log_probs(source, tiny.tokens(), BF16)))
    assert ours < 2 * theirs  # both round every product to bfloat16
    assert_same_tensors(source, tmp_path / 'same')


def test_two_checkpoints_in_one_process_do_not_change_each_other(tmp_path):
    tied = tiny.write(tmp_path / 'tied', 'qwen3', tie_word_embeddings=True)
    own = tiny.write(tmp_path / 'own', 'qwen2')

    def both():
        groups()
        loaded = load_chunks(tied), load_chunks(own)
        return [log_probs(model_of(x), tiny.tokens()) for x in loaded]

    for found, folder in zip(run_ranks(both, 1)[0], (tied, own)):
        torch.testing.assert_close(found.double(), tiny.log_probs(folder, tiny.tokens()), rtol=0, atol=1e-5)


def test_the_local_spec_differs_from_that_of_transformer_engine_by_the_names_of_two_norms(tmp_path):
    def names():
        groups()
        chunk = load_chunks(tiny.write(tmp_path / 'any', 'qwen3')).chunks[0]
        return [name.split('.', 3)[-1] for name, _ in chunk.named_parameters() if name.startswith('decoder.layers.0')]

    assert cpu_layer_spec(normalization='RMSNorm') is not None
    found = run_ranks(names, 1)[0]
    changed = {f'.{name}': hf_bridge.te_name(f'.{name}') for name in found}
    assert {a: b for a, b in changed.items() if a != b} == hf_bridge.TE_NAMES
    assert hf_bridge.te_name('decoder.layers.3.input_layernorm.weight') == (
        'decoder.layers.3.self_attention.linear_qkv.layer_norm_weight'
    )
    assert hf_bridge.te_name('decoder.final_layernorm.weight') == 'decoder.final_layernorm.weight'


# Wrong calls: one message on every rank.


def told(calls, layout=(1, 1)):
    """The error of each call of `load_chunks`; the ranks go on after it."""
    groups(*layout)
    found = []
    for keywords in calls:
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            load_chunks(**keywords)
        found.append(str(caught.value))
    return found


def changed(folder, **settings):
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def without(folder, name):
    tensors = tiny.tensors(folder)
    del tensors[name]
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})


ROPE = {'rope_type': 'yarn', 'factor': 4.0, 'rope_theta': 1000.0}


BROKEN = [
    (lambda f: (f / 'config.json').unlink(), 'has no config.json, so it is no Hugging Face checkpoint'),
    (lambda f: (f / 'config.json').write_text('{'), 'config.json cannot be read: '),
    (partial(changed, model_type='gpt2'), 'must have a "model_type" of llama, qwen2, qwen3, got \'gpt2\''),
    (partial(changed, model_type='mine'), 'config.json cannot be read: '),
    (partial(changed, rope_parameters=ROPE), "rotary embeddings without scaling, got rope_type 'yarn'"),
    (
        partial(changed, use_sliding_window=True, sliding_window=4, max_window_layers=2, layer_types=None),
        "must have full attention in every layer, got ['full_attention', 'sliding_attention']",
    ),
    (partial(changed, quantization_config={'quant_method': 'fp8'}), 'must be of plain weights'),
    (partial(changed, hidden_act='gelu'), 'must have "hidden_act" silu, got \'gelu\''),
    (partial(changed, num_key_value_heads=1), 'num_key_value_heads 1 of the checkpoint must be a multiple of tp 2'),
    (
        partial(changed, num_hidden_layers=3, layer_types=None),
        'num_hidden_layers 3 of the checkpoint must be a multiple of pp 2',
    ),
    (partial(changed, vocab_size=300), 'must have the shape (300, 32) that its config.json tells, got (301, 32)'),
    (partial(changed, attention_bias=True), 'that Megatron has no place for here, such as model.layers.0.'),
    (lambda f: without(f, 'model.layers.3.mlp.up_proj.weight'), 'must hold model.layers.3.mlp.up_proj.weight'),
    (lambda f: (f / 'model.safetensors').unlink(), 'must hold weights in *.safetensors, and has none'),
    (
        lambda f: (f / 'model.safetensors').write_bytes((f / 'model.safetensors').read_bytes()[:-100]),
        'was the copy or the download interrupted?',
    ),
]


def test_a_checkpoint_that_would_not_give_its_numbers_is_refused_on_every_rank(tmp_path):
    whole = tiny.write(tmp_path / 'whole', 'qwen3')
    folders = [tmp_path / str(number) for number in range(len(BROKEN))]
    for folder, (breaks, _) in zip(folders, BROKEN):
        shutil.copytree(whole, folder)
        breaks(folder)
    found = run_ranks(told, 4, [{'model': folder} for folder in folders], (2, 2), timeout=60)
    assert found[1:] == found[:-1]
    for (_, message), said in zip(BROKEN, found[0], strict=True):
        assert message in said


def test_calls_that_cannot_be_meant_are_told(tmp_path):
    folder = tiny.write(tmp_path / 'source')
    calls = (
        ({'model': tmp_path / 'none'}, f'{tmp_path}/none does not exist'),
        ({'model': str(folder), 'recompute': 'full'}, "TransformerConfig has no argument 'recompute'"),
        ({'model': folder, 'dtype': torch.float16}, 'dtype must be torch.float32 or torch.bfloat16'),
        ({'model': folder / 'config.json'}, 'must be the folder of a Hugging Face checkpoint, and is a file'),
    )
    for (_, message), said in zip(calls, run_ranks(told, 1, [call for call, _ in calls])[0], strict=True):
        assert message in said


def runs(code, folder):
    os.chdir(folder)
    exec(code, {'__name__': 'finetune'})


def test_the_example_of_the_docs_trains_on_four_ranks(tmp_path):
    folder = tiny.write(tmp_path / 'model', 'qwen3', tie_word_embeddings=True)
    page = (Path(__file__).parents[2] / 'docs/huggingface.md').read_text()
    (code,) = re.findall(r'```python\n(.*?)```', page, flags=re.DOTALL)
    code = code.replace("dist.init_process_group('gloo')\n", '').replace("'Qwen/Qwen3-0.6B'", repr(str(folder)))
    run_ranks(runs, 4, code, tmp_path)
    before, after = (tiny.log_probs(x, tiny.tokens()) for x in (folder, tmp_path / 'trained'))
    assert not torch.equal(before, after)
