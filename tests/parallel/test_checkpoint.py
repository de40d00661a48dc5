"""Checkpoints: training goes on to the bit, in another layout to rounding, and whatever ends a save loses nothing."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import re
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from invariance import UNEVEN, micro_batches
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from ranks import run_ranks
from tiny_gpt import Layout, Spec, build, global_name, initialize, shard_of, unwrapped, wrap

from twinkle_megatron import MegatronModel
from twinkle_megatron.groups import Groups
from twinkle_megatron.megatron import checkpoint
from twinkle_megatron.megatron.checkpoint import Training, latest_step, load_checkpoint, save_checkpoint
from twinkle_megatron.megatron.embedding import add_value_head

SPEC = Spec(vocab_size=62, pad_vocab_to=2, dtype=torch.float32)  # padded to 62 under TP 1, to 64 under TP 2
DROPOUT = dataclasses.replace(SPEC, layers=1, config={'hidden_dropout': 0.2, 'attention_dropout': 0.1})
HALF = dataclasses.replace(DROPOUT, dtype=torch.bfloat16)
DISTRIBUTED = {'distributed_optimizer': True}
OVERLAPPED = {'distributed_optimizer': True, 'overlap': True, 'overlap_param_gather': True}


@pytest.fixture(scope='module', autouse=True)
def _faster():
    """Megatron's distributed optimizer collects garbage, which in a rank looks through all that the parent has
    imported."""
    gc.freeze()
    yield
    gc.unfreeze()


def trainer(spec, layout, ddp=None, seed=1234, optimizer=True, scheduler=True, head=False):
    """A model that is trained by Adam with a warm-up."""
    initialize(layout, seed)
    chunks = build(spec, layout)
    if head:
        add_value_head(chunks, std=0.5, seed=seed)
    chunks = wrap(chunks, **(ddp or {}))
    config = OptimizerConfig(
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        bf16=spec.dtype is torch.bfloat16,
        params_dtype=spec.dtype,
        use_distributed_optimizer=bool((ddp or {}).get('distributed_optimizer')),
        overlap_param_gather=bool((ddp or {}).get('overlap_param_gather')),
    )
    adam = get_megatron_optimizer(config, chunks) if optimizer else None
    warm_up = (
        OptimizerParamScheduler(adam, 0.0, 1e-2, 1e-3, 4, 20, 'cosine', 0.1, 0.1, 20, 'constant') if adam else None
    )
    model = MegatronModel(chunks, adam, warm_up if scheduler else None, vocab_size=spec.vocab_size)
    model.set_loss('CrossEntropyLoss')
    return model


def training_of(model):
    engine = model._engine
    return Training(engine.chunks, engine.models, model.groups, model.optimizer, model.scheduler, model.vocab_size)


def steps(model, spec, numbers):
    """Losses of these steps, each of a batch of its own."""
    losses = []
    for number in numbers:
        split = UNEVEN[dist.get_world_size(model.groups.dp)]
        batches = micro_batches(spec, split, dist.get_rank(model.groups.dp), seed=number)
        losses.append(model.forward_backward(batches)['loss'])
        model.clip_grad_and_step()
    return losses


@contextmanager
def gathered(model):
    """The weights are whole on every rank, also where Megatron gathers them in the forward pass."""
    waiting = [chunk for chunk in model.chunks if getattr(chunk, 'remove_forward_pre_hook_handles', None)]
    for chunk in waiting:
        chunk.disable_forward_pre_hook()
    yield
    for chunk in waiting:
        chunk.enable_forward_pre_hook()


def weights(model):
    with gathered(model):
        return [p.detach().clone() for chunk in model.chunks for p in chunk.parameters()]


def spoil(model):
    """Weights that must not be left after a load."""
    with gathered(model), torch.no_grad():
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(0.5)


# ---- the same layout


def _resumed(spec, layout, ddp, folder):
    model = trainer(spec, layout, ddp)
    steps(model, spec, range(2))
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    save_checkpoint(folder, training_of(model), step=2, state={'seen': [2, torch.tensor(7)]})
    drawn = random.random(), np.random.rand(), np.random.randn()
    expected = steps(model, spec, range(2, 5)), weights(model)

    model = trainer(spec, layout, ddp, seed=99)
    spoil(model)
    state = load_checkpoint(folder, training_of(model))
    assert state == {'seen': [2, torch.tensor(7)], 'step': 2}
    assert (random.random(), np.random.rand(), np.random.randn()) == drawn
    assert steps(model, spec, range(2, 5)) == expected[0]
    assert all(map(torch.equal, weights(model), expected[1]))
    return expected[0]


@pytest.mark.parametrize(
    ('spec', 'layout', 'ddp'),
    [
        (DROPOUT, Layout(dp=2), {}),
        (DROPOUT, Layout(dp=2), DISTRIBUTED),
        (DROPOUT, Layout(dp=2), OVERLAPPED),
        (dataclasses.replace(DROPOUT, layers=2), Layout(tp=2, pp=2), DISTRIBUTED),
        (dataclasses.replace(DROPOUT, layers=4), Layout(pp=2, vpp=2), DISTRIBUTED),
        pytest.param(HALF, Layout(dp=2), {}, marks=pytest.mark.long),
        (HALF, Layout(dp=2), DISTRIBUTED),
        pytest.param(dataclasses.replace(DROPOUT, experts=4), Layout(dp=2, ep=2), DISTRIBUTED, marks=pytest.mark.long),
    ],
    ids=['dp2', 'dp2-distributed', 'dp2-overlapped', 'tp2-pp2', 'vpp2', 'bf16', 'bf16-distributed', 'experts'],
)
def test_training_goes_on_to_the_bit(spec, layout, ddp, tmp_path):
    losses = run_ranks(_resumed, layout.world, spec, layout, ddp, tmp_path)
    assert all(one == losses[0] for one in losses)


def _saved_and_back(layout, ddp, folder):
    model = trainer(DROPOUT, layout, ddp)
    expected = steps(model, DROPOUT, range(4)), weights(model)
    model = trainer(DROPOUT, layout, ddp)
    before = steps(model, DROPOUT, range(2))
    save_checkpoint(folder, training_of(model), step=2)
    assert before + steps(model, DROPOUT, range(2, 4)) == expected[0]
    assert all(map(torch.equal, weights(model), expected[1]))
    load_checkpoint(folder, training_of(model), step=2)
    assert steps(model, DROPOUT, range(2, 4)) == expected[0][2:]
    assert all(map(torch.equal, weights(model), expected[1]))


def test_saving_disturbs_nothing_and_training_can_be_set_back(tmp_path):
    run_ranks(_saved_and_back, 2, Layout(dp=2), OVERLAPPED, tmp_path)


def _children(folder):
    model = trainer(DROPOUT, Layout(dp=2))
    save_checkpoint(folder, training_of(model), step=1)
    return [child.name() for child in psutil.Process().children(recursive=True)]


def test_a_save_leaves_no_process_behind_that_a_signal_to_the_job_could_end(tmp_path):
    assert run_ranks(_children, 2, tmp_path) == [[], []]


def _before_the_first_step(folder, ddp):
    model = trainer(DROPOUT, Layout(), ddp)
    save_checkpoint(folder, training_of(model), step=0)
    expected = steps(model, DROPOUT, range(3))
    model = trainer(DROPOUT, Layout(), ddp, seed=9)
    spoil(model)
    assert load_checkpoint(folder, training_of(model)) == {'step': 0}
    return steps(model, DROPOUT, range(3)), expected


@pytest.mark.parametrize('ddp', [{}, DISTRIBUTED], ids=['plain', 'distributed'])
def test_a_checkpoint_from_before_the_first_step(ddp, tmp_path):
    (found, expected), *_ = run_ranks(_before_the_first_step, 1, tmp_path, ddp)
    assert found == expected


def _bare_trainer(layout, seed=1234):
    initialize(layout, seed)
    chunks = build(DROPOUT, layout)
    adam = torch.optim.AdamW(chunks[0].parameters(), lr=1e-2)
    model = MegatronModel(chunks, adam, torch.optim.lr_scheduler.MultiStepLR(adam, [1, 3], 0.5), vocab_size=62)
    model.set_loss('CrossEntropyLoss')
    return model


def _bare(layout, folder):
    model = _bare_trainer(layout)
    steps(model, DROPOUT, range(2))
    save_checkpoint(folder, training_of(model), step=2)
    expected = steps(model, DROPOUT, range(2, 5)), weights(model)
    model = _bare_trainer(layout, seed=9)
    spoil(model)
    load_checkpoint(folder, training_of(model))
    assert steps(model, DROPOUT, range(2, 5)) == expected[0]
    assert all(map(torch.equal, weights(model), expected[1]))
    assert model.optimizer.param_groups[0]['lr'] == 1e-2 / 4


def _bare_elsewhere(folder):
    model = _bare_trainer(Layout())
    with pytest.raises(ValueError, match='torch optimizer can be loaded only in the layout'):
        load_checkpoint(folder, training_of(model))
    before = weights(model)
    assert load_checkpoint(folder, training_of(model), weights_only=True)['step'] == 2
    assert not all(map(torch.equal, weights(model), before))


def test_bare_chunks_with_a_torch_optimizer_go_on_to_the_bit(tmp_path):
    run_ranks(_bare, 1, Layout(), tmp_path / 'one')
    run_ranks(_bare, 2, Layout(tp=2), tmp_path / 'two')
    run_ranks(_bare_elsewhere, 1, tmp_path / 'two')


# ---- another layout


def named_weights(model):
    """`{global name: (dim, index, count, values)}` of this rank, see `shard_of`."""
    out = {}
    for chunk in map(unwrapped, model.chunks):
        for local, parameter in chunk.named_parameters():
            name = global_name(chunk, local)
            out[name] = (*shard_of(name, parameter), parameter.detach().clone())
    return out


def _saved(spec, layout, ddp, folder):
    model = trainer(spec, layout, ddp)
    steps(model, spec, range(2))
    save_checkpoint(folder, training_of(model), step=2)
    return named_weights(model), steps(model, spec, range(2, 5))


def _loaded(spec, layout, ddp, folder):
    model = trainer(spec, layout, ddp, seed=9)
    spoil(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        load_checkpoint(folder, training_of(model))
    said = [str(w.message) for w in caught if 'random numbers are not restored' in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)
    return named_weights(model), steps(model, spec, range(2, 5))


def whole(ranks, name, vocabulary):
    """A parameter put together from all ranks, without the padding of the vocabulary."""
    parts = {
        index: (dim, count, values) for rank in ranks if name in rank for dim, index, count, values in [rank[name]]
    }
    dim, count, values = parts[0]
    assert len(parts) == count
    out = values if dim < 0 else torch.cat([parts[i][2] for i in range(count)], dim)
    return out[:vocabulary] if 'word_embeddings' in name or 'output_layer' in name else out


@pytest.mark.parametrize(
    ('spec', 'before', 'after', 'ddp'),
    [
        pytest.param(SPEC, Layout(tp=2, pp=2), Layout(), {}, marks=pytest.mark.long),
        (SPEC, Layout(tp=2, pp=2), Layout(), DISTRIBUTED),
        (dataclasses.replace(SPEC, tied=True), Layout(dp=2), Layout(tp=2, pp=2, sp=True), DISTRIBUTED),
    ],
    ids=lambda x: str(x) if isinstance(x, Layout) else None,
)
def test_another_layout_has_the_same_weights_and_goes_on_to_rounding(spec, before, after, ddp, tmp_path):
    saved = run_ranks(_saved, before.world, spec, before, ddp, tmp_path)
    loaded = run_ranks(_loaded, after.world, spec, after, ddp, tmp_path)
    names = {name for named, _ in saved for name in named}
    assert names == {name for named, _ in loaded for name in named}
    for name in names:
        sides = [whole([named for named, _ in side], name, spec.vocab_size) for side in (saved, loaded)]
        assert torch.equal(*sides), name
    for losses in (losses for _, losses in loaded):
        assert losses == pytest.approx(saved[0][1], rel=1e-6)


# ---- heads, weights alone


def _value_head(layout, folder):
    model = trainer(SPEC, layout, head=True)
    expected = weights(model)
    save_checkpoint(folder, training_of(model), step=1)
    other = trainer(SPEC, layout, head=True, seed=5)
    heads = [p for n, p in other.chunks[-1].named_parameters() if 'value_head' in n]
    assert [list(p.shape) for p in heads] == ([[1, 32], [1]] if model.groups.is_last_stage else [])
    if heads:
        heads[1].data.fill_(3.0)
    load_checkpoint(folder, training_of(other))
    assert all(map(torch.equal, weights(other), expected))
    return {n: p.detach().clone() for n, p in other.chunks[-1].named_parameters() if 'value_head' in n}


def _no_head(folder, layout):
    with pytest.raises(ValueError, match=r'another model: this one has no value_head\.'):
        load_checkpoint(folder, training_of(trainer(SPEC, layout)))


def test_a_value_head_is_saved_and_loaded(tmp_path):
    *_, third, fourth = run_ranks(_value_head, 4, Layout(tp=2, pp=2), tmp_path)
    assert len(third) == 2
    assert all(torch.equal(third[name], fourth[name]) for name in third)
    run_ranks(_no_head, 1, tmp_path, Layout())


def _weights_alone(folder, ddp):
    spec = HALF
    model = trainer(spec, Layout(dp=2), ddp)
    steps(model, spec, range(2))
    save_checkpoint(folder, training_of(model), step=2)
    expected = weights(model)
    other = trainer(spec, Layout(dp=2), ddp, seed=9)
    spoil(other)
    states = torch.get_rng_state()
    assert load_checkpoint(folder, training_of(other), weights_only=True) == {'step': 2}
    assert torch.equal(torch.get_rng_state(), states)
    assert other.scheduler.num_steps == 0
    assert all(map(torch.equal, weights(other), expected))
    steps(other, spec, [1])  # its learning rate is 0: the first step of the warm-up
    assert all(map(torch.equal, weights(other), expected)), 'the main weights are not those that were loaded'


@pytest.mark.parametrize('ddp', [{}, DISTRIBUTED, OVERLAPPED], ids=['plain', 'distributed', 'overlapped'])
def test_weights_alone_reach_the_main_weights(ddp, tmp_path):
    run_ranks(_weights_alone, 2, tmp_path, ddp)


# ---- files


TINY = dataclasses.replace(SPEC, layers=1, hidden=8, heads=2)


def tiny(**changes):
    return trainer(dataclasses.replace(TINY, **changes), Layout(dp=2))


def _save_steps(folder, numbers, keep=None):
    model = tiny()
    return [save_checkpoint(folder, training_of(model), step=n, keep=keep) for n in numbers]


def _heard(folder):
    training = training_of(tiny())
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter('always')
        save_checkpoint(folder, training, step=1)
        load_checkpoint(folder, training)
    return [f'{one.category.__name__}: {one.message}' for one in heard]


def test_nothing_is_said_that_only_megatron_could_mend(tmp_path):
    assert run_ranks(_heard, 2, tmp_path) == [[], []]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope='module')
def two_steps(tmp_path_factory):
    """A folder with the checkpoints of steps 1 and 2, dp 2; not to be written to."""
    folder = tmp_path_factory.mktemp('two')
    run_ranks(_save_steps, 2, folder, [1, 2])
    return folder


@pytest.fixture
def copied(two_steps, tmp_path):
    return Path(shutil.copytree(two_steps, tmp_path / 'copy'))


def test_the_last_n_are_kept_and_a_step_may_be_saved_again(tmp_path):
    folder = tmp_path / 'deep' / 'er'
    (paths, _) = run_ranks(_save_steps, 2, folder, [1, 2, 3, 3, 12345678901, 4], 2)
    assert paths[0] == folder / 'step-00000001'
    assert names_in(folder) == ['step-00000003', 'step-00000004', 'step-12345678901']  # a later step is no older one
    assert latest_step(folder) == 12345678901


def test_the_manifest_names_what_there_is(two_steps):
    path = two_steps / 'step-00000002'
    manifest = json.loads((path / 'manifest.json').read_text())
    files = {p.relative_to(path).as_posix(): p.stat().st_size for p in path.rglob('*') if p.is_file()}
    del files['manifest.json']
    assert manifest['files'] == files
    assert {'state.pt', 'tp0-cp0-pp0-dp0.pt', 'tp0-cp0-pp0-dp1.pt', 'megatron/.metadata'} <= files.keys()
    assert manifest['layout'] == {'world': 2, 'tp': 1, 'cp': 1, 'pp': 1, 'dp': 2, 'vpp': 1, 'ep': 1, 'etp': 1}
    assert manifest['parts'] == {'optimizer': ['FP32Optimizer of AdamW'], 'scheduler': 'OptimizerParamScheduler'}
    assert (manifest['format'], manifest['step'], manifest['dtype']) == (1, 2, 'torch.float32')


def _interrupted(folder, failing, how):
    training = training_of(tiny())

    def fail(*_):
        if dist.get_rank() in failing:
            os._exit(9) if how == 'exit' else _raise(OSError(28, 'No space left on device'))
        return {}

    if how == 'in Megatron':
        filesystem_async._write_item = lambda *args, **_: fail()
    else:
        checkpoint.written = fail  # everything is written by now, nothing renamed
    save_checkpoint(folder, training, step=3, keep=1)


def _raise(error):
    raise error


@pytest.mark.parametrize(('how', 'failing'), [('raise', [1]), ('in Megatron', [0])])
def test_an_error_on_one_rank_is_raised_on_all_and_leaves_the_earlier_checkpoints(how, failing, copied):
    outcomes = run_ranks(_interrupted, 2, copied, failing, how, timeout=30, collect_errors=True)
    for outcome in outcomes:
        assert outcome.error == ('OSError' if how == 'raise' else 'RuntimeError')
        where = (
            r'on rank 1: \[Errno 28\]' if how == 'raise' else 'on rank 0: rank 0: RuntimeError: .*(Errno 28|OSError)'
        )
        assert re.match(where, outcome.message), outcome.message
    assert names_in(copied) == ['step-00000001', 'step-00000002']
    assert latest_step(copied) == 2


@pytest.mark.parametrize('failing', [[1], [0, 1]], ids=str)
def test_ranks_that_die_in_a_save_lose_nothing_and_the_next_save_sweeps(failing, copied):
    outcomes = run_ranks(_interrupted, 2, copied, failing, 'exit', timeout=30, collect_errors=True)
    assert all(outcome.error for outcome in outcomes)
    assert latest_step(copied) == 2
    if failing == [0, 1]:
        assert len([name for name in names_in(copied) if name.startswith('.step-00000003.part-')]) == 1
        run_ranks(_save_steps, 2, copied, [4])
        assert names_in(copied) == ['step-00000001', 'step-00000002', 'step-00000004']


def test_one_that_was_about_to_be_replaced_is_found_and_put_back(copied):
    (copied / 'step-00000002').rename(copied / '.step-00000002.replaced')
    assert latest_step(copied) == 2
    run_ranks(_save_steps, 2, copied, [3])
    assert names_in(copied) == ['step-00000001', 'step-00000002', 'step-00000003']
    shutil.copytree(copied / 'step-00000002', copied / '.step-00000002.replaced')
    run_ranks(_save_steps, 2, copied, [3])
    assert names_in(copied) == ['step-00000001', 'step-00000002', 'step-00000003']


def _cut(path):
    file = max((path / 'megatron').glob('*.distcp'), key=lambda p: p.stat().st_size)
    os.truncate(file, file.stat().st_size - 1)
    return rf'its file megatron/{file.name} has \d+ bytes of \d+'


def _without_state(path):
    (path / 'state.pt').unlink()
    return r'its file state\.pt is missing'


def _without_manifest(path):
    (path / 'manifest.json').unlink()
    return r'its manifest\.json is missing'


def _half_a_manifest(path):
    os.truncate(path / 'manifest.json', 100)
    return r'its manifest\.json cannot be read: JSONDecodeError'


def _of_the_future(path):
    file = path / 'manifest.json'
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    return 'its format is 2, this version reads 1'


def _of_another_step(path):
    file = path / 'manifest.json'
    file.write_text(file.read_text().replace('"step": 2', '"step": 7'))
    return r'it is of step 7; was it renamed\?'


def _take_the_last(folder, fault):
    training = training_of(tiny())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert load_checkpoint(folder, training)['step'] == 1
    said = [str(w.message) for w in caught if 'is not complete' in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)
    assert all(re.search(fault + '.*; step 1 is taken', text) for text in said)
    with pytest.raises(ValueError, match='on rank 0: .*step-00000002 is not complete: ' + fault):
        load_checkpoint(folder, training, step=2)


def test_what_is_not_whole_is_named_and_passed_over(two_steps, tmp_path):
    damages = (_cut, _without_state, _without_manifest, _half_a_manifest, _of_the_future, _of_another_step)
    folders = [Path(shutil.copytree(two_steps, tmp_path / damage.__name__)) for damage in damages]
    faults = [damage(folder / 'step-00000002') for damage, folder in zip(damages, folders)]
    assert [latest_step(folder) for folder in folders] == [1] * len(damages)

    def check():
        for folder, fault in zip(folders, faults):
            _take_the_last(folder, fault)

    run_ranks(check, 2)


# ---- errors


def _refused_loads(folder, empty):
    training = training_of(tiny())

    def refused(match, where=folder, training=training, **how):
        def present():
            return [p.detach().clone() for m in training.models for p in m.parameters()] + [torch.get_rng_state()]

        before = present()
        with pytest.raises(ValueError, match=match):
            load_checkpoint(where, training, **how)
        assert all(map(torch.equal, present(), before))

    refused(r'on rank 0: folder must be that of the checkpoints, but there is no .*nowhere', empty / 'nowhere')
    refused('there is no complete checkpoint in', empty)
    refused(r'no checkpoint of step 3 in .*, but of \[1, 2\]', step=3)
    wide = training_of(tiny(hidden=16))
    refused(
        r'another model: embedding\.position_embeddings\.weight is \[64, 8\] in .*, \[64, 16\] here;', training=wide
    )
    refused('is of another model', training=training_of(tiny(layers=2)))
    refused('is of another model: its vocabulary has 62 ids, this one 50', training=training_of(tiny(vocab_size=50)))
    with_head = training_of(trainer(TINY, Layout(dp=2), head=True))
    refused(r'is of another model: it lacks value_head\.weight, value_head\.bias', training=with_head)
    distributed = training_of(trainer(TINY, Layout(dp=2), DISTRIBUTED))
    refused('DistributedOptimizer of AdamW, but it holds FP32Optimizer of AdamW', training=distributed)
    alone = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    part = dataclasses.replace(training, groups=Groups(dp=alone, dp_cp=alone))
    refused('need a layout of all 2 ranks of the world, .*, got one of 1', training=part)
    foreign = dataclasses.replace(training, models=[torch.nn.Linear(1, 1)])
    refused("must have sharded_state_dict, as Megatron's modules have, .*, which Linear lacks", training=foreign)
    read = Path.read_bytes
    if dist.get_rank() == 1:
        Path.read_bytes = lambda self: read(self) + b' '
    refused('ranks see different files at .*step-00000002/manifest.json; do they share')
    Path.read_bytes = read

    bare = dataclasses.replace(training, optimizer=None, scheduler=None)
    save_checkpoint(empty / 'bare', bare, step=5)
    refused('hold the optimizer .*, FP32Optimizer of AdamW, but it holds none; weights_only', empty / 'bare')
    refused(
        'hold the scheduler .*, OptimizerParamScheduler, but it holds none',
        empty / 'bare',
        dataclasses.replace(training, optimizer=None),
    )
    assert load_checkpoint(empty / 'bare', training, weights_only=True) == {'step': 5}
    assert load_checkpoint(folder, bare) == {'step': 2}


def test_what_cannot_be_loaded_is_refused_on_every_rank(two_steps, tmp_path):
    run_ranks(_refused_loads, 2, two_steps, tmp_path)


def _refused_saves(folder):
    training = training_of(tiny())

    def refused(match, training=training, **how):
        with pytest.raises(ValueError, match=match):
            save_checkpoint(folder, training, **{'step': 1, **how})

    refused('step must be an int of at least 0, got -1', step=-1)
    refused('step must be an int of at least 0, got True', step=True)
    refused('keep must be an int of at least 1, or None for all, got 0', keep=0)
    refused("state must be a dict .*, got one with 'step'", state={'step': 3})
    refused('state must be a dict .*, got list', state=[3])
    refused(r"state\['a'\]\[1\] must be a number, .*, got numpy\.float64", state={'a': [1, np.float64(2)]})
    refused(
        'scheduler must have state_dict and load_state_dict to be saved, which object lacks',
        dataclasses.replace(training, scheduler=object()),
    )
    refused('on rank 1: step', step=-dist.get_rank())
    there = Path.is_dir
    Path.is_dir = lambda self: there(self) and dist.get_rank() == 0
    refused('on rank 1: folder must lie on a file system that all ranks share')
    Path.is_dir = there


def test_what_cannot_be_saved_is_refused_on_every_rank(tmp_path):
    run_ranks(_refused_saves, 2, tmp_path)
    assert names_in(tmp_path) == []
