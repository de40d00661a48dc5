"""Where a loss that is not finite, or too large, comes from; and Megatron's rerun state machine beside it."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from invariance import UNEVEN, micro_batches
from megatron.core.rerun_state_machine import (
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from preference import SPLITS as PAIRS
from preference import micro_batches as pairs
from ranks import run_ranks
from test_invariance import GPT
from test_model import _trainer
from tiny_gpt import Layout, unwrapped

NAN = math.nan
TOKEN = 7


def _model(layout: Layout, break_it: Any) -> Any:
    model = _trainer(dataclasses.replace(GPT, layers=4), layout)
    for chunk in model.chunks:
        with torch.no_grad():
            break_it(unwrapped(chunk))
    return model


def _layer(layer_number: int, rank: int | None = None) -> Any:
    """One weight of a layer is NaN, on one rank."""

    def break_it(chunk: Any) -> None:
        for layer in chunk.decoder.layers:
            if layer.layer_number == layer_number and rank in (None, dist.get_rank()):
                layer.mlp.linear_fc2.weight[0, 0] = NAN

    return break_it


def _embedding(chunk: Any) -> None:
    """The embedding of one id is infinite, in the shard that has it."""
    if chunk.pre_process:
        words = chunk.embedding.word_embeddings
        at = TOKEN - words.vocab_start_index
        if 0 <= at < words.weight.shape[0]:
            words.weight[at] = math.inf


def _inputs(layout: Layout, packed: bool) -> Any:
    def of(replica: int) -> list[dict[str, torch.Tensor]]:
        if packed:
            return pairs(GPT, PAIRS['uneven', layout.dp], replica, True, 'interleaved')
        return micro_batches(GPT, UNEVEN[layout.dp], replica)

    return of


def _located(layout: Layout, break_it: Any, packed: bool, top: int) -> Any:
    model = _model(layout, break_it)
    return model.locate(_inputs(layout, packed)(dist.get_rank(model.groups.dp)), top=top)


@pytest.mark.parametrize(
    'layout', [Layout(), Layout(tp=2, pp=2, sp=True), Layout(pp=2, vpp=2), Layout(cp=2, dp=2)], ids=str
)
def test_the_first_module_with_an_output_that_is_not_finite_is_named(layout):
    results = run_ranks(_located, layout.world, layout, _layer(3), False, 4)
    assert len({str(located) for located in results}) == 1, 'the same on every rank'
    located = results[0]
    assert {bad.name.split('decoder.')[1].split('.', 2)[2] for bad in located.modules} == {'mlp.linear_fc2'}
    assert all(bad.place == 3 for bad in located.modules)
    assert {bad.replica for bad in located.modules} == set(range(layout.dp))
    assert not located.finite
    assert len(located.hidden) == 4
    assert all(math.isnan(token.value) for token in located.tokens)


def test_the_rank_of_a_broken_weight_is_named():
    ranks = []
    for rank in (0, 1):
        located = run_ranks(_located, 2, Layout(tp=2, sp=True), _layer(2, rank), False, 3)[0]
        ranks.append([bad.ranks for bad in located.modules])
        assert 'linear_fc2' in str(located)
    assert ranks in ([[(0,)], [(1,)]], [[(0, 1)], [(0, 1)]]), 'before the all-reduce, or behind it'


@pytest.mark.parametrize('packed', [False, True], ids=['rows', 'packed'])
@pytest.mark.parametrize('layout', [Layout(), Layout(tp=2, sp=True, pp=2), Layout(cp=2, dp=2)], ids=str)
def test_samples_and_tokens_are_those_of_the_call(layout, packed):
    located = run_ranks(_located, layout.world, layout, _embedding, packed, 1000)[0]
    expected = set()
    for replica in range(layout.dp):
        sample = 0
        for number, batch in enumerate(_inputs(layout, packed)(replica)):
            ids = batch['input_ids']
            starts = batch['position_ids'] == 0 if packed else torch.zeros_like(ids, dtype=torch.bool)
            for row in range(len(ids)):
                sample -= 1 if packed else 0  # the first start of a packed row is none of a next sample
                for column in range(ids.shape[1]):
                    sample += int(starts[row, column])
                    if ids[row, column] == TOKEN:
                        expected.add((replica, sample, number, column))
                sample += 1
    found = {(t.replica, t.sample, t.micro_batch, t.token) for t in located.hidden}
    assert found
    assert found == expected
    assert all('embedding' in bad.name for bad in located.modules)


def test_a_loss_of_finite_tokens_is_told_apart():
    def loss(inputs, outputs, scale):
        return -(outputs['logps'] * scale).mean()

    def run() -> Any:
        model = _trainer(GPT, Layout())
        model.set_loss(loss)
        return model.locate(micro_batches(GPT, UNEVEN[1], 0), scale=math.inf)

    (located,) = run_ranks(run, 1)
    assert 'the loss itself, or one of its keywords' in str(located)
    assert not located.finite
    assert located.tokens == sorted(located.tokens, key=lambda token: -token.value)


def _watched(layout: Layout) -> Any:
    model = _trainer(GPT, layout)
    model.watch_loss(spike=3.0, top=2)
    inputs = micro_batches(GPT, UNEVEN[layout.dp], dist.get_rank(model.groups.dp))
    lines: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger('twinkle_megatron'), Keeps()
    logger.addHandler(handler)
    fine = model.forward_backward(inputs)
    random = torch.get_rng_state()
    for chunk in model.chunks:
        if unwrapped(chunk).post_process:
            with torch.no_grad():
                unwrapped(chunk).output_layer.weight.mul_(1e3)
    model.zero_grad()
    spiked = model.forward_backward(inputs)
    logger.removeHandler(handler)
    assert torch.equal(random, torch.get_rng_state())
    assert 'located' not in fine
    return spiked['located'], lines, spiked['loss']


@pytest.mark.parametrize('layout', [Layout(tp=2), Layout(pp=2)], ids=str)
def test_a_spike_in_training_is_located_and_logged_once(layout):
    results = run_ranks(_watched, 2, layout)
    (line,) = [line for _, lines, _ in results for line in lines if 'largest before' in line]
    located = results[0][0]
    assert 'times the largest before' in line
    assert str(located) in line
    assert located.loss == pytest.approx(results[0][2], rel=1e-9)
    assert located.finite
    assert len(located.tokens) == 2


def _rerun(layout: Layout, persistent: bool) -> Any:
    model = _trainer(GPT, layout)
    model.watch_loss()
    inputs = micro_batches(GPT, UNEVEN[layout.dp], dist.get_rank(model.groups.dp))
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    machine = get_rerun_state_machine()
    runs, located = [], 0
    broken = False
    for step in range(3):
        number = 0
        while machine.should_run_forward_backward(None):
            number += 1
            if (
                step == 1
                and (number == 1 or persistent)
                and not broken
                and dist.get_rank() == dist.get_world_size() - 1
            ):
                weight = next(unwrapped(model.chunks[-1]).parameters())
                kept, broken = weight.detach().clone(), True
                with torch.no_grad():
                    weight.view(-1)[0] = NAN
            model.zero_grad()
            out = model.forward_backward(inputs)
            located += 'located' in out
            if broken and not persistent:
                with torch.no_grad():
                    weight.copy_(kept)
                broken = False
        runs.append(number)
        _, stop, code = machine.should_checkpoint_and_exit()
        if stop:
            break
    destroy_rerun_state_machine()
    return runs, located, stop, code


@pytest.mark.parametrize('layout', [Layout(dp=2), Layout(pp=2)], ids=str)
def test_megatrons_machine_runs_a_step_again_whose_loss_is_not_finite(layout):
    for persistent in (True, False):
        for runs, located, stop, code in run_ranks(_rerun, 2, layout, persistent):
            assert runs[:2] == [1, 2], 'the second step was run again'
            assert located == 1, 'where it was found first'
            assert stop, 'Megatron asks to end: the result was not reproducible, or has to be tried elsewhere'
            assert code != 0
