"""Saving as a Hugging Face checkpoint: whole or not at all, and never over what is not to be lost."""

import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import RankFailure, run_ranks

pytest.importorskip('transformers', reason='the extra hf is not installed')

from tests import tiny_checkpoint as tiny
from tests.megatron.test_huggingface import assert_same_tensors, groups
from twinkle_megatron.megatron import hf_files
from twinkle_megatron.megatron.huggingface import load_chunks, save


@pytest.fixture(scope='module', autouse=True)
def _mbridge():
    """Imported where ranks are forked from, so that each need not; not while tests are collected, as that is slow."""
    import mbridge.models  # noqa: F401


def messages(ranks, case, *args, **more):
    """The error of a case, the same on every rank."""
    outcomes = run_ranks(partial(case, **more), ranks, *args, timeout=30, collect_errors=True)
    assert len({(outcome.error, outcome.message) for outcome in outcomes}) == 1
    return outcomes[0].error, outcomes[0].message


def saves(folder, *targets, **more):
    groups(1, 2)
    loaded = load_chunks(folder)
    for target in targets:
        save(target, loaded.chunks, loaded, **more)


def test_a_folder_that_is_not_to_be_lost_is_not_written_to(tmp_path):
    source = tiny.write(tmp_path / 'source')
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full/mine').write_text('mine')
    (tmp_path / 'file').write_text('mine')
    (tmp_path / 'empty').mkdir()
    for target, overwrite, message in (
        ('full', False, 'holds files already; remove it, or name another folder'),
        ('full', True, 'holds files and no config.json, so it is no checkpoint to overwrite'),
        ('file', False, 'must be a folder, or not be there yet'),
        ('file/out', False, f'cannot be made: {tmp_path}/file is no folder'),
        ('source', True, 'must be another folder than that of the checkpoint that was loaded'),
    ):
        assert message in messages(2, saves, source, tmp_path / target, overwrite=overwrite)[1]
    before = tiny.tensors(source)
    run_ranks(partial(saves, overwrite=True), 2, source, *[tmp_path / name for name in ('empty', 'new/out', 'empty')])
    assert tiny.tensors(source).keys() == before.keys()
    assert_same_tensors(source, tmp_path / 'empty')
    assert (tmp_path / 'full/mine').read_text() == 'mine'
    assert not [path for path in tmp_path.rglob('*') if path.name.startswith('.')]


def test_what_stands_beside_the_weights_comes_along_but_no_code(tmp_path):
    source = tiny.write(tmp_path / 'source')
    for name in ('merges.txt', 'LICENSE', 'chat_template.jinja', 'code.py', 'README.md', 'pytorch_model.bin'):
        (source / name).write_text(name)
    run_ranks(saves, 2, source, tmp_path / 'out')
    names = {path.name for path in (tmp_path / 'out').iterdir()}
    expected = {'config.json', 'generation_config.json', 'model.safetensors'}
    assert names == expected | {'merges.txt', 'LICENSE', 'chat_template.jinja'}


def saves_some(folder, out):
    groups(1, 2, 2)
    loaded = load_chunks(folder)
    save(out, loaded.chunks[0], loaded)


def saves_more(folder, out):
    groups()
    loaded = load_chunks(folder)
    loaded.chunks[0].adapter = torch.nn.Linear(2, 2)
    save(out, loaded.chunks, loaded)


def test_chunks_that_are_not_the_whole_model_or_more_are_refused(tmp_path):
    source = tiny.write(tmp_path / 'source')
    assert (
        'chunks must be all that this rank has, and no rank has ' in messages(2, saves_some, source, tmp_path / 'o')[1]
    )
    message = 'chunks have a parameter that the checkpoint has no place for: adapter.weight'
    assert message in messages(1, saves_more, source, tmp_path / 'out')[1]
    assert [path.name for path in tmp_path.iterdir()] == ['source']


def interrupted(folder, out, how):
    """Saves, and is stopped at the second tensor on the first rank."""
    groups(1, 2)
    loaded = load_chunks(folder)
    add, rank = hf_files.Writer.add, torch.distributed.get_rank()

    def stops(self, name, tensor):
        if self._waiting:
            how()
        add(self, name, tensor)

    if rank == 0:
        hf_files.Writer.add = stops
    save(out, loaded.chunks, loaded, overwrite=True)


def full():
    raise OSError(28, 'No space left on device')


def test_a_full_disk_is_told_on_every_rank_and_leaves_what_was_there(tmp_path):
    source = tiny.write(tmp_path / 'source')
    shutil.copytree(source, tmp_path / 'out')
    error, told = messages(2, interrupted, source, tmp_path / 'out', full)
    assert error == 'OSError'
    assert 'No space left on device' in told
    assert {path.name for path in tmp_path.iterdir()} == {'source', 'out'}
    assert_same_tensors(source, tmp_path / 'out')


def test_a_process_killed_while_it_writes_leaves_what_was_there(tmp_path):
    source = tiny.write(tmp_path / 'source')
    shutil.copytree(source, tmp_path / 'out')
    with pytest.raises(RankFailure, match='SIGKILL'):
        run_ranks(interrupted, 2, source, tmp_path / 'out', partial(signal.raise_signal, signal.SIGKILL), timeout=20)
    assert_same_tensors(source, tmp_path / 'out')


def test_of_two_that_write_to_one_folder_the_second_loses_nothing(tmp_path):
    target = tmp_path / 'out'

    def write(text, then=None):
        with hf_files.written_whole(target, overwrite=False) as made:
            (made / 'config.json').write_text(text)
            if then:
                then()

    with pytest.raises(ValueError, match='Did another process write there meanwhile') as caught:
        write('second', then=partial(write, 'first'))
    assert (target / 'config.json').read_text() == 'first'
    kept = Path(str(caught.value).rsplit(' ', 1)[1])
    assert (kept / 'config.json').read_text() == 'second'
