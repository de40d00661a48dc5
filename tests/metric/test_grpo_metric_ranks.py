"""The metrics of policies over tensor, context, pipeline and data parallel ranks: the numbers of one process."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from ranks import device, run_ranks
from tiny_gpt import Layout, Spec, build, initialize, wrap
from torch.distributed.device_mesh import init_device_mesh

from tests.metric.layouts import Collectives, groups_of, world_of
from tests.policy_formulas import METRICS, Response, metric_of, records_of
from twinkle_megatron import MegatronModel
from twinkle_megatron import metric as metrics
from twinkle_megatron.batch import PER_TOKEN, WholeRows, align_extras, packing_of, split_context, spread_out
from twinkle_megatron.groups import group_rank, group_size
from twinkle_megatron.metric import GRPOMetric, GSPOMetric
from twinkle_megatron.vocab_parallel import LinearHead, VocabShard

F64 = torch.float64
TOP = '_high_kl_records'
VOCAB, WIDTH = 12, 5
LAYOUTS = ['dp2', 'dp4', 'tp2', 'cp2', 'cp4', 'pp2', 'tp2 dp2', 'cp2 dp2', 'dp2 pp2', 'cp2 pp2', 'tp2 cp2', 'tp2 pp2']
TEMPERATURE = 0.7
INIT = {
    'GRPOMetric': {'epsilon': 0.2, 'epsilon_high': 0.3},
    'GSPOMetric': {'epsilon': 0.05},
    'CISPOMetric': {'epsilon': 0.3, 'epsilon_high': 0.2},
}
LENGTHS = [(8, 3, 6), (7,), (5, 8), (8, 8, 2, 4), (6,)]
"""Of the sequences of five micro-batches."""


def weight():
    return torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1), dtype=F64)


def micro_batch(number, packed):
    """Inputs, hidden states and ragged extras. The second sequence of the fourth has no trained token."""
    generator = torch.Generator().manual_seed(30 + number)
    rows, lengths = len(LENGTHS[number]), LENGTHS[number]
    labels = torch.randint(0, VOCAB, (rows, 8), generator=generator)
    labels[torch.rand(rows, 8, generator=generator) > 0.7] = -100
    for row, length in zip(labels, lengths):
        row[length:] = -100
    if number == 3:
        labels[1] = -100
    hidden = torch.randn(rows, 8, WIDTH, generator=generator, dtype=F64)
    kept = (labels != -100).sum(1).tolist()
    # about the log-probs of the policy, so that ratios lie on both sides of the clip range
    logp = ((hidden @ weight().T) / TEMPERATURE).log_softmax(-1)
    new = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels != -100].split(kept)
    old = [x + 0.3 * torch.randn(len(x), generator=generator, dtype=F64) for x in new]
    extra = {'old_logps': old, 'advantages': torch.randn(rows, generator=generator, dtype=F64).tolist()}
    inputs = {'labels': labels}
    if packed:
        real = torch.arange(8)[None] < torch.tensor(lengths)[:, None]
        inputs = {'labels': labels[real][None], 'cu_seqlens': torch.tensor([0, *lengths]).cumsum(0)}
        hidden = hidden[real][None]
    return inputs, hidden, extra


def responses(numbers):
    """The sequences of these micro-batches, from unpacked rows."""
    found = []
    for number in numbers:
        inputs, hidden, extra = micro_batch(number, packed=False)
        logits = hidden @ weight().T
        logp = (logits / TEMPERATURE).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        for i, row in enumerate(inputs['labels']):
            at = row != -100
            new, plain = (x[i, at].gather(-1, row[at][:, None])[:, 0] for x in (logp, logits.log_softmax(-1)))
            where, tokens = at.nonzero()[:, 0].tolist(), row[at].tolist()
            advantage = torch.tensor(extra['advantages'][i], dtype=F64)
            old = extra['old_logps'][i]
            found.append(Response(new, old, old, advantage, entropy[i, at], plain, where, tokens))
    return found


def dealt(groups):
    """The micro-batches of this rank's replica; the last of several replicas has none."""
    dp, size = group_rank(groups.dp), group_size(groups.dp)
    return (
        list(range(len(LENGTHS))) if size == 1 else list(range(len(LENGTHS)))[dp :: size - 1] if dp < size - 1 else []
    )


def order_of(layout):
    """The micro-batches of the global batch, replica after replica."""
    size = {'dp2': 2, 'dp4': 4}.get(next((x for x in layout.split() if x.startswith('dp')), ''), 1)
    numbers = list(range(len(LENGTHS)))
    return numbers if size == 1 else [n for rank in range(size - 1) for n in numbers[rank :: size - 1]]


def share(groups, number, packed, head):
    """This rank's slice, as the model hands it to metrics: over TP of the vocabulary, over CP of the sequences."""
    inputs, hidden, extra = micro_batch(number, packed)
    whole = WholeRows.of(inputs, -100)
    (given,) = align_extras(extra, dict.fromkeys(extra, PER_TOKEN), [whole])
    length = whole.labels.shape[1]
    positions = torch.cat([torch.arange(n) for n in LENGTHS[number]])[None] if packed else torch.arange(length)
    batch = {'input_ids': whole.labels, 'labels': whole.labels, 'sequence_ids': whole.ids,
             'position_ids': positions.expand(whole.labels.shape),
             'at': torch.arange(whole.labels.numel()).view(whole.labels.shape), **given}  # fmt: skip
    packing = packing_of({**inputs, 'input_ids': whole.labels})
    size = group_size(groups.cp)
    if packing is not None:
        batch, packing, _ = spread_out(batch, packing, 2 * size, -100)
    bounds = None if packing is None else packing.boundaries
    local = {key: x.to(device()) for key, x in split_context(batch, size, group_rank(groups.cp), bounds).items()}
    shard = VocabShard.from_group(VOCAB // group_size(groups.tp), groups.tp)
    mine = weight()[shard.start : shard.stop].to(device())
    rows = hidden.reshape(-1, WIDTH)[local.pop('at').cpu()].to(device())
    extra = {key: local.pop(key) for key in extra}
    logits = LinearHead(rows, mine) if head == 'linear' else rows @ mine.T
    features = {**local, 'sequence_tokens': whole.tokens.to(device())}
    return features, {'logits': logits, 'vocab_shard': shard}, extra


def accumulated(layout, packed, head, names=METRICS, top_k=6):
    groups = groups_of(layout)
    found = {}
    mine = [share(groups, number, packed, head) for number in dealt(groups)] if groups.is_last_stage else []
    for name in names:
        metric = getattr(metrics, name)(groups, groups.dp_cp, **INIT[name], temperature=TEMPERATURE, top_k_kl=top_k)
        for inputs, outputs, extra in mine:
            metric.accumulate(inputs, outputs, **extra)
        values = metric.values()
        found[name] = (values, metric.calculate(), metric.calculate())
    return found


@pytest.mark.parametrize('layout', LAYOUTS)
def test_case_33_metrics_are_those_of_one_process_on_every_rank(layout):
    """Padded from built logits, packed from a linear head. Context parallel replicas count once, the data parallel
    rank without data agrees, and the sequences of the global batch are numbered replica after replica."""
    for packed, head in ((False, 'logits'), (True, 'linear')):
        results = run_ranks(functools.partial(accumulated, layout, packed, head), world_of(layout))
        order = order_of(layout)
        for result in results:
            assert result == results[0], 'bitwise the same on all ranks'
        for name, (values, shown, again) in results[0].items():
            assert again == {}
            top = shown.pop(TOP)
            assert shown == values
            want = metric_of(name, INIT[name], responses(order))
            assert values == pytest.approx(want, rel=1e-11, abs=1e-14), name
            assert 0 < want['train/clip_ratio_low'] < 1
            assert 0 < want['train/clip_ratio_high'] < 1
            for mine, right in zip(top, records_of(6, responses(order)), strict=True):
                assert mine == pytest.approx(right, rel=1e-10)


def test_all_tokens_are_recorded_once():
    """More than there are: every trained token of the global batch, of each context parallel rank its own."""
    kept = responses(order_of('cp2 dp2'))
    results = run_ranks(functools.partial(accumulated, 'cp2 dp2', True, 'logits', ('GRPOMetric',), 500), 4)
    for result in results:
        top = result['GRPOMetric'][1][TOP]
        assert [r['kl'] for r in top] == sorted((r['kl'] for r in top), reverse=True)
        assert sorted((r['gsi'], r['pos'], r['token_id']) for r in top) == [
            (gsi, pos, token) for gsi, r in enumerate(kept) for pos, token in zip(r.positions, r.token_ids)
        ]


def gspo_by_hand():
    """One sequence over two context parallel ranks: ratios 0.5 here, 1.25 there."""
    groups = groups_of('cp2')
    rank = dist.get_rank()
    metric = GSPOMetric(groups, groups.dp_cp, epsilon=0.2)
    inputs = {'labels': torch.tensor([[3]]), 'sequence_ids': torch.tensor([[0]]), 'sequence_tokens': torch.tensor([2])}
    ratio = (0.5, 1.25)[rank]
    metric.accumulate(
        inputs, {'logps': torch.tensor([[-1.0]], dtype=F64)},
        old_logps=torch.tensor([[-1.0 - math.log(ratio)]], dtype=F64), advantages=torch.tensor([[-2.0]]),
    )  # fmt: skip
    return metric.calculate()


def test_the_sequence_clip_rate_looks_at_whole_sequences():
    """√0.625 = 0.79 < 0.8 with A < 0: one of one is clipped, although a half of it alone would be 1.25."""
    for found in run_ranks(gspo_by_hand, 2):
        assert found['train/clip_ratio_low'] == 1.0
        assert found['train/clip_ratio_high'] == 0.0
        assert found['train/approx_kl'] == pytest.approx((0.5 - 1 + math.log(2) + 0.25 - math.log(1.25)) / 2)


def padded_sampler():
    """Two data parallel ranks of four samples; the sampler repeats the first one, marked as not counting."""
    rank = dist.get_rank()
    metric = GRPOMetric(None, dist.group.WORLD, top_k_kl=9)
    values = ((1.0, 3.0, 5.0, 7.0), (2.0, 4.0, 6.0, 1.0))[rank]
    labels = torch.full((4, 1), 3)
    if rank == 1:
        labels[3] = -100
    metric.accumulate({'labels': labels}, {'logps': -torch.tensor(values, dtype=F64)[:, None]},
                      old_logps=-2 * torch.tensor(values)[:, None])  # fmt: skip
    return metric.calculate()


def test_case_59_rank_means_are_not_averaged_and_repeats_do_not_count():
    for found in run_ranks(padded_sampler, 2):
        assert found['train/mean_new_logp'] == -4.0
        assert found['train/mean_old_logp'] == -8.0
        assert [(r['gsi'], r['logp_new']) for r in found[TOP]] == [(g, -v) for g, v in
                [(3, 7.0), (6, 6.0), (2, 5.0), (5, 4.0), (1, 3.0), (4, 2.0), (0, 1.0)]]  # fmt: skip


def collectives(top_k):
    groups = groups_of('dp2 pp2')
    metric = GRPOMetric(groups, groups.dp_cp, top_k_kl=top_k)
    with Collectives() as accumulate:
        if groups.is_last_stage:
            metric.accumulate({'labels': torch.tensor([[3]])}, {'logps': torch.tensor([[-1.0]])}, old_logps=[[-2.0]])
    with Collectives() as calculate:
        metric.calculate()
    return accumulate, calculate


def test_collectives():
    """None to accumulate; to calculate one gather and one broadcast along the pipeline, and the same for records."""
    for rank, (accumulate, calculate) in enumerate(run_ranks(collectives, 4, 0)):
        assert accumulate == []
        assert calculate == (['broadcast'] if rank < 2 else ['all_gather', 'broadcast'])
    for rank, (_, calculate) in enumerate(run_ranks(collectives, 4, 3)):
        records = ['broadcast_object_list'] if rank < 2 else ['all_gather_object', 'broadcast_object_list']
        assert [name for name in calculate if 'object' in name] == records


def with_device_mesh():
    """The groups of a torch `DeviceMesh`."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=('cp', 'tp'))
    groups = groups_of('cp2 tp2')
    found = []
    for given in (groups, mesh):
        metric = GSPOMetric(given, mesh.get_group('cp'), **INIT['GSPOMetric'], temperature=TEMPERATURE, top_k_kl=4)
        for number in range(2):
            inputs, outputs, extra = share(groups, number, False, 'logits')
            metric.accumulate(inputs, outputs, **extra)
        found.append(metric.calculate())
    return found


def test_a_torch_device_mesh_tells_the_groups():
    for by_groups, by_mesh in run_ranks(with_device_mesh, 4):
        top = by_mesh.pop(TOP)
        by_groups.pop(TOP)
        assert by_mesh == by_groups
        assert by_mesh == pytest.approx(metric_of('GSPOMetric', INIT['GSPOMetric'], responses([0, 1])), rel=1e-11)
        assert [r['gsi'] for r in top] == [r['gsi'] for r in records_of(4, responses([0, 1]))]


# ---- inside MegatronModel

GPT = Spec(vocab_size=62, pad_vocab_to=4)
SAMPLES, LENGTH = 512, 4


def samples():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 62, (SAMPLES, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, 1:] = -100
    return ids[:, :-1], labels, -4 - torch.rand(SAMPLES, generator=generator, dtype=F64)


def model_on(layout, loss='GRPOLoss', **init):
    initialize(layout)
    model = MegatronModel(wrap(build(GPT, layout)), vocab_size=GPT.vocab_size, head='logits')
    model.set_loss(loss, **init)
    return model


def one_value_a_sample(layout):
    """512 samples of one trained token each, in micro-batches of 128; what is recorded of each."""
    model = model_on(layout)
    metric = GRPOMetric(model.groups, model.groups.dp_cp, top_k_kl=2 * SAMPLES)
    model.add_metric(metric, is_training=False)
    ids, labels, old = samples()
    mine = slice(0, SAMPLES)
    if layout.dp > 1:
        half = SAMPLES // 2
        mine = slice(group_rank(model.groups.dp) * half, (group_rank(model.groups.dp) + 1) * half)
    cuts = [{'input_ids': i, 'labels': x} for i, x in zip(ids[mine].split(128), labels[mine].split(128))]
    model.forward_only(cuts, old_logps=old[mine].tolist(), advantages=torch.ones(len(old[mine])))
    found = metric.calculate()
    return sorted((r['gsi'], r['logp_old'], r['token_id'], r['logp_new']) for r in found[TOP]), found


@functools.cache
def one_process():
    return run_ranks(one_value_a_sample, 1, Layout())[0]


@pytest.mark.parametrize(
    'layout', [Layout(tp=2, cp=2), Layout(tp=2, pp=2), Layout(pp=2, cp=2), Layout(cp=2, dp=2)], ids=str
)
def test_case_53_512_samples_are_512_values_in_their_order(layout):
    """Whatever the layout: neither gathered twice nor in the order of the ranks."""
    _, labels, old = samples()
    want, figures = one_process()
    assert [(g, o, t) for g, o, t, _ in want] == list(zip(range(SAMPLES), old.tolist(), labels[:, 0].tolist()))
    for found, shown in run_ranks(one_value_a_sample, layout.world, layout):
        assert [row[:3] for row in found] == [row[:3] for row in want]
        assert [row[3] for row in found] == pytest.approx([row[3] for row in want], rel=1e-10)
        assert {k: v for k, v in shown.items() if k != TOP} == pytest.approx(
            {k: v for k, v in figures.items() if k != TOP}, rel=1e-10
        )


def fed_back(layout, temperature):
    """Log-probs from `forward_only` at the temperature of the sampler, given back as `old_logps` of the first step."""
    model = model_on(layout, temperature=temperature)
    model.add_metric(GRPOMetric)
    ids, labels, _ = samples()
    labels = torch.where(torch.arange(LENGTH) % 3 == 1, ids, labels)  # two trained tokens a sample
    inputs = [{'input_ids': ids[:3], 'labels': labels[:3]}, {'input_ids': ids[3:8], 'labels': labels[3:8]}]
    old = model.forward_only(inputs)['logps']
    model.set_loss('GRPOLoss', temperature=1.0)
    plain = model.forward_only(inputs)['logps']
    kept = [x['labels'] != -100 for x in inputs]
    model.set_loss('GRPOLoss', temperature=temperature)
    # the last stage has them; the other stages are told
    box = [[x[k].tolist() for x, k in zip(part, kept)] if part else None for part in (old, plain)]
    dist.broadcast_object_list(box, src=dist.get_world_size() - 1)
    rows = [x.new_zeros(x.shape, dtype=F64).masked_scatter_(k, torch.tensor(v, dtype=F64)) for x, k, v in
            zip((i['labels'] for i in inputs), kept, box[0])]  # fmt: skip
    out = model.forward_backward(inputs, old_logps=rows, advantages=torch.arange(8.0))
    return out['loss'], model.calculate_metric(), [value for part in box[1] for value in part]


@pytest.mark.parametrize('layout', [Layout(), Layout(cp=2), Layout(tp=2, pp=2)], ids=str)
def test_case_18_the_first_step_has_ratio_1_and_confidence_is_that_at_temperature_1(layout):
    """At the temperature 0.8 of the loss the policies are the same; the mean log-prob is that of temperature 1."""
    for loss, shown, plain in run_ranks(fed_back, layout.world, layout, 0.8):
        assert loss == pytest.approx(-3.5, rel=1e-12), 'minus the mean advantage'
        assert shown['train/token_ratio_max'] == pytest.approx(1.0, rel=1e-12)
        assert shown['train/approx_kl'] == pytest.approx(0.0, abs=1e-20)
        assert shown['train/clip_ratio'] == 0.0
        mean = sum(plain) / len(plain)
        assert shown['train/mean_new_logp'] == pytest.approx(mean, rel=1e-11)
        assert shown['train/policy_confidence'] == pytest.approx(math.exp(mean), rel=1e-11)
        assert shown['train/mean_old_logp'] != pytest.approx(mean, rel=1e-3)


def marked(ignored):
    """The metrics where loss and metric know ignored tokens by another label."""
    model = model_on(Layout(), ignore_index=ignored)
    model.add_metric(GRPOMetric, ignore_index=ignored)
    ids, labels, old = samples()
    given = {'input_ids': ids[:8], 'labels': labels[:8].masked_fill(labels[:8] == -100, ignored)}
    model.forward_backward(given, old_logps=old[:8].tolist(), advantages=[1.0, -1.0] * 4)
    return model.calculate_metric()


def test_another_ignored_label_changes_nothing():
    """`MegatronModel` marks ignored tokens by -100 for its metrics, whatever the loss's own label."""
    assert run_ranks(marked, 1, -1) == run_ranks(marked, 1, -100)
