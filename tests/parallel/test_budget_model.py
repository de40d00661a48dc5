"""Samples packed by a budget of tokens: the loss, the gradients and what is found are those of whole rows."""

from __future__ import annotations

import dataclasses
import functools

import invariance
import policy
import pooled
import preference
import pytest
import torch
import torch.distributed as dist
from gradients import collect_grads, compare
from ranks import run_ranks
from tiny_gpt import Layout, Spec, build, initialize, wrap

from twinkle_megatron import EmbeddingHead, MegatronModel
from twinkle_megatron.metric import GRPOMetric

GPT = Spec(vocab_size=62, pad_vocab_to=4)


def share(items, layout, replica):
    """Of one replica of two: the second one has few."""
    cut = len(items) if layout.dp == 1 else 2 * len(items) // 3
    return items[:cut] if replica == 0 else items[cut:]


def text():
    """The samples of invariance.py without what follows their last trained token; one has no token at all."""
    out = []
    for i, one in enumerate(invariance.samples(GPT)):
        kept = (one['labels'] != -100).nonzero().reshape(-1)
        length = int(kept[-1]) + 1 if len(kept) else i // 3
        out.append({key: value[:length] for key, value in one.items()})
    return out


def rollout_samples():
    whole = policy.cut_samples(GPT)
    return [{key: value[:n] for key, value in one.items()} for one, n in zip(whole, policy.LENGTHS)]


def groups(labels):
    return [[{'input_ids': one['input_ids'], 'labels': one[labels]} for one in group] for group in pooled.samples(GPT)]


class Counting:
    """What a model has planned last."""

    def __init__(self, model):
        self.plans, self._plan = [], model._engine.plan
        model._engine.plan = self

    def __call__(self, *args, **kwargs):
        self.plans.append(self._plan(*args, **kwargs))
        return self.plans[-1]

    def rows(self):
        """Tokens of each sequence of each packed row, and how many micro-batches are padding."""
        items = self.plans[-1].items
        real = [item for item in items if not item.is_padding]
        return [item.packing.boundaries.diff().tolist() for item in real], len(items) - len(real)


def _run(layout, per_token=True):
    """Every kind of loss once: its results, gradients and micro-batches by name."""
    initialize(layout)
    spec = dataclasses.replace(GPT, config={'calculate_per_token_loss': per_token})
    out = {}
    model = MegatronModel(wrap(build(spec, layout)), vocab_size=62)
    replica, seen = dist.get_rank(model.groups.dp), Counting(model)

    def call(name, inputs, budget, method=model.forward_backward, **extra):
        model.zero_grad()
        found = method(inputs, max_tokens_per_micro_batch=budget, **extra)
        metrics = model.metric_values()
        model.calculate_metric()
        out[name] = found, collect_grads(model.chunks), seen.rows(), metrics

    mine = functools.partial(share, layout=layout, replica=replica)
    model.set_loss('CrossEntropyLoss')
    call('ce', mine(text()), 24)
    model.set_loss('GRPOLoss', **policy.INIT['GRPOLoss'])
    model.add_metric(GRPOMetric, is_training=True, **{**policy.METRIC_INIT[GRPOMetric], 'top_k_kl': 0})
    given = {name: mine(value) for name, value in vars(policy.rollouts(GPT)).items()}
    call('grpo', mine(rollout_samples()), 24, **given)
    pairs = mine(preference.samples(GPT))
    for order in ('interleaved', 'separated'):
        sequences = preference.in_order(pairs, order)
        inputs = [{key: one[key] for key in ('input_ids', 'labels')} for one in sequences]
        ref = [one['ref'][one['labels'] != -100] for one in sequences]
        sums = {
            f'ref_{side}_logps': [float(pair[k]['ref'].nansum()) for pair in pairs]
            for k, side in enumerate(('chosen', 'rejected'))
        }
        model.set_loss('DPOLoss', **preference.KINDS['sigmoid'][1], layout=order)
        model.set_metric('DPOMetric', is_training=True, beta=preference.BETA, layout=order)
        call(f'{order} tokens', inputs, 48, ref_logps=ref)
        call(f'{order} sums', inputs, 48, **sums)
    model = MegatronModel(wrap(pooled.gpt(GPT, layout, per_token)), vocab_size=62)
    seen = Counting(model)
    for name in ('plain', 'blocks', 'reward', 'value'):
        kind = pooled.KINDS[name]
        model.set_head(kind.head)
        model.set_loss(kind.loss, **kind.init)
        inputs = [one for group in mine(groups(kind.labels)) for one in group]
        call(name, inputs, 64, model.forward_backward)
    model.set_head(EmbeddingHead())
    out['predicted'] = model.predict([{'input_ids': one['input_ids']} for one in inputs], max_tokens_per_micro_batch=40)
    return out, replica, model.groups.is_last_stage


def expected(name, layout):
    """Of the whole batch in one process: loss, gradients, and what is found of each sample."""
    spec = GPT.on(layout)
    if name == 'ce':
        found = invariance.reference(spec, {})
        return found, [row[: len(one['labels'])] for row, one in zip(found.logps[0], text())]
    if name == 'grpo':
        found = policy.reference(spec, 'GRPOLoss')
        return found, [row[:n] for row, n in zip(found.logps[0], policy.LENGTHS)]
    if name in pooled.KINDS:
        found = pooled.reference(spec)[name]
        return found, found.logps
    found = preference.reference(spec)['sigmoid']
    lengths = [n for pair in preference.LENGTHS for n in pair]
    return found, [row[:n] for row, n in zip(found.logps[0], lengths)]


def units_of_replica(name, found, layout, replica):
    """What is found of each sample, pair or group of it."""
    sizes = [2] * 6 if name in NAMES[2:6] else [len(group) for group in pooled.GROUPS]
    sizes = [1] * 8 if name in NAMES[:2] else sizes
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return share([found[end - size : end] for end, size in zip(ends, sizes)], layout, replica)


def of_replica(name, found, layout, replica):
    """What is found of its samples, in the order in which they were given."""
    units = units_of_replica(name, found, layout, replica)
    return preference.in_order(units, 'separated') if 'separated' in name else [one for unit in units for one in unit]


NAMES = ['ce', 'grpo', 'interleaved tokens', 'interleaved sums', 'separated tokens', 'separated sums']
NAMES += ['plain', 'blocks', 'reward', 'value']


@pytest.mark.parametrize(
    ('layout', 'per_token'),
    [
        (Layout(), True),
        (Layout(dp=2), False),
        pytest.param(Layout(pp=2), True, marks=pytest.mark.long),
        (Layout(cp=2), False),
        (Layout(tp=2, sp=True), True),
        (Layout(pp=2, vpp=2, dp=2), True),
    ],
    ids=lambda x: str(x) if isinstance(x, Layout) else 'nm'[not x],
)
def test_packing_by_a_budget_changes_neither_loss_nor_gradients_nor_results(layout, per_token):
    every = run_ranks(_run, layout.world, layout, per_token, timeout=90)
    for name in NAMES:
        budget = 24 if name in NAMES[:2] else 48 if name in NAMES[:6] else 64
        reference, single = expected(name, layout)
        ranks = [out[name] for out, _, _ in every]
        count = len(ranks[0][2][0]) + ranks[0][2][1]
        for (found, _, (rows, padding), _), (_, replica, _) in zip(ranks, every):
            assert found['loss'] == pytest.approx(reference.loss, rel=1e-9), name
            assert len(rows) + padding == count, 'every rank has equally many micro-batches'
            assert padding == max(count - len(units_of_replica(name, single, layout, replica)), 0)
            assert max(map(sum, rows)) <= budget
        worst = compare([grads for _, grads, _, _ in ranks], reference.grads)
        assert worst.error < 1e-9, (name, worst)
        for (found, _, _, _), (_, replica, last) in zip(ranks, every):
            results = found[next(key for key in found if key != 'loss')]
            wanted = of_replica(name, single, layout, replica) if last else []
            assert len(results) == len(wanted)
            for mine, theirs in zip(results, wanted):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    metrics = expected('grpo', layout)[0].metrics['GRPOMetric']
    found = every[0][0]['grpo'][3]
    assert {key: found[key] for key in metrics} == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    found = every[0][0]['separated sums'][3]
    metrics = dict(preference.reference(GPT.on(layout))['sigmoid'].metrics)
    del metrics['loss']
    assert {key: found[key] for key in metrics} == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    for out, replica, last in every:
        wanted = of_replica('plain', pooled.reference(GPT.on(layout))['plain'].logps, layout, replica) if last else []
        assert len(out['predicted']) == len(wanted)
        for mine, theirs in zip(out['predicted'], wanted):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


# ---- what goes with the samples


def _beside(layout):
    """A custom loss with one number a sample, and one with a reference and a teacher."""
    initialize(layout)
    model = MegatronModel(wrap(build(GPT, layout)), vocab_size=62)
    replica = dist.get_rank(model.groups.dp)
    inputs, weights = share(text(), layout, replica), share([0.5 + i for i in range(8)], layout, replica)
    told = []

    def weighted(inputs, outputs, weights, names):
        told.append((len(weights), len(names), len(inputs['sequence_tokens'])))
        per_token = torch.as_tensor(weights).to(outputs['logps'])[inputs['sequence_ids']]
        trained = inputs['labels'] != -100
        return {'loss': -(per_token * outputs['logps'])[trained].sum(), 'num_tokens': trained.sum().clamp(min=1)}

    model.set_loss(weighted)
    names = [f'sample {i}' for i in range(len(inputs))]
    packed = model.forward_backward(inputs, weights=weights, names=names, max_tokens_per_micro_batch=24)['loss']
    assert told
    assert all(len(set(counts)) == 1 for counts in told)
    return packed, model.forward_backward(inputs, 3, weights=weights, names=names)['loss']


@pytest.mark.parametrize('layout', [Layout(dp=2), Layout(cp=2)], ids=str)
def test_a_custom_loss_gets_one_entry_for_each_sample_of_a_row(layout):
    every = run_ranks(_beside, layout.world, layout)
    for packed, padded in every:
        assert packed == pytest.approx(padded, rel=1e-12)


def _distilled(layout, folder):
    initialize(layout)
    model = MegatronModel(wrap(build(GPT, layout)), vocab_size=62)
    replica = dist.get_rank(model.groups.dp)
    inputs, found = share(rollout_samples(), layout, replica), []
    model.set_loss('GKDLoss', beta=0.5, temperature=1.3)
    teacher = model.teacher(build(Spec(vocab_size=62, pad_vocab_to=4, hidden=16), layout))
    for how in ({'max_tokens_per_micro_batch': 24}, {'micro_batch_size': 3}):
        model.zero_grad()
        loss = model.forward_backward(inputs, teacher=teacher.heads(inputs, **how), **how)['loss']
        found.append((loss, collect_grads(model.chunks)))
    logps = []
    model.set_loss('CrossEntropyLoss')
    for cache in (None, folder, folder):
        logps.append(model.reference(cache=cache).logps(inputs, max_tokens_per_micro_batch=24))
    own = model.forward_only(inputs, max_tokens_per_micro_batch=24)['logps']
    files = len(list(folder.iterdir()))
    return found, logps, own, files


@pytest.mark.parametrize('layout', [Layout(pp=2), Layout(dp=2)], ids=str)
def test_a_teacher_and_a_reference_pack_alike(layout, tmp_path):
    every = run_ranks(_distilled, layout.world, layout, tmp_path)
    for (packed, padded), logps, own, files in every:
        assert packed[0] == pytest.approx(padded[0], rel=1e-9)
        assert files > 1
        for found in logps:
            assert len(found) == len(own)
            for mine, theirs in zip(found, own):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        assert compare([packed[1]], padded[1]).error < 1e-9


# ---- errors


def _refused(layout, what):
    initialize(layout)
    model = MegatronModel(wrap(build(GPT, layout)), vocab_size=62)
    model.set_loss('GRPOLoss')
    rank = dist.get_rank()
    inputs, how = rollout_samples()[:4], {'max_tokens_per_micro_batch': 24}
    extra = {'advantages': [1.0] * 4}
    if what == 'rows' and rank == 1:
        inputs = [{key: value[None] for key, value in one.items()} for one in inputs]
    elif what == 'short' and rank == 0:
        how = {'max_tokens_per_micro_batch': 15}
    elif what == 'both':
        how['micro_batch_size'] = 2
    elif what == 'kind':
        how = {'max_tokens_per_micro_batch': 24.5}
    elif what == 'length' and rank == 1:
        extra = {'advantages': [[1.0, 2.0], 1.0, 1.0, 1.0]}
    elif what == 'nan' and rank == 0:
        extra = {'advantages': [1.0, 1.0, 1.0, torch.nan]}
    elif what == 'id' and rank == 0:
        inputs[2]['input_ids'] = inputs[2]['input_ids'] + 62
    try:
        model.forward_backward(inputs, **extra, **how)
    finally:
        model.set_loss('CrossEntropyLoss')
        assert model.forward_backward(rollout_samples(), max_tokens_per_micro_batch=24)['loss'] > 0


@pytest.mark.parametrize(
    ('what', 'message'),
    [
        ('rows', 'max_tokens_per_micro_batch packs samples, but inputs[0] must be one then, with input_ids [s], got'),
        ('short', 'max_tokens_per_micro_batch must be at least the longest sample, 16 tokens (sample 0), got 15'),
        ('both', 'micro_batch_size (2) and max_tokens_per_micro_batch (24) both say what a micro-batch holds'),
        ('kind', 'max_tokens_per_micro_batch must be an int >= 1, got 24.5'),
        ('length', 'advantages of sample 0 must have 1 entry, '),
        ('nan', 'advantages of sample 3 must be numbers'),
        ('id', "['input_ids'] must hold ids in [0, 62)"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all_and_the_next_call_works(what, message):
    for outcome in run_ranks(_refused, 2, Layout(dp=2), what, collect_errors=True):
        assert outcome.error == 'ValueError', outcome
        assert message in outcome.message


# ---- in three parts


def _in_parts(layout):
    initialize(layout)
    model = MegatronModel(wrap(build(GPT, layout)), vocab_size=62)
    model.set_loss('GRPOLoss', **policy.INIT['GRPOLoss'])
    replica = dist.get_rank(model.groups.dp)
    inputs = share(rollout_samples(), layout, replica)
    given = {name: share(value, layout, replica) for name, value in vars(policy.rollouts(GPT)).items()}
    seen = model.forward(inputs, max_tokens_per_micro_batch=24)['logps']
    loss = model.calculate_loss(**given)
    model.backward()
    return seen, loss, collect_grads(model.chunks), replica, model.groups.is_last_stage


@pytest.mark.parametrize('layout', [Layout(pp=2), Layout(dp=2)], ids=str)
def test_the_three_parts_pack_alike(layout):
    every = run_ranks(_in_parts, layout.world, layout)
    reference, single = expected('grpo', layout)
    assert compare([grads for _, _, grads, *_ in every], reference.grads).error < 1e-9
    for seen, loss, _, replica, last in every:
        assert loss == pytest.approx(reference.loss, rel=1e-9)
        wanted = share(single, layout, replica) if last else []
        assert len(seen) == len(wanted)
        for mine, theirs in zip(seen, wanted):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
