"""`MegatronModel.reference`: log-probs of a frozen policy under every layout, from a copy of the weights, chunks of its
own or with an adapter switched off; its cache; and losses that couple the batch through two passes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re

import pytest
import torch
import torch.distributed as dist
from gradients import collect_grads, compare
from invariance import UNEVEN, even, micro_batches, model_on
from megatron.core.packed_seq_params import PackedSeqParams
from preference import KINDS, SPLITS, reference_keywords
from preference import micro_batches as pairs_of
from ranks import device, run_ranks
from tiny_gpt import Layout, Spec, build, initialize, unwrapped, wrap

from twinkle_megatron import MegatronModel

GPT = Spec(vocab_size=62, pad_vocab_to=4)
OTHER = 1.25
"""The weights of another policy are those of the model times this."""

LAYOUTS = [
    Layout(), Layout(tp=2, pp=2), Layout(cp=2, dp=2), Layout(pp=2, dp=2), Layout(pp=2, vpp=2), Layout(tp=2, sp=True),
]  # fmt: skip


def plain_logps(spec, split, replica, factor=1.0):
    """Of one process without this package: log-probs of each micro-batch of a replica."""
    initialize(Layout())
    (chunk,) = build(spec)
    scale(chunk, factor)
    found = []
    with torch.no_grad():
        for batch in micro_batches(spec, split, replica):
            ids, labels = batch['input_ids'].to(device()), batch['labels'].to(device())
            positions = torch.arange(ids.shape[1], device=device()).expand(ids.shape)
            logp = chunk(ids, positions, None)[..., : spec.vocab_size].log_softmax(-1)
            found.append(logp.gather(-1, labels.clamp_min(0)[..., None])[..., 0].masked_fill(labels == -100, 0).cpu())
    return found


def scale(chunk, factor):
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.mul_(factor)


def expected(spec, layout, factor=1.0):
    return [run_ranks(plain_logps, 1, spec, UNEVEN[layout.dp], i, factor)[0] for i in range(layout.dp)]


def frozen_copy(model, *_):
    """The reference, before the model's weights change."""
    made = model.reference()
    for chunk in model.chunks:
        scale(chunk, OTHER)
    return made, 1.0


def own_chunks(model, spec, layout):
    """Bare, as they need no gradient."""
    chunks = build(spec, layout)
    for chunk in chunks:
        scale(chunk, OTHER)
    return model.reference(chunks), OTHER


def adapter_off(model, *_):
    @contextlib.contextmanager
    def off():
        for chunk in model.chunks:
            scale(chunk, OTHER)
        yield
        for chunk in model.chunks:
            scale(chunk, 1 / OTHER)

    return model.reference(adapter_off=off), OTHER


WAYS = {'copy': frozen_copy, 'chunks': own_chunks, 'adapter': adapter_off}


def _logps(spec, layout, way, head):
    model = model_on(spec, layout, 'DPOLoss', {'reference_free': True}, head=head)
    made, factor = WAYS[way](model, spec, layout)
    batches = micro_batches(spec, UNEVEN[layout.dp], dist.get_rank(model.groups.dp))
    model.set_loss('ChunkedCrossEntropyLoss')
    model.forward_backward(batches)
    before = [p.detach().clone() for chunk in model.chunks for p in chunk.parameters()]
    grads = collect_grads(model.chunks)
    found = made.logps(batches)
    same = [torch.equal(p, old) for p, old in zip((p for c in model.chunks for p in c.parameters()), before)]
    assert all(same) or way == 'adapter', 'the own weights must come back to the bit'
    after = collect_grads(model.chunks)
    assert all(torch.equal(after[name].tensor, part.tensor) for name, part in grads.items()), 'gradients stay'
    assert all(module.training for chunk in model.chunks for module in chunk.modules())
    return [x.cpu() for x in found], factor, model.groups.is_last_stage, dist.get_rank(model.groups.dp)


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
def test_log_probs_of_the_reference_are_those_of_one_process(layout, way):
    head = 'linear' if layout.tp > 1 else 'logits'
    results = run_ranks(_logps, layout.world, GPT, layout, way, head)
    want = expected(GPT.on(layout), layout, results[0][1])
    for found, _, last, replica in results:
        if not last:
            assert found == []
            continue
        assert [x.shape for x in found] == [x.shape for x in want[replica]]
        for mine, theirs in zip(found, want[replica]):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def _overlapped(spec):
    """The weights are gathered while the forward pass runs: those of another rank are stale when the copy is made."""
    ddp = {'distributed_optimizer': True, 'overlap': True, 'overlap_param_gather': True}
    model = model_on(spec, Layout(dp=2), ddp=ddp)
    (chunk,) = model.chunks
    batches = micro_batches(spec, UNEVEN[2], dist.get_rank())
    model.forward_backward(batches)
    for bucket in (bucket for buffer in chunk.buffers for bucket in buffer.buckets):
        for rank, weights in enumerate(bucket.param_data.chunk(2)):
            weights.mul_(OTHER) if rank == dist.get_rank() else weights.fill_(torch.nan)
    model.zero_grad()
    made = model.reference()
    scale(chunk, 2.0)
    found = made.logps(batches)
    scale(chunk, 1 / 2.0)
    again = model.forward_only(batches)['logps']
    return [x.cpu() for x in found], [x.cpu() for x in again]


def test_weights_gathered_during_the_forward_pass_are_whole_in_the_copy():
    want = expected(GPT, Layout(dp=2), OTHER)
    for rank, results in enumerate(run_ranks(_overlapped, 2, GPT)):
        for found in results:
            for mine, theirs in zip(found, want[rank], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def _trained_with(spec, layout):
    """DPO with the reference of a `Reference`, empty where a rank is not of the last stage."""
    initialize(layout)
    chunks = wrap(build(spec, layout))
    model = MegatronModel(chunks, vocab_size=spec.vocab_size)
    model.set_loss('DPOLoss', beta=0.3)
    model.add_metric('DPOMetric')
    made = model.reference()
    for chunk in chunks:
        scale(chunk, OTHER)
    batches = pairs_of(spec, SPLITS['uneven', layout.dp], dist.get_rank(model.groups.dp), False, 'interleaved')
    ref = made.logps(batches)
    assert bool(ref) is model.groups.is_last_stage
    out = model.forward_backward(batches, ref_logps=ref)
    seen = model.forward_only(batches, ref_outputs={'logps': ref})
    assert seen['loss'] == pytest.approx(out['loss'], rel=1e-12)
    assert model.metric_values() == pytest.approx(model.metric_values(is_training=False), rel=1e-12)
    return out['loss'], collect_grads(chunks), model.metric_values()


def test_training_with_the_reference_is_the_same_on_every_layout():
    ((expected_loss, grads, metrics),) = run_ranks(_trained_with, 1, GPT, Layout())
    for layout in (Layout(pp=2), Layout(tp=2, pp=2), Layout(cp=2, dp=2)):
        results = run_ranks(_trained_with, layout.world, GPT, layout)
        for loss, _, values in results:
            assert loss == pytest.approx(expected_loss, rel=1e-9)
            assert values == pytest.approx(metrics, rel=1e-9)
        assert compare([result[1] for result in results], grads).error < 1e-9


# ---- the cache


class Calls:
    """How often the model was run."""

    def __init__(self, model):
        self.count = 0
        for chunk in model.chunks:
            unwrapped(chunk).register_forward_pre_hook(self._count)

    def _count(self, *_):
        self.count += 1


def _with_cache(spec, layout, directory, factor=1.0):
    model = model_on(spec, layout)
    for chunk in model.chunks:
        scale(chunk, factor)
    batches = micro_batches(spec, UNEVEN[layout.dp], dist.get_rank(model.groups.dp))
    made, calls, known = model.reference(cache=directory), Calls(model), bool(os.listdir(directory))
    first = made.logps(batches)
    ran = calls.count
    second = made.logps(batches)
    assert ran > 0, 'the first call checks what is there'
    assert ran == (1 if known else len(batches)), 'one micro-batch is enough'
    assert calls.count == ran, 'the second finds all'
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    half = [{key: value[:1] for key, value in batch.items()} for batch in batches]
    other = made.logps(half)
    for a, b in zip(other, first, strict=True):  # another batch is not taken for this one
        torch.testing.assert_close(a, b[:1], rtol=1e-9, atol=1e-9)
    return len(os.listdir(directory))


def test_cached_log_probs_are_found_again_under_another_layout(tmp_path):
    """One sample a micro-batch occurs twice: as a whole one and as the first row of another."""
    files = [run_ranks(_with_cache, 1, GPT, Layout(), tmp_path)[0]]
    for layout in (Layout(tp=2, pp=2), Layout(cp=2)):
        files.append(run_ranks(_with_cache, layout.world, GPT, layout, tmp_path)[0])
    assert len(set(files)) == 1, 'the files of one layout are those of another'


def test_the_cache_of_another_policy_is_an_error_on_every_rank(tmp_path):
    run_ranks(_with_cache, 1, GPT, Layout(), tmp_path)
    outcomes = run_ranks(_with_cache, 2, GPT, Layout(pp=2), tmp_path, 1.01, collect_errors=True)
    assert [outcome.error for outcome in outcomes] == ['ValueError'] * 2
    assert all('cache must hold the log-probs of this reference' in outcome.message for outcome in outcomes)


def test_a_broken_file_is_an_error_on_every_rank_that_names_it(tmp_path):
    run_ranks(_with_cache, 1, GPT, Layout(), tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(b'no tensor')
    outcomes = run_ranks(_with_cache, 2, GPT, Layout(pp=2), tmp_path, collect_errors=True)
    assert [outcome.error for outcome in outcomes] == ['ValueError'] * 2
    assert all(str(tmp_path) in outcome.message and 'delete it' in outcome.message for outcome in outcomes)


def _mixed(spec, directory):
    """Another policy whose first call meets none of the files that are there."""
    model = model_on(spec, Layout())
    (batch,) = micro_batches(spec, even(1, 1), 0)
    parts = [{key: value[i : i + 2] for key, value in batch.items()} for i in (0, 2, 4)]
    model.reference(cache=directory).logps(parts[:1])
    for chunk in model.chunks:
        scale(chunk, 1.5)
    other = model.reference(cache=directory)
    other.logps([])
    other.logps(parts[1:2])
    with pytest.raises(ValueError, match='another policy wrote them'):
        other.logps(parts[:1])
    return True


def test_the_cache_of_another_policy_is_noticed_whenever_it_is_met(tmp_path):
    assert run_ranks(_mixed, 1, GPT, tmp_path) == [True]


def _packings(spec, directory):
    """The same tokens, packed in two ways; and keys that the model does not read."""
    model = model_on(spec, Layout())
    made, plain = model.reference(cache=directory), model.reference()
    ids = torch.arange(12)[None] % spec.vocab_size
    for at in ((0, 6, 12), (0, 4, 12)):
        params = PackedSeqParams(qkv_format='thd', cu_seqlens_q=torch.tensor(at, dtype=torch.int32))
        batch = {'input_ids': ids, 'labels': ids, 'packed_seq_params': params}
        for found, want in zip(made.logps([batch]), plain.logps([batch]), strict=True):
            torch.testing.assert_close(found, want)
    made.logps([{**batch, 'reward': torch.ones(1)}])
    return len(os.listdir(directory))


def test_the_cache_knows_what_the_model_reads(tmp_path):
    assert run_ranks(_packings, 1, GPT, tmp_path) == [2]


def _no_directory(path):
    model = model_on(GPT, Layout(pp=2))
    model.reference(cache=path)


def test_a_cache_that_cannot_be_is_an_error_before_anything_is_computed(tmp_path):
    path = tmp_path / 'file'
    path.write_text('')
    for outcome in run_ranks(_no_directory, 2, path, collect_errors=True):
        assert outcome.error == 'ValueError'
        assert 'cache must be a directory that can be written to' in outcome.message
    for outcome in run_ranks(_no_directory, 2, 5, collect_errors=True):
        assert 'cache must be the path of a directory, got 5' in outcome.message


def _bad_adapter(what):
    model = model_on(GPT, Layout(pp=2))

    @contextlib.contextmanager
    def fails():
        if model.groups.is_last_stage:
            raise KeyError('no adapter')
        yield

    made = model.reference(adapter_off={'fails': fails, 'nothing': lambda: None, 'called': fails()}[what])
    made.logps(micro_batches(GPT, UNEVEN[1], 0))


@pytest.mark.parametrize(
    ('what', 'message'),
    [
        ('fails', 'no adapter'),
        ('nothing', r'adapter_off\(\) must return a context manager, got NoneType'),
        ('called', r'adapter_off must be a function that returns a context manager|must return a context manager'),
    ],
)
def test_an_adapter_that_cannot_be_switched_off_is_an_error_on_every_rank(what, message):
    for outcome in run_ranks(_bad_adapter, 2, what, collect_errors=True):
        assert outcome.error in ('ValueError', 'KeyError', 'TypeError'), outcome
        if what != 'called':
            assert re.search(message, outcome.message), outcome.message


def _own_directories(spec, directory):
    """Nodes without a shared file system: one rank has lost its files."""
    model = model_on(spec, Layout(tp=2))
    batches = micro_batches(spec, UNEVEN[1], 0)
    mine = directory / str(dist.get_rank())
    made = model.reference(cache=mine)
    first = made.logps(batches)
    if dist.get_rank() == 1:
        for file in mine.iterdir():
            file.unlink()
    second = made.logps(batches)
    return all(map(torch.equal, first, second)), len(list(mine.iterdir()))


def test_a_rank_without_its_files_has_all_compute_again(tmp_path):
    assert run_ranks(_own_directories, 2, GPT, tmp_path) == [(True, 3)] * 2


# ---- losses that couple the batch


def _kto(spec, layout, split, training):
    """With dropout: the first pass has to see the masks of the second."""
    initialize(layout)
    chunks = wrap(build(spec, layout))
    model = MegatronModel(chunks, vocab_size=spec.vocab_size)
    replica = dist.get_rank(model.groups.dp)
    batches = pairs_of(spec, split, replica, False, 'interleaved')
    given = reference_keywords(spec, split, replica, False, 'interleaved', 'sums')
    loss, init = KINDS['kto']
    model.set_loss(loss, **init)
    out = (model.forward_backward if training else model.forward_only)(batches, **given)
    return out['loss'], [x.cpu() for x in out['logps']], given


@pytest.mark.parametrize('training', [True, False], ids=['training', 'evaluation'])
@pytest.mark.parametrize('layout', [Layout(), Layout(tp=2), Layout(dp=2), Layout(pp=2)], ids=str)
def test_both_passes_draw_the_same_random_numbers(layout, training):
    """The loss is the formula of the log-probs that the second pass returns, whose dropout is random."""
    spec = dataclasses.replace(GPT, config={'hidden_dropout': 0.2, 'attention_dropout': 0.1})
    split = SPLITS['uneven', layout.dp]
    results = run_ranks(_kto, layout.world, spec, layout, split, training)
    chosen, rejected, nll, tokens = [], [], 0.0, 0
    seen = {}
    for _, logps, given in results:
        if logps:
            seen[str(given)] = (logps, given)  # of each replica the last stage's
    for logps, given in seen.values():
        sums = torch.cat([x.double().sum(1) for x in logps])
        ref = torch.tensor([given[f'ref_{side}_logps'] for side in ('chosen', 'rejected')], dtype=torch.float64)
        ref = ref.nan_to_num()
        chosen += (sums[0::2] - ref[0]).tolist()
        rejected += (sums[1::2] - ref[1]).tolist()
        nll -= float(sums[0::2].sum())
        tokens += sum(int((x[0::2] != 0).sum()) for x in logps)
    kept = [(c, r) for c, r in zip(chosen, rejected) if (c, r) != (0.0, 0.0)]
    assert len(kept) == 5
    beta, sft = (KINDS['kto'][1][name] for name in ('beta', 'sft_weight'))
    z = [max(0.0, sum(side) / len(kept)) for side in zip(*kept)]
    sigmoid = lambda x: 1 / (1 + torch.tensor(-x, dtype=torch.float64).exp().item())  # noqa: E731
    pairs = [2 - sigmoid(beta * (c - z[1])) - sigmoid(beta * (z[0] - r)) for c, r in kept]
    assert results[0][0] == pytest.approx(sum(pairs) / len(kept) + sft * nll / tokens, rel=1e-9)


def _scoped(spec, split):
    initialize(Layout())
    model = MegatronModel(wrap(build(spec)), vocab_size=spec.vocab_size)
    calls = Calls(model)
    found = []
    for scope in ('batch', 'micro_batch'):
        model.set_loss('DPOLoss', loss_type='kto', scope=scope)
        calls.count = 0
        batches = pairs_of(spec, split, 0, False, 'interleaved')
        given = reference_keywords(spec, split, 0, False, 'interleaved', 'ragged')
        found.append((model.forward_backward(batches, **given)['loss'], calls.count))
    return found


def test_the_second_pass_is_left_out_where_it_is_not_needed():
    """Of several micro-batches `scope='micro_batch'` takes another mean, and half the forward passes."""
    (((exact, twice), (cheap, once)),) = run_ranks(_scoped, 1, GPT, SPLITS['uneven', 1])
    assert (twice, once) == (6, 3)
    assert exact != pytest.approx(cheap, rel=1e-6)
    ((exact, first), (cheap, second)), = run_ranks(_scoped, 1, GPT, dataclasses.replace(SPLITS['uneven', 1],
                                                    replicas=((tuple(range(6)),),)))  # fmt: skip
    assert (first, second) == (1, 1)
    assert exact == pytest.approx(cheap, rel=1e-12)
