"""The GRPO family at the loss level on real ranks: vocabulary shards, linear heads, context parallel slices of padded
and packed rows, beside one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import device, run_ranks

from tests.metric.layouts import groups_of
from tests.policy_formulas import LOSSES, Response, loss_of
from twinkle_megatron import loss as losses
from twinkle_megatron.batch import (
    PER_TOKEN,
    Counts,
    TokenBatch,
    WholeRows,
    align_extras,
    join_context,
    packing_of,
    split_context,
    spread_out,
)
from twinkle_megatron.groups import all_gather_rows, group_rank, group_size, sum_over
from twinkle_megatron.vocab_parallel import LinearHead, VocabShard, token_stats

F64 = torch.float64
VOCAB, PADDED, WIDTH = 14, 16, 6
TEMPERATURE = 0.7
INITS = {
    'GRPOLoss': {'clip_range': 0.3, 'clip_range_high': 0.6},
    'GSPOLoss': {'clip_range': 0.2, 'clip_range_high': 0.4},
    'SAPOLoss': {'tau_pos': 1.7, 'tau_neg': 0.6},
    'CISPOLoss': {'clip_range_high': 0.5},
    'BNPOLoss': {'clip_range': 0.3},
    'DRGRPOLoss': {'clip_range': 0.3, 'max_completion_length': 17},
}
LENGTHS = (8, 3, 6, 5, 8)


def init_of(name):
    return {**INITS[name], 'beta': 0.2, 'entropy_coef': 0.3, 'temperature': TEMPERATURE}


def data(packed):
    """Labels, what tells the packing, hidden states, weight, and ragged extras. The fourth sequence has no trained
    token; hidden states of ignored tokens hold garbage."""
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(0, VOCAB, (8,), generator=generator) for _ in LENGTHS]
    for i, (row, length) in enumerate(zip(rows, LENGTHS)):
        row[torch.rand(8, generator=generator) > 0.7] = -100
        row[length if i != 3 else 0 :] = -100
    labels = torch.stack(rows)
    hidden = torch.randn(5, 8, WIDTH, generator=generator, dtype=F64)
    weight = 0.5 * torch.randn(PADDED, WIDTH, generator=generator, dtype=F64)
    weight[VOCAB:] = 5.0  # padding of the vocabulary
    kept = (labels != -100).sum(1).tolist()
    extra = {
        name: [-2.5 + 0.6 * torch.randn(n, generator=generator, dtype=F64) for n in kept]
        for name in ('old_logps', 'ref_logps')
    }
    extra['advantages'] = torch.randn(5, generator=generator, dtype=F64).tolist()
    inputs = {'labels': labels}
    if packed:
        real = torch.arange(8)[None] < torch.tensor(LENGTHS)[:, None]
        inputs = {'labels': labels[real][None], 'cu_seqlens': torch.tensor([0, *LENGTHS]).cumsum(0)}
        hidden = hidden[real][None]
    hidden = torch.where((inputs['labels'] != -100)[..., None], hidden, torch.nan)
    return inputs, hidden, weight, extra


def one_process(name, packed):
    """Loss, gradients of hidden states, weight and logits, plainly."""
    inputs, hidden, weight, extra = data(packed)
    at = inputs['labels'] != -100
    rows = hidden[at].clone().requires_grad_()
    whole = weight[:VOCAB].clone().requires_grad_()
    logits = rows @ whole.T
    logits.retain_grad()
    logp = (logits / TEMPERATURE).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    new = logp.gather(-1, inputs['labels'][at][:, None])[:, 0]
    kept = [len(x) for x in extra['old_logps']]
    responses = [
        Response(n, old, ref, torch.tensor(a, dtype=F64), h)
        for n, h, old, ref, a in zip(new.split(kept), entropy.split(kept), *extra.values())
    ]
    loss = loss_of(name, init_of(name), responses)
    loss.backward()

    def placed(grad):
        return torch.zeros(*at.shape, grad.shape[-1], dtype=F64).masked_scatter_(at[..., None], grad)

    padding = torch.zeros(PADDED - VOCAB, WIDTH, dtype=F64)
    return loss.item(), placed(rows.grad), torch.cat([whole.grad, padding]), placed(logits.grad)


def on_shards(name, packed, head):
    inputs, hidden, weight, extra = data(packed)
    group = dist.group.WORLD
    shard = VocabShard.from_group(PADDED // dist.get_world_size(), group, VOCAB)
    mine = weight[shard.start : shard.stop].to(device()).requires_grad_()
    x = hidden.to(device(), copy=True).requires_grad_()
    logits = (hidden.to(device()) @ mine.detach().T).requires_grad_()
    given = LinearHead(x, mine) if head == 'linear' else logits
    inputs = {key: value.to(device()) for key, value in inputs.items()}
    found = getattr(losses, name)(**init_of(name))(inputs, {'logits': given, 'vocab_shard': shard}, **extra)['loss']
    found.backward()
    return found.item(), shard.start, x.grad, mine.grad, logits.grad


@pytest.mark.parametrize('packed', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize('head', ['logits', 'linear'])
def test_values_and_gradients_from_vocabulary_shards(head, packed):
    """KL, entropy bonus and temperature included; the columns past the true vocabulary get no gradient."""
    every = run_ranks(lambda: [on_shards(name, packed, head) for name in LOSSES], 2)
    for name, ranks in zip(LOSSES, zip(*every)):
        loss, hidden, weight, logits = one_process(name, packed)
        for value, start, by_hidden, by_weight, by_logits in ranks:
            assert value == pytest.approx(loss, rel=1e-12), name
            assert value == ranks[0][0]
            own = slice(start, start + PADDED // 2)
            if head == 'linear':
                torch.testing.assert_close(by_hidden, hidden, rtol=1e-11, atol=1e-14)
                torch.testing.assert_close(by_weight, weight[own], rtol=1e-11, atol=1e-14)
            else:
                whole = torch.cat([logits, torch.zeros(*logits.shape[:-1], PADDED - VOCAB, dtype=F64)], -1)
                torch.testing.assert_close(by_logits, whole[..., own], rtol=1e-11, atol=1e-14)


def on_slices(packed, layout):
    """Every loss on this rank's slice of the sequences, and of the vocabulary."""
    groups = groups_of(layout)
    size, rank = group_size(groups.cp), group_rank(groups.cp)
    inputs, hidden, weight, extra = data(packed)
    whole = WholeRows.of(inputs, -100)
    kinds = dict.fromkeys(extra, PER_TOKEN)
    (given,) = align_extras(extra, kinds, [whole])
    counts = Counts(int(whole.tokens.sum()), int((whole.tokens > 0).sum()))
    batch = {'input_ids': whole.labels, 'labels': whole.labels, 'sequence_ids': whole.ids,
             'at': torch.arange(whole.labels.numel()).view(whole.labels.shape), **given}  # fmt: skip
    packing, columns = packing_of({**inputs, 'input_ids': whole.labels}), None
    if packing is not None:
        batch, packing, columns = spread_out(batch, packing, 2 * size, -100)
    bounds = None if packing is None else packing.boundaries
    local = {key: x.to(device()) for key, x in split_context(batch, size, rank, bounds).items()}
    local['sequence_tokens'] = whole.tokens.to(device())
    shard = VocabShard.from_group(PADDED // group_size(groups.tp), groups.tp, VOCAB)
    mine = weight[shard.start : shard.stop].to(device())
    mine_hidden = hidden.reshape(-1, WIDTH)[local['at'].cpu()].to(device())
    out = []
    for name in LOSSES:
        loss = getattr(losses, name)(**init_of(name))
        x, w = mine_hidden.clone().requires_grad_(), mine.clone().requires_grad_()
        tokens = TokenBatch.of(local, counts=counts, cp=groups.cp)
        stats = token_stats(LinearHead(x, w), tokens.labels, shard=shard, temperature=TEMPERATURE, entropy=True)
        share = loss.contribution(tokens, stats, **{key: local[key] for key in extra})
        share.backward()
        parts = all_gather_rows(x.grad, groups.cp)
        grad = torch.stack([join_context(part, bounds) for part in parts.unbind(-1)], -1)
        grad = grad if columns is None else grad[:, columns]
        total = sum_over(share.detach().clone(), groups.cp)
        out.append((total.item(), grad, sum_over(w.grad, groups.cp), shard.start))
    return out


@pytest.mark.parametrize('packed', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize('layout', ['cp2', 'cp4', 'cp2 tp2'])
def test_case_52_context_parallel_slices_add_up_to_one_process(layout, packed):
    """Five sequences, packed ones split each by itself: no value crosses from one to another."""
    world = {'cp2': 2, 'cp4': 4, 'cp2 tp2': 4}[layout]
    every = run_ranks(functools.partial(on_slices, packed, layout), world)
    for i, name in enumerate(LOSSES):
        loss, hidden, weight, _ = one_process(name, packed)
        for found in every:
            value, by_hidden, by_weight, start = found[i]
            assert value == pytest.approx(loss, rel=1e-12), name
            torch.testing.assert_close(by_hidden, hidden, rtol=1e-11, atol=1e-14)
            torch.testing.assert_close(by_weight, weight[start : start + len(by_weight)], rtol=1e-11, atol=1e-14)
