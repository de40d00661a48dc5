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
from twinkle_megatron.loss import InfonceLoss, infonce
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
    assert min(expected) < 0.9 * expected[0]


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
    'positions of another length': (
        _with('InfonceLoss', edit=_put('position_ids', lambda b: b['input_ids'][:, 1:])),
        "['position_ids'] must have the shape of input_ids",
    ),
    'a metric of embeddings beside cross entropy': (
        lambda model: (
            model.set_loss('CrossEntropyLoss'), model.add_metric(EmbeddingMetric), model.forward_only(batches_of(model))
        ),
        'EmbeddingMetric is computed from embeddings, but with the loss CrossEntropyLoss the model gives logits',
    ),
    'a metric of logits beside embeddings': (
        lambda model: (
            model.set_loss('InfonceLoss'), model.add_metric('Accuracy'), model.forward_backward(batches_of(model))
        ),
        'Accuracy is computed from logits, but with the loss InfonceLoss EmbeddingHead',
    ),
    'different means before one step': (
        lambda model: (
            model.set_loss('InfonceLoss'), model.forward_backward(batches_of(model)),
            model.set_loss('MSELoss'), model.forward_backward(batches_of(model, 'token')),
        ),
        'calls before one step must be means over the same, got groups first and tokens now',
    ),
    'an output layer of its own': (
        lambda model: (
            setattr(unwrapped(model.chunks[0]).output_layer, 'forward', print), model.set_loss('InfonceLoss'),
            model.forward_backward(batches_of(model)),
        ),
        'has a forward of its own, which would not be called',
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


# ---- found by trying to break it


def _no_rows(layout, name):
    """A replica whose micro-batch has no rows."""
    model = model_on(layout)
    kind = KINDS[name]
    model.set_head(kind.head)
    model.set_loss(kind.loss, **kind.init)
    batches = micro_batches(GPT, ONE, 0, 'right', kind.labels)
    if dist.get_rank(model.groups.dp) == 1:
        batches = [{key: value[:0] for key, value in batch.items()} for batch in batches]
    out = model.forward_backward(batches)
    return out['loss'], collect_grads(model.chunks), [len(x) for x in out[kind.head.gives]]


@pytest.mark.parametrize('name', ['plain', 'own', 'reward', 'value'])
def test_a_micro_batch_without_rows_changes_nothing(name):
    results = run_ranks(_no_rows, 2, Layout(dp=2), name, timeout=60)
    assert results[1][2] == [0]
    for loss, _, _ in results:
        assert loss == pytest.approx(reference(GPT)[name].loss, rel=1e-9)
    assert compare([grads for _, grads, _ in results], reference(GPT)[name].grads).error < 1e-9


def _between_the_passes(layout, method, split):
    model = model_on(layout)
    loss = InfonceLoss()
    if dist.get_rank() == dist.get_world_size() - 1:

        def fail(*args, **kwargs):
            raise MemoryError('no room for all rows')

        if method == 'contrast':
            infonce.contrast = fail
        else:
            setattr(loss, method, fail)
    model.set_loss(loss)
    model.forward_backward(batches_of(model, name=split))


@pytest.mark.parametrize(
    ('layout', 'method', 'split'),
    [
        (Layout(pp=2), '_alone', 'uneven'),
        (Layout(tp=2), '_alone', 'uneven'),
        (Layout(dp=2), 'contrast', 'uneven'),
        (Layout(dp=2), 'contrast', 'one'),
    ],
    ids=str,
)
def test_an_error_over_all_embeddings_ends_all_ranks(layout, method, split):
    for outcome in run_ranks(_between_the_passes, 2, layout, method, split, collect_errors=True, timeout=60):
        assert outcome.error == 'MemoryError', outcome
        assert 'no room for all rows' in outcome.message


class Returns:
    """A value loss of somebody, with a keyword that has an entry for each token."""

    reads = ('values',)

    def __call__(self, inputs, outputs, returns):
        error = torch.where(inputs['completion_mask'] > 0, outputs['values'] - torch.as_tensor(returns), 0)
        return {'loss': (error**2).sum(), 'num_tokens': inputs['completion_mask'].sum()}


def _returns(side, form):
    model = model_on()
    model.set_loss(Returns())
    (batch,) = batches_of(model, 'token', 'one', side)
    returns = batch['labels'].numpy() if form == 'array' else batch['labels']
    batch['completion_mask'] = (batch['labels'] != -7).long()
    return model.forward_backward([batch], returns=returns)['loss']


@pytest.mark.parametrize('form', ['tensor', 'array'])
def test_keywords_of_a_custom_loss_are_moved_with_left_padding(form):
    for side in ('right', 'left'):
        assert run_ranks(_returns, 1, side, form)[0] == pytest.approx(reference(GPT)['value'].loss, rel=1e-9)


def _custom_sum(calls):
    """A sum over sequences, in one call or two."""

    def loss(inputs, outputs):
        counted = inputs['labels'] != -100
        squares = torch.where(counted, outputs['values'] - inputs['labels'], 0) ** 2
        return {'loss': squares.sum(), 'num_tokens': counted.sum()}

    model = model_on()
    model.set_head(ScalarHead('last'))
    model.set_loss(loss)
    loss.ignore_index = -100
    model.set_metric(LossMetric)
    batches = batches_of(model, 'sequence')
    for part in [batches] if calls == 1 else [batches[:1], batches[1:]]:
        model.forward_backward(part)
    return collect_grads(model.chunks), model.metric_values()['loss']


@pytest.mark.parametrize('calls', [1, 2])
def test_a_custom_sum_over_sequences_weighs_by_sequences(calls):
    grads, loss = run_ranks(_custom_sum, 1, calls)[0]
    want = reference(GPT)['reward']
    assert compare([grads], want.grads).error < 1e-9
    assert loss == pytest.approx(want.loss, rel=1e-9)


def _all_ignored():
    model = model_on()
    model.set_head(ScalarHead('last'))
    model.set_loss('MSELoss')
    batches = [{**batch, 'labels': batch['labels'] * 0 - 100} for batch in batches_of(model, 'sequence')]
    out = model.forward_backward(batches)
    return out, model._accumulation.ready()


def test_nothing_that_counts_trains_nothing():
    assert run_ranks(_all_ignored, 1)[0] == ({'loss': 0.0, 'values': []}, False)


def _foreign_keys():
    model = model_on()
    model.set_loss('CrossEntropyLoss')
    samples = [{'input_ids': [1, 2, 3], 'labels': [2, 3, 4], 'targets': 'a text', 'pool_weights': 1}] * 2
    rows = {
        'input_ids': torch.ones(2, 3).long(),
        'labels': torch.ones(2, 3).long(),
        'targets': torch.full((2,), torch.nan),
    }
    return model.forward_only(samples)['loss'], model.forward_only(rows)['loss']


def test_other_keys_of_the_inputs_are_left_alone():
    assert all(loss > 0 for loss in run_ranks(_foreign_keys, 1)[0])


def _late(wrapped):
    initialize(Layout())
    chunks = build(GPT)
    chunks = wrap(chunks) if wrapped else chunks
    optimizer = None if wrapped else torch.optim.SGD(chunks[0].parameters(), lr=0.1)
    add_value_head(unwrapped(chunks[0]))
    model = MegatronModel(chunks, optimizer, vocab_size=62)
    model.set_loss('MSELoss')
    model.forward_backward(batches_of(model, 'token'))


@pytest.mark.parametrize(('wrapped', 'before'), [(True, 'DistributedDataParallel'), (False, 'the optimizer is made')])
def test_a_value_head_that_would_not_be_trained_is_refused(wrapped, before):
    (outcome,) = run_ranks(_late, 1, wrapped, collect_errors=True)
    assert outcome.error == 'ValueError'
    assert 'add_value_head before' in outcome.message
    assert before in outcome.message


class Doubled(InfonceLoss):
    """Overrides what `Loss` says that a subclass overrides."""

    def __call__(self, inputs, outputs, **extra):
        out = super().__call__(inputs, outputs, **extra)
        return {**out, 'loss': 2 * out['loss']}


def _overridden():
    model = model_on()
    model.set_loss(Doubled(use_batch=False))
    model.set_head(KINDS['own'].head)
    return model.forward_backward(batches_of(model, name='one'))['loss']


def test_a_subclass_that_overrides_the_call_is_called():
    assert run_ranks(_overridden, 1)[0] == pytest.approx(2 * reference(GPT)['own'].loss, rel=1e-9)


def _masked_metrics():
    model = model_on()
    model.set_loss('InfonceLoss', **KINDS['blocks'].init)
    model.set_head(KINDS['blocks'].head)
    model.add_metric(LossMetric, is_training=True)
    batches = [{**batch, 'completion_mask': batch['attention_mask']} for batch in batches_of(model)]
    return model.forward_backward(batches)['loss'], model.metric_values()['loss']


def test_a_completion_mask_says_what_is_pooled_and_disturbs_no_metric():
    for loss in run_ranks(_masked_metrics, 1)[0]:
        assert loss == pytest.approx(reference(GPT)['blocks'].loss, rel=1e-9)


def _own_group_only():
    model = model_on(Layout(cp=2))
    model.set_loss('InfonceLoss', **KINDS['plain'].init)
    model.add_metric(EmbeddingMetric(process_group=model.groups.dp_cp), is_training=True)
    model.forward_backward(batches_of(model))
    return model.metric_values()


def test_a_metric_that_was_given_its_group_alone_learns_the_layout():
    for values in run_ranks(_own_group_only, 2):
        assert values == pytest.approx(reference(GPT)['plain'].metrics, rel=1e-9)


def _vectors():
    model = model_on(Layout(cp=2))
    model.set_head(EmbeddingHead('mean', normalize=False))
    model.set_loss('MSELoss')
    batches = batches_of(model, name='uneven')
    found = model.predict(batches)
    for batch in batches:
        batch['labels'] = torch.full((len(batch['labels']), GPT.hidden), 0.5)
    out = model.forward_backward(batches)
    every = torch.cat(found)
    return out['loss'], ((every - 0.5) ** 2).mean().item()


def test_embeddings_are_drawn_to_vectors():
    for loss, expected in run_ranks(_vectors, 2):
        assert loss == pytest.approx(expected, rel=1e-9)


def _packed_with_a_mask(layout):
    model = model_on(layout)
    model.set_loss('InfonceLoss', **KINDS['plain'].init)
    batches = batches_of(model, side='packed')
    for batch in batches:
        length = batch['input_ids'].shape[1]
        batch['attention_mask'] = torch.cat([torch.ones(1, length), torch.zeros(1, 3)], 1).long()
        batch['labels'] = batch['labels'][None]
        for key in ('input_ids', 'position_ids'):
            batch[key] = torch.cat([batch[key], torch.zeros(1, 3, dtype=torch.int64)], 1)
    return model.forward_backward(batches)['loss']


@pytest.mark.parametrize('layout', [Layout(), Layout(cp=2)], ids=str)
def test_packed_rows_may_bring_a_mask_and_labels_of_one_row(layout):
    for loss in run_ranks(_packed_with_a_mask, layout.world, layout):
        assert loss == pytest.approx(reference(GPT)['plain'].loss, rel=1e-9)


def _kept():
    """Bytes that autograd keeps of the pooling."""
    from twinkle_megatron.megatron.embedding import _Pool

    hidden = torch.randn(500, 64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        _Pool.apply(hidden, torch.rand(500), torch.zeros(500, dtype=torch.int64), 3)
    return kept


def test_pooling_keeps_no_hidden_states():
    assert _kept() == [500, 500]


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
