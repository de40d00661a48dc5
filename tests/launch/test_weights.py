"""Weights are the same whole tensors whatever the layout, and a file of them is whole or not there."""

import numpy as np
import pytest
from megatron.core import parallel_state
from ranks import run_ranks

from launch import gpt, options, weights
from tests.launch.tiny_policy import VOCAB


def taken(path, tp, pp, *more):
    """Builds the model on this layout from the file, and puts it together again."""
    parallel_state.initialize_model_parallel(tp, pp)
    args = options.parse([f'--tp={tp}', f'--pp={pp}', '--steps=1', f'--init-weights={path}', *more])
    return gpt.whole_tensors(gpt.build(args, VOCAB)[0].module, VOCAB)


@pytest.mark.parametrize(('ranks', 'tp', 'pp'), [(2, 2, 1), (4, 2, 2), (4, 4, 1), (2, 1, 1)])
def test_every_layout_takes_its_slices_and_gives_back_the_same_whole(policy_file, ranks, tp, pp):
    expected = weights.read(policy_file)
    assert expected['embedding.word_embeddings.weight'].shape == (VOCAB, 32)
    assert len([name for name in expected if '.layers.2.' in name]) > 5  # numbered in the whole model
    for found in run_ranks(taken, ranks, policy_file, tp, pp):
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_the_sizes_and_the_tokenizer_come_with_the_weights(policy_file):
    args = options.parse([f'--init-weights={policy_file}'])
    assert (args.layers, args.hidden_size, args.heads) == (2, 32, 4)
    assert weights.read_about(policy_file).vocab_size == VOCAB


def test_a_missing_tensor_and_one_of_another_shape_are_named(policy_file):
    about, tensors = weights.read_about(policy_file), weights.read(policy_file)
    path = policy_file.with_name('broken.npz')
    for broken in ({}, {'decoder.final_layernorm.weight': np.ones(7, dtype=np.float32)}):
        kept = {name: x for name, x in tensors.items() if name != 'decoder.final_layernorm.weight'}
        weights.save(path, kept | broken, about)
        with pytest.raises(Exception, match=r'must hold decoder.final_layernorm.weight of shape \[32\], got \[[07]\]'):
            run_ranks(taken, 1, path, 1, 1)


def test_an_interrupted_write_leaves_the_file_that_was_there(policy_file, tmp_path, monkeypatch):
    about, tensors = weights.read_about(policy_file), weights.read(policy_file)
    path = tmp_path / 'new' / 'w.npz'
    weights.save(path, tensors, about)
    before = path.read_bytes()

    def stop(file, **arrays):
        file.write(b'half')
        raise KeyboardInterrupt

    monkeypatch.setattr(np, 'savez', stop)
    with pytest.raises(KeyboardInterrupt):
        weights.save(path, tensors, about)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize('content', [None, b'', b'PK\x03\x04 half a file', b'{"text": "a"}'])
def test_a_file_that_is_none_is_told_in_one_line(tmp_path, content, capsys):
    path = tmp_path / 'w.npz'
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit):
        options.parse([f'--init-weights={path}'])
    said = 'does not exist' if content is None else 'is no file of weights, as --save-weights writes them'
    assert f'error: {path} {said}' in capsys.readouterr().err


def test_arrays_of_another_kind_are_no_weights(tmp_path):
    np.savez(tmp_path / 'other.npz', x=np.ones(3))
    with pytest.raises(ValueError, match='is no file of weights'):
        weights.read(tmp_path / 'other.npz')
