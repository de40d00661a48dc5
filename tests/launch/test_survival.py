"""A run that is ended goes on where it was: the same weights to the bit, and the same figures."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from ranks import run_ranks

from launch import embedding, policy, preference, survival, weights
from launch.survival import Tally
from tests.launch.tiny_policy import as_groups, as_pairs, options_for
from twinkle_megatron.survive import AGAIN, StopSignals


class After:
    """Stands for signals: agrees after so many steps."""

    def __init__(self, steps):
        self._left = steps

    def agreed(self):
        self._left -= 1
        return self._left == 0


def begun(args, train, stop):
    args.start = survival.find_start(args)
    train(args, stop)


def ended_and_gone_on(whole, cut, train, steps):
    """The weights of a run, and of one that was ended after so many steps and went on, on the first rank."""
    parallel_state.initialize_model_parallel(whole.tp, whole.pp)
    begun(whole, train, StopSignals())
    dist.barrier()
    files = [weights.read(whole.save_weights)] if dist.get_rank() == 0 else []
    with pytest.raises(SystemExit) as ended:
        begun(cut, train, After(steps))
    assert ended.value.code == AGAIN
    cut.resume = 'auto'
    begun(cut, train, StopSignals())
    assert cut.start == steps
    dist.barrier()
    return [*files, weights.read(cut.save_weights)] if dist.get_rank() == 0 else []


def figures(args):
    lines = [json.loads(line) for line in (args.run / 'metrics.jsonl').read_text().splitlines()]
    return [{name: x for name, x in line.items() if name not in ('tokens_per_second', 'seconds')} for line in lines]


KINDS = {
    'grpo': (policy, None, ['--beta=0.1']),
    'dpo': (preference, as_pairs, ['--eval-every=2']),
    'infonce': (embedding, as_groups, ['--eval-every=2']),
}


@pytest.mark.parametrize('kind', KINDS)
def test_a_run_that_was_ended_goes_on_to_the_bit_with_the_same_figures(kind, policy_file, rollouts_file, tmp_path):
    module, lines, more = KINDS[kind]
    file = rollouts_file
    if lines is not None:
        file = tmp_path / 'data.jsonl'
        file.write_text(lines(range(40)))
    common = [f'--loss={kind}', '--dp=2', '--steps=5', '--log-every=2', *more]
    whole, cut = (options_for(file, policy_file, tmp_path, *common, f'--name={name}') for name in ('whole', 'cut'))
    one, other = run_ranks(partial(ended_and_gone_on, train=module.train, steps=3), 2, whole, cut, timeout=180)[0]
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name])
    assert figures(cut) == figures(whole)


def begun_again(args, changes):
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    with pytest.raises(SystemExit):
        begun(args, policy.train, After(2))
    told = []
    for change in changes:
        with pytest.raises(SystemExit) as ended:
            begun(_with(args, change), policy.train, StopSignals())
        told.append(str(ended.value.code))
    with pytest.raises(SystemExit) as ended:
        begun(_with(args, {'resume': 'never'}), policy.train, StopSignals())
    folder = survival.folder_of(args)
    (last,) = folder.glob('step-*')
    (last / 'manifest.json').write_text('cut')
    with pytest.raises(SystemExit) as none_left:
        begun(_with(args, {'resume': 'auto'}), policy.train, StopSignals())
    return [*told, str(ended.value.code), str(none_left.value.code), *(path.name for path in folder.iterdir())]


def ended_after_the_last_checkpoint(args, train):
    """The last figures of a run, and of one that was ended between its last checkpoint and its end and went on."""
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    begun(args, train, StopSignals())
    found = [(args.run / 'held_out.jsonl').read_text()]
    args.resume = 'auto'
    begun(args, train, StopSignals())
    assert args.start == args.steps
    return [*found, (args.run / 'held_out.jsonl').read_text()]


@pytest.mark.parametrize('kind', ['dpo', 'infonce'])
def test_a_run_that_goes_on_after_its_last_step_has_the_same_results(kind, policy_file, tmp_path):
    module, lines, _ = KINDS[kind]
    (tmp_path / 'data.jsonl').write_text(lines(range(40)))
    options = [f'--loss={kind}', '--steps=2', '--save-every=2']
    args = options_for(tmp_path / 'data.jsonl', policy_file, tmp_path, *options)
    ((one, other),) = run_ranks(partial(ended_after_the_last_checkpoint, train=module.train), 1, args, timeout=120)
    assert one == other


def refused_and_gone_on(args, others):
    """What refusals say, and whether they have changed a file of the run."""
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    begun(args, policy.train, StopSignals())
    args.resume = 'auto'
    before = {path.name: path.read_bytes() for path in args.run.iterdir() if path.is_file()}
    told = []
    for other in others:
        with pytest.raises(SystemExit) as ended:
            begun(_with(args, other), policy.train, StopSignals())
        told.append(str(ended.value.code))
    assert {path.name: path.read_bytes() for path in args.run.iterdir() if path.is_file()} == before
    (args.run / 'metrics.jsonl').write_bytes(b'\0\0{"step": 1')  # as a power cut leaves it
    begun(args, policy.train, StopSignals())
    return told


def test_a_refusal_changes_nothing_and_damaged_figures_do_not_stop_a_run(policy_file, rollouts_file, tmp_path):
    other_rollouts = tmp_path / 'other.jsonl'
    head, first, second, *others = rollouts_file.read_text().splitlines()
    other_rollouts.write_text('\n'.join([head, second, first, *others]))
    args = options_for(rollouts_file, policy_file, tmp_path, '--steps=2', '--save-every=2', '--name=one')
    data = options_for(other_rollouts, policy_file, tmp_path, '--steps=2').dataset
    ((lr, contents),) = run_ranks(refused_and_gone_on, 1, args, [{'lr': 0.5}, {'dataset': data}])
    assert 'was begun with --lr 0.001, got 0.5; go on with that' in lr
    assert 'was begun with another --data: its contents are not those of the start' in contents


def _with(args, change):
    copy = type(args)(**vars(args))
    for name, value in change.items():
        setattr(copy, name, value)
    return copy


def test_other_options_than_those_of_the_start_are_refused_and_checkpoints_are_never_removed(
    policy_file, rollouts_file, tmp_path
):
    args = options_for(rollouts_file, policy_file, tmp_path, '--steps=4')
    changes = [{'resume': 'auto', 'seed': 7}, {'resume': 'auto', 'micro_batches': 8}]
    (told,) = run_ranks(begun_again, 1, args, changes)
    assert 'was begun with --seed 1234, got 7' in told[0]
    assert 'was begun with --micro-batches 4, got 8' in told[1]
    assert 'has checkpoints of an earlier run, the last of step 2: --resume auto goes on' in told[2]
    assert 'is not complete: its manifest.json cannot be read' in told[3]
    assert told[4:] == ['step-00000002']


def test_a_tally_is_taken_once():
    tally, other = Tally(), Tally()
    tally.add(3)
    other.load_state_dict(tally.state_dict())
    other.add(4)
    assert [tally.take(), tally.take(), other.take()] == [3, 0, 7]
