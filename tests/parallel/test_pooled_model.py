"""Heads in place of the vocabulary on MegatronModel: set and taken back, errors, other losses, Megatron's options."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from gradients import collect_grads, compare
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from pooled import ALL, GROUPS, KINDS, SPLITS, gpt, micro_batches, reference, samples
from ranks import run_ranks
from test_pooled import GPT
from tiny_gpt import Layout, build, initialize, unwrapped, wrap

from twinkle_megatron import EmbeddingHead, MegatronModel, ScalarHead
from twinkle_megatron.loss import InfonceLoss
from twinkle_megatron.megatron.embedding import add_value_head
from twinkle_megatron.metric import EmbeddingMetric, LossMetric

ONE = SPLITS['one', 1]


SINGLE = Layout()


def model_on(layout=SINGLE, per_token=True, **ddp):
    initialize(layout)
    return MegatronModel(wrap(gpt(GPT, layout, per_token), **ddp), vocab_size=GPT.vocab_size)


def batches_of(model, labels='starts', name='uneven', side='right'):
    split = SPLITS[name, dist.get_world_size(model.groups.dp)]
    return micro_batches(GPT, split, dist.get_rank(model.groups.dp), side, labels)


# ---- set and taken back


def _set_and_taken_back(layout):
    model = model_on(layout)
    text = [{'input_ids': torch.arange(2 * 16).reshape(2, 16) % 62, 'labels': torch.arange(2 * 16).reshape(2, 16) % 61}]
    model.set_loss('CrossEntropyLoss')
    first = model.forward_backward(text)
    before = {name: set(vars(module)) for chunk in model.chunks for name, module in chunk.named_modules()}
    grads = collect_grads(model.chunks)
    model.zero_grad()
    model.set_loss(InfonceLoss)
    encoded = model.forward_backward(batches_of(model))
    model.zero_grad()
    model.set_loss('CrossEntropyLoss')
    again = model.forward_backward(text)
    worst = compare([collect_grads(model.chunks)], grads)
    after = {name: set(vars(module)) for chunk in model.chunks for name, module in chunk.named_modules()}
    return first['loss'], again['loss'], worst.error, before == after, sorted(encoded)


def test_a_loss_brings_its_head_and_leaves_the_chunk_as_it_was():
    for first, again, error, same, keys in run_ranks(_set_and_taken_back, 2, Layout(pp=2)):
        assert first == again
        assert error == 0
        assert same
        assert keys == ['embeddings', 'loss']


def _predicted(layout, side, head, per_sample):
    model = model_on(layout)
    model.set_head(head)
    batches = batches_of(model, side=side)
    if per_sample:
        rows = [(i, one) for i, group in enumerate(samples(GPT)) for one in group]
        batches = [{'input_ids': one['input_ids']} for _, one in rows]
    else:
        batches = [{key: value for key, value in batch.items() if key != 'labels'} for batch in batches]
    return model.predict(batches, 5 if per_sample else None), model.groups.is_last_stage


@pytest.mark.parametrize('per_sample', [False, True])
def test_predict_needs_no_loss_and_no_labels(per_sample):
    expected = reference(GPT)['plain'].logps
    for found, last in run_ranks(_predicted, 2, Layout(pp=2), 'packed', EmbeddingHead(), per_sample):
        if not last:
            assert found == []
            continue
        order = range(len(expected)) if per_sample else _in_order('uneven')
        for mine, n in zip(torch.cat(found), order, strict=True):
            torch.testing.assert_close(mine, expected[n], rtol=1e-9, atol=1e-9)
        assert not any(one.requires_grad for one in found)


def _in_order(name):
    starts = [sum(len(group) for group in GROUPS[:i]) for i in ALL]
    at = [i for micro_batch in SPLITS[name, 1].replicas[0] for i in micro_batch]
    return [n for i in at for n in range(starts[i], starts[i] + len(GROUPS[i]))]


def _samples_are_cut_between_groups(size):
    model = model_on()
    model.set_loss('InfonceLoss', **KINDS['plain'].init)
    rows = [one for group in samples(GPT) for one in group]
    inputs = [{'input_ids': one['input_ids'], 'labels': int(one['starts'])} for one in rows]
    out = model.forward_backward(inputs, micro_batch_size=size)
    return out['loss'], [len(part) for part in out['embeddings']], collect_grads(model.chunks)


@pytest.mark.parametrize(('size', 'parts'), [(5, [5, 4, 5, 4]), (1, [3, 2, 4, 3, 2, 4]), (100, [18])])
def test_a_list_of_samples_is_cut_between_groups(size, parts):
    loss, lengths, grads = run_ranks(_samples_are_cut_between_groups, 1, size)[0]
    assert lengths == parts
    assert loss == pytest.approx(reference(GPT)['plain'].loss, rel=1e-9)
    assert compare([grads], reference(GPT)['plain'].grads).error < 1e-9


# ---- Megatron's options


def _trained(layout, per_token, steps, name, ddp):
    initialize(layout)
    spec = dataclasses.replace(GPT, dtype=torch.float32)
    chunks = wrap(gpt(spec, layout, per_token), **ddp)
    distributed = ddp.get('distributed_optimizer', False)
    config = OptimizerConfig(lr=1e-2, weight_decay=0.0, use_distributed_optimizer=distributed, **_overlapped(ddp))
    model = MegatronModel(chunks, get_megatron_optimizer(config, chunks), vocab_size=62)
    kind = KINDS[name]
    model.set_head(kind.head)
    model.set_loss(kind.loss, **kind.init)
    losses = []
    for _ in range(steps):
        losses.append(model.forward_backward(batches_of(model, kind.labels))['loss'])
        model.clip_grad_and_step()
    if layout.tp > 1 and model.groups.is_last_stage:  # replicas must not drift apart
        for name, parameter in unwrapped(chunks[-1]).named_parameters():
            if not getattr(parameter, 'tensor_model_parallel', False):
                every = [torch.empty_like(parameter) for _ in range(layout.tp)]
                dist.all_gather(every, parameter.detach(), group=model.groups.tp)
                assert all(torch.equal(one, every[0]) for one in every), name
    return losses


def _overlapped(ddp):
    return {'overlap_param_gather': True} if ddp.get('overlap_param_gather') else {}


@pytest.mark.parametrize('name', ['plain', 'reward', 'value'])
@pytest.mark.parametrize(
    ('layout', 'ddp'),
    [
        (Layout(dp=2), {'overlap': True}),
        (Layout(dp=2), {'overlap': True, 'distributed_optimizer': True, 'overlap_param_gather': True}),
        (Layout(tp=2, sp=True, pp=2), {}),
    ],
    ids=['overlapped', 'overlapped distributed optimizer', 'tp2-sp-pp2'],
)
def test_it_trains_under_megatrons_options_alike(layout, ddp, name):
    expected = run_ranks(_trained, 1, Layout(), True, 4, name, {})[0]
    for losses in run_ranks(_trained, layout.world, layout, False, 4, name, ddp):
        assert losses == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.9 * expected[0]


def _no_logits(layout):
    """The output layer multiplies nothing, and its weight gets a gradient of zeros."""

    def refuse(*args, **kwargs):
        raise AssertionError('the logits were built')

    model = model_on(layout)
    model.set_loss(InfonceLoss)
    for chunk in model.chunks:
        gpt_model = unwrapped(chunk)
        if gpt_model.post_process:
            gpt_model.output_layer._forward_impl = refuse
    return model.forward_backward(batches_of(model))['loss']


def test_no_logits_are_built():
    assert run_ranks(_no_logits, 2, Layout(tp=2))[0] > 0


def _half(dtype):
    initialize(Layout())
    spec = dataclasses.replace(GPT, dtype=dtype)
    chunks = build(spec)
    model = MegatronModel(wrap(chunks), vocab_size=62)
    model.set_loss('InfonceLoss', **KINDS['plain'].init)
    out = model.forward_backward(batches_of(model))
    lengths = torch.cat(out['embeddings']).norm(dim=1)
    return out['loss'], out['embeddings'][0].dtype, lengths


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_embeddings_of_half_precision_models_are_float32(dtype):
    loss, got, lengths = run_ranks(_half, 1, dtype)[0]
    assert got == torch.float32
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=1e-6, atol=0)
    assert loss == pytest.approx(reference(GPT)['plain'].loss, rel=0.05)


def _several_calls(finalize):
    """Two calls before one step are the mean over the anchors of both."""
    model = model_on(Layout(dp=2))
    model.set_loss('InfonceLoss', **KINDS['own'].init)
    model.set_head(KINDS['own'].head)
    replica = dist.get_rank(model.groups.dp)
    parts = [((0, 1),), ((2,),)] if replica == 0 else [((3,),), ((4, 5),)]
    for number, part in enumerate(parts):
        split = dataclasses.replace(SPLITS['one', 1], replicas=(part,))
        model.forward_backward(micro_batches(GPT, split, 0, 'right', 'starts'), finalize=finalize or number == 1)
    assert model._accumulation.ready()
    return collect_grads(model.chunks)


@pytest.mark.parametrize('finalize', [True, False])
def test_several_calls_weigh_by_their_anchors(finalize):
    results = run_ranks(_several_calls, 2, finalize)
    assert compare(results, reference(GPT)['own'].grads).error < 1e-9


def _with_dropout(layout, split):
    """Dropout of the first pass and of the second is the same, so that the gradient is one of a function."""
    spec = dataclasses.replace(GPT, config={'hidden_dropout': 0.3, 'attention_dropout': 0.2})
    initialize(layout)
    chunks = wrap(gpt(spec, layout, True))
    model = MegatronModel(chunks, vocab_size=62)
    model.set_loss('InfonceLoss', **KINDS['plain'].init)
    results = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(3)
        out = model.forward_backward(batches_of(model, name=split))
        results.append((out['loss'], collect_grads(chunks), torch.cat(out['embeddings'])))
    (loss, grads, found), again = results
    assert again[0] == loss
    # the loss of pass 1 is that of the embeddings of pass 2
    starts = torch.cat([batch['labels'] for batch in batches_of(model, name=split)])
    by_hand = InfonceLoss(**KINDS['plain'].init)({'labels': starts}, {'embeddings': found})['loss'].item()
    return loss, by_hand, compare([again[1]], grads).error


def test_both_passes_draw_the_same_random_numbers():
    loss, by_hand, error = run_ranks(_with_dropout, 1, Layout(), 'uneven')[0]
    assert loss == pytest.approx(by_hand, rel=1e-12)
    assert error == 0
    assert loss != pytest.approx(reference(GPT)['plain'].loss, rel=1e-3)


# ---- custom losses and metrics


class Seen:
    """A custom loss of embeddings: its mean weighs each micro-batch alike."""

    def __call__(self, inputs, outputs):
        assert 'logits' not in outputs
        assert inputs['labels'].shape == outputs['embeddings'].shape[:1]
        return (outputs['embeddings'] ** 3).sum()


def _custom(layout):
    model = model_on(layout)
    model.set_head(EmbeddingHead('mean', normalize=False))
    model.set_loss(Seen())
    model.add_metric(LossMetric, is_training=True)
    out = model.forward_backward(batches_of(model, name='uneven'))
    return out['loss'], collect_grads(model.chunks), out['embeddings']


def test_a_custom_loss_reads_embeddings_and_the_labels_of_its_caller():
    one = run_ranks(_custom, 1, Layout())[0]
    expected = sum((found**3).sum() for found in one[2]) / 3
    assert one[0] == pytest.approx(expected.item(), rel=1e-9)
    for layout in (Layout(tp=2, sp=True), Layout(cp=2), Layout(pp=2)):
        results = run_ranks(_custom, 2, layout)
        assert results[0][0] == pytest.approx(one[0], rel=1e-9)
        assert compare([result[1] for result in results], one[1]).error < 1e-9


# ---- what is refused


def _refused(change):
    return change(model_on())


def _no_value_head(model):
    model = MegatronModel(wrap(build(GPT)), vocab_size=62)
    model.set_loss('MSELoss')
    model.forward_backward(batches_of(model, 'token'))


def _mtp(model):
    spec = dataclasses.replace(GPT, mtp=1, position='rope')
    model = MegatronModel(wrap(build(spec)), vocab_size=62)
    model.set_loss('InfonceLoss')
    model.forward_backward(batches_of(model))


def _with(loss=None, head=None, labels='starts', edit=lambda batch: batch, **init):
    def change(model):
        if head is not None:
            model.set_head(head)
        if loss is not None:
            model.set_loss(loss, **init)
        model.forward_backward([edit(batch) for batch in batches_of(model, labels)])

    return change


def _without(key):
    return lambda batch: {name: value for name, value in batch.items() if name != key}


def _put(key, value):
    return lambda batch: {**batch, key: value(batch)}


def _hole(batch):
    mask = batch['attention_mask'].clone()
    mask[0, 2] = 0
    return mask


def _empty_row(batch):
    mask = batch['attention_mask'].clone()
    mask[1] = 0
    return mask


REFUSED = {
    'a class as head': (lambda model: model.set_head(EmbeddingHead), "'auto', 'logits', 'linear', or an instance"),
    'unknown pooling': (lambda model: EmbeddingHead('max'), "one of 'last', 'mean', 'first', got 'max'"),
    'normalize': (lambda model: EmbeddingHead(normalize=1), 'normalize must be True or False'),
    'logits of embeddings': (_with('CrossEntropyLoss', EmbeddingHead()), 'CrossEntropyLoss is computed from logits'),
    'infonce on values': (_with('InfonceLoss', ScalarHead('last')), 'model.set_head(EmbeddingHead())'),
    'no value head': (_no_value_head, 'add_value_head(gpt) before the chunk is wrapped'),
    'multi-token prediction': (_mtp, 'multi-token prediction trains on the logits'),
    'no labels': (_with('InfonceLoss', edit=_without('labels')), "inputs[0] has no 'labels' (one entry a sequence)"),
    'a label too many': (
        _with('InfonceLoss', edit=_put('labels', lambda b: torch.cat([b['labels'], b['labels'][:1]]))),
        "inputs[0]['labels'] must have one entry for each of the 5 sequences, got shape (6,)",
    ),
    'labels per token': (
        _with('InfonceLoss', edit=_put('labels', lambda b: b['input_ids'])),
        "inputs[0]['labels']",
    ),
    'a cut group': (_with('InfonceLoss', edit=_put('labels', lambda b: b['labels'] * 0)), 'was a group cut'),
    'no positive': (_with('InfonceLoss', edit=_put('labels', lambda b: b['labels'] * 0 + 1)), 'has no positive'),
    'no negative': (_with('InfonceLoss', hard_negatives=2), 'hard_negatives=2 must find negatives'),
    'a number a sequence for a value a token': (
        _with('MSELoss', labels='sequence'), "let the head pool: ScalarHead(pooling='last')",
    ),
    'a number a token for a value a sequence': (
        _with('MSELoss', ScalarHead('last'), labels='token'), "['labels'] must be one number for each sequence",
    ),
    'NaN labels': (
        _with('MSELoss', ScalarHead('last'), labels='sequence', edit=_put('labels', lambda b: b['labels'] * torch.nan)),
        "inputs[0]['labels'] of sequence 0 must be numbers where they count, got NaN",
    ),
    'NaN labels of a token': (
        _with('MSELoss', labels='token', edit=_put('labels', lambda b: b['labels'] * torch.nan)),
        "inputs[0]['labels'] of sequence 0 must be numbers where they count, got NaN",
    ),
    'inner padding': (_with('InfonceLoss', edit=_put('attention_mask', _hole)), 'inner padding'),
    'an empty sequence': (
        _with('InfonceLoss', edit=_put('attention_mask', _empty_row)), 'inputs[0]: sequence 1 has no token to pool',
    ),
    'words as labels': (
        _with('InfonceLoss', edit=_put('labels', lambda b: ['a'] * len(b['labels']))), "['labels'] must be numbers",
    ),
    'an unknown keyword': (
        lambda model: (model.set_loss('InfonceLoss'), model.forward_backward(batches_of(model), advantages=[1])),
        "no argument 'advantages'",
    ),
    'a reference of embeddings': (
        lambda model: (model.set_loss('InfonceLoss'), model.reference().logps(batches_of(model))),
        'InfonceLoss is not computed from logits',
    ),
    'predict without a head': (lambda model: model.predict(batches_of(model)), 'set_head(EmbeddingHead())'),
    'a value head twice': (lambda model: add_value_head(unwrapped(model.chunks[0])), 'has a value head already'),
    'a value head on a wrapped chunk': (lambda model: add_value_head(model.chunks), 'before it is wrapped'),
}  # fmt: skip


def _messages():
    found = {}
    for name, (change, _) in REFUSED.items():
        try:
            _refused(change)
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    return found


def test_wrong_calls_are_told_what_is_wrong():
    found = run_ranks(_messages, 1, timeout=120)[0]
    for name, (_, expected) in REFUSED.items():
        assert name in found, f'{name} was not refused'
        kind, message = found[name]
        assert kind == 'ValueError', (name, kind, message)
        assert re.search(re.escape(expected), message), (name, message)


def _wrong_on_one_rank(layout, what):
    model = model_on(layout)
    model.set_loss('InfonceLoss')
    batches = batches_of(model, name='one' if what == 'loss' else 'uneven')
    rank = dist.get_rank(model.groups.dp)
    if what == 'labels' and rank == 1:
        batches[0]['labels'] = batches[0]['labels'] * 0
    if what in ('loss', 'head') and rank == 1:

        def fail(*args, **kwargs):
            raise ZeroDivisionError('out of memory')

        if what == 'head' or model.groups.is_last_stage:
            model.set_head(EmbeddingHead())
            model._engine.pooled.read = fail
    model.forward_backward(batches)


@pytest.mark.parametrize('what', ['labels', 'loss', 'head'])
def test_an_error_on_one_replica_ends_all_ranks(what):
    """'loss': with one micro-batch each the others wait for its embeddings in the middle of the schedule."""
    for outcome in run_ranks(_wrong_on_one_rank, 4, Layout(dp=2, pp=2), what, collect_errors=True, timeout=60):
        assert outcome.error == ('ValueError' if what == 'labels' else 'ZeroDivisionError'), outcome
        assert ('was a group cut' if what == 'labels' else 'out of memory') in outcome.message


def _metric_over_calls():
    model = model_on(Layout(dp=2))
    model.set_loss('InfonceLoss', **KINDS['plain'].init)
    model.add_metric(EmbeddingMetric)
    batches = batches_of(model)
    model.forward_backward(batches)
    model.zero_grad()
    model.forward_backward(batches)
    model.forward_only(batches)
    return model.metric_values(True), model.metric_values(False), model.calculate_metric(True)


def test_metrics_of_several_calls_take_each_call_for_a_batch_of_its_own():
    want = reference(GPT)['plain'].metrics
    for training, evaluation, shown in run_ranks(_metric_over_calls, 2):
        assert {k: v for k, v in training.items() if k in want} == pytest.approx(want, rel=1e-9)
        assert evaluation == pytest.approx(want, rel=1e-9)
        assert shown['neg_sim'] == f'{want["neg_sim"]:.4f}'
