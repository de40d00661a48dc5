"""Any way to cut a batch of responses into micro-batches and ranks, padded or packed, gives the same loss and gradient.

Ranks are played by one process: each knows the counts of the global batch, and their contributions are added up. Real
ranks do the same in tests/parallel/test_policy.py."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy_formulas import LOSSES, Response, loss_of
from twinkle_megatron import loss as losses
from twinkle_megatron.batch import (
    PER_TOKEN,
    Counts,
    TokenBatch,
    WholeRows,
    align_extras,
    packing_of,
    pad_micro_batch,
    split_context,
    spread_out,
)
from twinkle_megatron.metric import CISPOMetric, GRPOMetric, GSPOMetric
from twinkle_megatron.vocab_parallel import TokenStats

F64 = torch.float64
INIT: dict[str, dict[str, Any]] = {
    'GRPOLoss': {'clip_range': 0.3, 'clip_range_high': 0.6},
    'GSPOLoss': {'clip_range': 0.2, 'clip_range_high': 0.4},
    'SAPOLoss': {'tau_pos': 1.7, 'tau_neg': 0.6},
    'CISPOLoss': {'clip_range_high': 0.5},
    'BNPOLoss': {'clip_range': 0.3},
    'DRGRPOLoss': {'clip_range': 0.3, 'max_completion_length': 17},
}
KINDS = {'old_logps': PER_TOKEN, 'ref_logps': PER_TOKEN, 'advantages': PER_TOKEN}


class Rollout:
    """Responses whose tokens are trained as `masks` say, with leaves to differentiate."""

    def __init__(self, masks, seed):
        generator = torch.Generator().manual_seed(seed)
        self.masks = [torch.tensor(mask, dtype=torch.bool) for mask in masks]

        def draw(mean, scale=0.7):
            return [mean + scale * torch.randn(len(m), generator=generator, dtype=F64) for m in self.masks]

        self.new, self.entropy = ([x.requires_grad_() for x in draw(mean)] for mean in (-3, 1.5))
        self.old, self.ref = ([x[m] for x, m in zip(draw(-3), self.masks)] for _ in range(2))
        self.advantages = torch.randn(len(masks), generator=generator, dtype=F64).tolist()

    def responses(self, which):
        return [
            Response(self.new[i][m], self.old[i], self.ref[i], torch.tensor(a, dtype=F64), self.entropy[i][m])
            for i in which
            for m, a in [(self.masks[i], self.advantages[i])]
        ]

    def gradients(self, loss):
        return [
            torch.zeros_like(x) if grad is None else grad
            for x, grad in zip(
                self.new + self.entropy, torch.autograd.grad(loss, self.new + self.entropy, allow_unused=True)
            )
        ]

    def micro_batch(self, at, packed, behind):
        """Inputs, log-probs and entropies of these responses, with `behind` tokens of padding."""
        labels = [torch.where(self.masks[i], 7, -100) for i in at]
        values = [[x[i] for i in at] for x in (self.new, self.entropy)]
        if packed:
            told = {'cu_seqlens': torch.tensor([0, *map(len, labels)]).cumsum(0)}
            fill = torch.nn.functional.pad
            rows = [fill(torch.cat(x), (0, behind))[None] for x in values]
            return {'labels': fill(torch.cat(labels), (0, behind), value=-100)[None], **told}, *rows
        width = max(map(len, labels)) + behind
        rows = [torch.stack([torch.nn.functional.pad(x, (0, width - len(x))) for x in part]) for part in values]
        mask = torch.stack([(torch.arange(width) < len(row)).long() for row in labels])
        padded = torch.stack([torch.nn.functional.pad(x, (0, width - len(x)), value=-100) for x in labels])
        return {'labels': padded, 'attention_mask': mask}, *rows

    def extras(self, at):
        return {
            'old_logps': [self.old[i] for i in at],
            'ref_logps': [self.ref[i] for i in at],
            'advantages': [self.advantages[i] for i in at],
        }


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6)


@st.composite
def partitions(draw):
    """Responses, and for each micro-batch of the global batch its responses, its form and its padding."""
    rollout = Rollout(draw(masks), draw(st.integers(0, 99)))
    order = draw(st.permutations(range(len(rollout.masks))))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, len(order)), max_size=4))), len(order)]
    parts = [order[first:last] for first, last in pairwise(cuts) if last > first]
    return rollout, [(at, draw(st.booleans()), draw(st.integers(0, 3))) for at in parts]


def slices(batch, packing, cp):
    """The micro-batch as `cp` ranks hold it."""
    if cp == 1:
        return [batch]
    bounds = None
    if packing is not None:
        batch, packing, _ = spread_out(batch, packing, 2 * cp, -100)
        bounds = packing.boundaries
    rows, length = batch['labels'].shape
    grown = pad_micro_batch(batch, rows, -(-length // (2 * cp)) * 2 * cp, -100)
    return [split_context(grown, cp, rank, bounds) for rank in range(cp)]


@pytest.mark.parametrize('name', LOSSES)
@settings(max_examples=50, deadline=None)
@given(cut=partitions(), cp=st.sampled_from([1, 2, 3]))
def test_any_partition_gives_the_same_loss_and_gradient(name, cut, cp):
    """Context parallel ranks too, but for GSPO, whose ranks have to talk to each other."""
    rollout, parts = cut
    init = {**INIT[name], 'beta': 0.2, 'entropy_coef': 0.1}
    want = loss_of(name, init, rollout.responses(range(len(rollout.masks))))
    trained = [int(mask.sum()) for mask in rollout.masks]
    counts = Counts(sum(trained), sum(n > 0 for n in trained))
    loss, shares = getattr(losses, name)(**init), []
    for at, packed, behind in parts:
        inputs, new, entropy = rollout.micro_batch(at, packed, behind)
        rows = WholeRows.of(inputs, -100)
        (given_,) = align_extras(rollout.extras(at), KINDS, [rows])
        batch = {'input_ids': rows.labels, 'labels': rows.labels, 'sequence_ids': rows.ids, 'new': new, 'h': entropy,
                 **given_}  # fmt: skip
        for local in slices(batch, packing_of({**inputs, 'input_ids': rows.labels}), 1 if name == 'GSPOLoss' else cp):
            tokens = TokenBatch.of({**local, 'sequence_tokens': rows.tokens}, counts=counts)
            stats = TokenStats(log_prob=local['new'], entropy=local['h'])
            shares.append(loss.contribution(tokens, stats, **{key: local[key] for key in KINDS}))
    found = sum(shares)
    assert found.item() == pytest.approx(want.item(), rel=1e-11, abs=1e-13)
    if want.requires_grad:
        for mine, right in zip(rollout.gradients(found), rollout.gradients(want)):
            torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize('cls', [GRPOMetric, GSPOMetric, CISPOMetric])
@settings(max_examples=40, deadline=None)
@given(cut=partitions(), ranks=st.integers(1, 3), as_list=st.booleans())
def test_any_partition_gives_the_same_metrics(cls, cut, ranks, as_list):
    """Micro-batches dealt out to ranks that take them one after the other, or as a list."""
    rollout, parts = cut
    held = [cls(epsilon=0.3, epsilon_high=0.5) for _ in range(ranks)]
    for rank, metric in enumerate(held):
        calls = [
            (*rollout.micro_batch(at, packed, behind), rollout.extras(at)) for at, packed, behind in parts[rank::ranks]
        ]
        mine = [
            (inputs, {'logps': new.detach(), 'entropies': entropy.detach()}, extra)
            for inputs, new, entropy, extra in calls
        ]
        if as_list and mine:
            extra = {key: [x for *_, e in mine for x in e[key]] for key in ('old_logps', 'advantages')}
            mine = [([i for i, *_ in mine], [o for _, o, _ in mine], extra)]
        for inputs, outputs, extra in mine:
            metric.accumulate(inputs, outputs, old_logps=extra['old_logps'], advantages=extra['advantages'])
    one = cls(epsilon=0.3, epsilon_high=0.5)
    inputs, new, entropy = rollout.micro_batch(range(len(rollout.masks)), packed=False, behind=0)
    extra = rollout.extras(range(len(rollout.masks)))
    one.accumulate(inputs, {'logps': new.detach(), 'entropies': entropy.detach()}, old_logps=extra['old_logps'],
                   advantages=extra['advantages'])  # fmt: skip
    state = held[0].state
    totals = state.named(state.merged(torch.stack([metric.state.packed() for metric in held])))
    assert held[0].figures(totals) == pytest.approx(one.values(), rel=1e-11, abs=1e-13)
