"""Inside a script built like Megatron-LM's: attached in its forward step, or run unchanged by twinkle_megatron.run."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys

import pytest
import stand_in_pretrain
import torch
from gradients import collect_grads
from megatron.core import parallel_state as ps
from ranks import run_ranks
from stand_in_pretrain import MICRO_BATCHES, Result, Settings, pretrain
from tiny_gpt import Layout, Spec, batches, build, initialize, unwrapped, wrap

from twinkle_megatron import MegatronModel, run
from twinkle_megatron.attach import attach
from twinkle_megatron.loss import ChunkedCrossEntropyLoss, CrossEntropyLoss
from twinkle_megatron.loss.base import TokenLoss
from twinkle_megatron.metric import Metric

SCRIPT = stand_in_pretrain.__file__
VOCABULARY = 62
PER_TOKEN = Spec(vocab_size=VOCABULARY, pad_vocab_to=4, layers=4)
PER_MICRO_BATCH = dataclasses.replace(PER_TOKEN, config={'calculate_per_token_loss': False})
MTP = dataclasses.replace(PER_TOKEN, mtp=1, layers=2, position='rope')
MIXTURE = dataclasses.replace(
    PER_TOKEN, experts=4, config={'moe_aux_loss_coeff': 0.01, 'moe_router_load_balancing_type': 'aux_loss'}
)
SINGLE = dataclasses.replace(PER_TOKEN, dtype=torch.float32)  # the distributed optimizer takes no float64
LAYOUTS = [Layout(dp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(pp=2, vpp=2), Layout(cp=2)]
PLAIN = {'loss': 'cross_entropy', 'metrics': ['accuracy', 'loss'], 'vocab_size': VOCABULARY}


def check_same(found: list[Result], expected: list[Result], tolerance: float = 1e-10) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.lm_losses == pytest.approx(other.lm_losses, rel=tolerance, abs=0)
    for kind in ('grads', 'weights'):
        for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
            for name, part in getattr(other, kind).items():
                difference = (getattr(one, kind)[name].tensor - part.tensor).abs().max()
                assert difference <= tolerance * part.tensor.abs().max(), (kind, name, rank)


@pytest.mark.parametrize('spec', [PER_TOKEN, PER_MICRO_BATCH], ids=['per-token', 'per-micro-batch'])
@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
def test_attached_cross_entropy_trains_as_the_script_without_it(layout, spec):
    settings = Settings(spec, layout, evaluates=True)
    stock = run_ranks(pretrain, layout.world, settings)
    attached = dataclasses.replace(settings, attach=PLAIN, garbage=True)
    found = run_ranks(pretrain, layout.world, attached)
    check_same(found, stock)
    check_metrics(found, spec, layout)


def check_metrics(found: list[Result], spec: Spec, layout: Layout) -> None:
    """On every rank: the tokens with loss_mask 1 of the first step, counted in one process."""
    (expected,) = run_ranks(count, 1, spec, layout.dp)
    assert expected[0] > 0, 'a comparison of zeros shows nothing'
    for result in found:
        first = result.metrics[0]
        assert (first['correct_tokens'], first['total_tokens']) == expected[:2]
        assert float(first['loss']) == pytest.approx(expected[2], abs=6e-5)
        assert len(result.metrics) == 2
        assert result.evaluation == found[0].evaluation
        assert result.evaluation['total_tokens'] > 0


def count(spec: Spec, dp: int) -> tuple[int, int, float]:
    """Correct and counted tokens of the first step, and their mean cross entropy."""
    initialize()
    model = build(spec)[0]
    correct, total, nats = 0, 0, 0.0
    for rank in range(dp):
        for b in batches(spec, MICRO_BATCHES, rank=rank):
            logits = model(b['tokens'], b['position_ids'], None)[..., : spec.vocab_size].detach()
            for row in range(b['tokens'].size(0)):
                for at in range(b['tokens'].size(1)):
                    if b['loss_mask'][row, at] == 1:
                        label = int(b['labels'][row, at])
                        total += 1
                        correct += int(logits[row, at].argmax()) == label
                        nats -= float(logits[row, at].log_softmax(-1)[label])
    return correct, total, nats / total


@pytest.mark.parametrize('layout', [Layout(dp=2), Layout(pp=2)], ids=str)
def test_multi_token_prediction_goes_on_training_on_plain_cross_entropy(layout):
    settings = Settings(MTP, layout)
    stock = run_ranks(pretrain, 2, settings)
    check_same(run_ranks(pretrain, 2, dataclasses.replace(settings, attach=PLAIN, garbage=True)), stock)
    other = {'loss': SmoothedAndSharp, 'vocab_size': VOCABULARY}
    found = run_ranks(pretrain, 2, dataclasses.replace(settings, steps=1, attach=other))
    for one, expected in zip(found, stock):
        for name in one.grads:
            if name.startswith('mtp.'):
                difference = (one.grads[name].tensor - expected.grads[name].tensor).abs().max()
                assert difference <= 1e-10 * expected.grads[name].tensor.abs().max(), name


class SmoothedAndSharp(CrossEntropyLoss):
    """Changes all that the main head trains on."""

    temperature = 0.5

    def __init__(self):
        super().__init__(label_smoothing=0.3)


@pytest.mark.parametrize(
    ('layout', 'head'),
    [(Layout(cp=2), 'logits'), (Layout(tp=2, sp=True), 'linear'), (Layout(pp=2, vpp=2), 'linear')],
    ids=str,
)
def test_another_loss_trains_as_with_megatron_model(layout, head):
    init = {'label_smoothing': 0.1, 'z_loss': 1e-3}
    arguments = {'loss': 'chunked_cross_entropy', 'vocab_size': VOCABULARY, 'head': head, **init}
    found = run_ranks(pretrain, 2, Settings(PER_TOKEN, layout, attach=arguments, garbage=True, steps=1))
    results = run_ranks(with_megatron_model, 2, layout, init)
    for one, (grads, _) in zip(found, results):
        for name, part in grads.items():
            difference = (one.grads[name].tensor - part.tensor).abs().max()
            assert difference <= 1e-10 * part.tensor.abs().max(), name
    assert found[-1].lm_losses == pytest.approx([results[0][1]], rel=1e-10)
    plain = run_ranks(count, 1, PER_TOKEN, layout.dp)[0][2]
    for result in found:
        assert float(result.metrics[0]['plain lm loss']) == pytest.approx(plain, abs=6e-5)


def with_megatron_model(layout: Layout, init: dict):
    initialize(layout)
    model = MegatronModel(wrap(build(PER_TOKEN, layout)), vocab_size=VOCABULARY)
    model.set_loss(ChunkedCrossEntropyLoss, **init)
    inputs = [
        {
            'input_ids': b['tokens'],
            'labels': b['labels'].masked_fill(b['loss_mask'] == 0, -100),
            'position_ids': b['position_ids'],
        }
        for b in batches(PER_TOKEN, MICRO_BATCHES, rank=ps.get_data_parallel_rank())
    ]
    out = model.forward_backward(inputs)
    return collect_grads(model.chunks), out['loss']


@pytest.mark.parametrize(
    ('spec', 'layout', 'ddp'),
    [
        (MIXTURE, Layout(dp=2, ep=2), {}),
        (dataclasses.replace(PER_TOKEN, tied=True), Layout(pp=2), {}),
        (SINGLE, Layout(dp=2), {'distributed_optimizer': True, 'overlap': True, 'overlap_param_gather': True}),
    ],
    ids=['moe-auxiliary-loss', 'tied', 'overlap-param-gather'],
)
def test_the_rest_of_megatron_goes_on_as_before(spec, layout, ddp):
    settings = Settings(spec, layout, ddp=ddp)
    stock = run_ranks(pretrain, 2, settings)
    found = run_ranks(pretrain, 2, dataclasses.replace(settings, attach={**PLAIN, 'head': 'linear'}))
    check_same(found, stock, 1e-5 if spec.dtype is torch.float32 else 1e-10)


def test_half_precision_with_loss_scaling_matches_megatrons_own_loss():
    spec = dataclasses.replace(PER_TOKEN, vocab_size=64, dtype=torch.float16)
    stock, found = (
        run_ranks(scaled, 2, spec, given) for given in (None, {'loss': 'cross_entropy', 'metrics': ['accuracy']})
    )
    for one, other in zip(found, stock):
        for name, part in other.items():
            assert part.tensor.abs().max() > 0
            assert (one[name].tensor - part.tensor).abs().max() <= 4e-3 * part.tensor.abs().max(), name


def scaled(spec: Spec, given: dict | None):
    """Gradients under a loss scale."""
    layout = Layout(tp=2)
    stand_in_pretrain.ARGS = Settings(spec, layout, attach=given, stock_loss=True)
    initialize(layout)
    chunks = wrap(build(spec, layout))
    chunks[0].config.grad_scale_func = lambda loss: loss * 1024
    stand_in_pretrain.run_schedule(chunks, seed=0)
    return collect_grads(chunks)


def test_a_script_that_keeps_its_mask_to_itself_can_tell_it():
    layout = Layout(dp=2)
    attached = Settings(PER_TOKEN, layout, attach=PLAIN, garbage=True, hands_mask=False, evaluates=True)
    found = run_ranks(pretrain, 2, attached)
    check_same(found, run_ranks(pretrain, 2, Settings(PER_TOKEN, layout, evaluates=True)))
    check_metrics(found, PER_TOKEN, layout)


class Broken(Metric):
    """Fails where it is fed."""

    def accumulate(self, inputs=None, outputs=None, **kwargs):
        raise ValueError('no such thing')

    def calculate(self):
        return {}

    def reset(self):
        pass


def test_an_error_in_a_metric_is_raised_by_calculate_on_every_rank():
    settings = Settings(PER_TOKEN, Layout(pp=2), attach={'metrics': [Broken]}, steps=1)
    for outcome in run_ranks(pretrain, 2, settings, collect_errors=True):
        assert (outcome.error, outcome.message) == ('ValueError', 'on rank 1: no such thing')


@pytest.mark.parametrize('layout', [Layout(dp=2), Layout(pp=2, vpp=2)], ids=str)
def test_an_unchanged_script_run_by_us_trains_the_same_and_prints_metrics(layout, tmp_path):
    settings = Settings(PER_TOKEN, layout, evaluates=True, stock_loss=True)
    torch.save(settings, tmp_path / 'settings')
    ours = ['--loss', 'cross_entropy', '--metrics', 'accuracy,loss', '--vocab-size', str(VOCABULARY), '--every', '1']
    argv = [*ours, '--', SCRIPT, str(tmp_path / 'settings'), str(tmp_path)]
    printed = run_ranks(run_script, 2, argv)
    found = [Result(**torch.load(tmp_path / f'{rank}.pt', weights_only=False)) for rank in range(2)]
    check_same(found, run_ranks(pretrain, 2, dataclasses.replace(settings, stock_loss=False)))
    correct, total, loss = run_ranks(count, 1, PER_TOKEN, layout.dp)[0]
    accuracy = f'accuracy {correct / total:.2f} correct_tokens {correct} total_tokens {total} loss {loss:.4f}'
    lines = ''.join(printed).splitlines()
    assert lines[0] == f'twinkle: iteration 1 {accuracy}'
    assert re.fullmatch(r'twinkle: iteration 2 accuracy .* loss [\d.]+', lines[1])
    assert re.fullmatch(r'twinkle: evaluation at iteration 2 accuracy .* loss [\d.]+', lines[2])
    assert len(lines) == 3
    assert sum(map(bool, printed)) == 1, 'one rank prints'


def run_script(argv: list[str]) -> str:
    path, arguments = list(sys.path), list(sys.argv)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run.main(argv) == 0
    assert (sys.path, sys.argv) == (path, arguments), 'left as it was'
    return out.getvalue()


@pytest.mark.parametrize(
    ('argv', 'says'),
    [
        (['--loss', 'cross_entropy'], 'after --'),
        ([SCRIPT, '--num-layers', '2'], 'after --'),
        (['--los', 'dpo', '--', SCRIPT], 'unrecognized arguments: --los dpo'),
        (['--loss', 'cross_entropyy', '--', SCRIPT], "--loss: there is no loss 'cross_entropyy'; did you mean"),
        (['--loss', 'bogus', '--', SCRIPT], 'Known: ChunkedCrossEntropyLoss, CrossEntropyLoss\n'),
        (['--metrics', 'bogus', '--', SCRIPT], "--metrics: there is no metric 'bogus'. Known: Accuracy, "),
        (['--vocab-size', '0', '--', SCRIPT], '--vocab-size must be a whole number of at least 1, got 0'),
        (['--loss', 'dpo', '--', SCRIPT], 'MegatronModel.forward_backward'),
        (['--loss-arg', 'label_smoothing', '--', SCRIPT], 'NAME=VALUE'),
        (['--loss-arg', 'label_smoothng=0.1', '--', SCRIPT], "'label_smoothing'"),
        (['--metrics', 'dpo', '--', SCRIPT], 'DPOMetric is computed from'),
        (['--every', '0', '--', SCRIPT], '--every must be'),
        (['--head', 'auto', '--', SCRIPT], 'invalid choice'),
        (['--', 'pretrain_nothing.py'], 'no script'),
    ],
)
def test_a_wrong_command_line_is_one_message_before_anything_starts(argv, says, capsys):
    assert run.main(argv) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count('\n') == 1
    assert not printed.out


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as end:
        run.main(['--help'])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ('--loss', '--loss-arg', '--metrics', '--vocab-size', '--head', '--every'))


def test_a_second_call_gives_the_same_and_refuses_other_arguments():
    run_ranks(second_calls, 1)


def second_calls():
    initialize()
    chunk = wrap(build(PER_TOKEN))[0]
    model = unwrapped(chunk)
    given = {'loss': CrossEntropyLoss(label_smoothing=0.1), 'metrics': ['accuracy']}
    attached = attach(chunk, **given)
    assert attach(model, **given) is attached
    assert attach(model, CrossEntropyLoss(label_smoothing=0.1), ['accuracy']) is attached
    with pytest.raises(ValueError, match='attached already, with another loss'):
        attach(chunk, 'cross_entropy', ['accuracy'])
    with pytest.raises(ValueError, match='attached already, with another metrics'):
        attach(chunk, given['loss'])
    attached.remove()
    assert 'compute_language_model_loss' not in vars(model)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert attach(chunk, 'cross_entropy', head='linear') is not attached


def test_what_cannot_be_exact_or_is_not_reached_is_refused():
    run_ranks(refusals, 1)


class OverSequences(TokenLoss):
    """Not a mean over tokens."""

    def contribution(self, batch, stats, **extra):
        return stats.log_prob.sum()


def refusals():
    initialize()
    chunk = wrap(build(PER_TOKEN))[0]
    for loss in ('dpo', 'gspo', 'infonce', 'grpo', 'cpo', 'gkd', OverSequences, lambda inputs, outputs: 0):
        with pytest.raises(ValueError, match=r'MegatronModel\.forward_backward'):
            attach(chunk, loss)
    for metric in ('dpo', 'grpo', 'embedding'):
        with pytest.raises(ValueError, match='is computed from'):
            attach(chunk, metrics=[metric])
    with pytest.raises(ValueError, match='must be negative'):
        attach(chunk, ignore_index=0)
    with pytest.raises(ValueError, match='vocab_size must be'):
        attach(chunk, vocab_size=1000)
    with pytest.raises(ValueError, match="head must be 'logits' or 'linear'"):
        attach(chunk, head='auto')
    with pytest.raises(ValueError, match='must be one chunk'):
        attach([chunk])
    chunk.config.overlap_moe_expert_parallel_comm = True
    with pytest.raises(ValueError, match='overlap_moe_expert_parallel_comm'):
        attach(chunk)
    assert 'compute_language_model_loss' not in vars(unwrapped(chunk))
