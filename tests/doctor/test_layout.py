"""What divides what, and whose groups are whose."""

from __future__ import annotations

import pytest

from twinkle_megatron.doctor import Layout
from twinkle_megatron.doctor.report import FAIL, OK, WARN


@pytest.mark.parametrize(
    ('layout', 'world'),
    [(Layout(tp=2, pp=2, cp=2), 16), (Layout(tp=2, ep=2), 8), (Layout(cp=2, pp=3, ep=4), 24), (Layout(), 3)],
)
def test_groups_have_the_ranks_of_those_of_megatron(layout, world):
    from megatron.core.parallel_state import RankGenerator

    dp, experts = world // layout.product, world // (layout.tp * layout.ep * layout.pp)
    order = 'tp-cp-ep-dp-pp'
    dense = RankGenerator(layout.tp, 1, dp, layout.pp, layout.cp, order)
    sparse = RankGenerator(layout.tp, layout.ep, experts, layout.pp, 1, order)
    expected = {kind: dense.get_ranks(kind) for kind in ('tp', 'pp', 'cp', 'dp')}
    expected |= {'dp_cp': dense.get_ranks('dp-cp'), 'ep': sparse.get_ranks('ep')}
    assert {kind: sorted(ranks) for kind, ranks in layout.groups(world).items()} == {
        kind: sorted(ranks) for kind, ranks in expected.items()
    }


@pytest.mark.parametrize(
    ('layout', 'world', 'check', 'says', 'fix'),
    [
        (Layout(tp=2), 3, 'layout', '= 2 does not divide the 3 processes', 'start 2 processes or a multiple'),
        (Layout(tp=2), 1, 'layout', '= 2 does not divide the 1 process', 'torchrun --nproc-per-node 2'),
        (Layout(ep=3), 4, 'expert parallel', 'tp · ep · pp = 1 · 3 · 1 = 3 does not divide 4', '4: 1, 2, 4'),
        (Layout(vpp=2), 2, 'virtual pipeline', 'vpp 2 with pp 1', '--pp 2'),
        (Layout(pp=2, vpp=2, layers=6), 2, 'layers', 'pp · vpp = 4 does not divide 6 layers', '1, 2, 3, 6'),
        (Layout(tp=4, heads=6), 4, 'attention heads', 'tp 4 does not divide 6 heads', '1, 2, 3, 6'),
        (Layout(tp=2, kv_heads=3), 2, 'key-value heads', 'neither of tp 2 and 3 divides the other', '1, 3'),
        (Layout(heads=8, kv_heads=3), 1, 'key-value heads', '3 does not divide 8 heads', '1, 2, 4, 8'),
        (
            Layout(heads=8, hidden_size=100),
            1,
            'hidden size',
            'heads 8 does not divide hidden size 100',
            'multiple of 8',
        ),
        (Layout(cp=2, seq_length=1026), 2, 'sequence length', '2 · cp = 4 does not divide 1026', 'to 1028'),
    ],
)
def test_a_size_that_does_not_divide_fails_with_a_fix(layout, world, check, says, fix):
    failing = [line for line in layout.lines(world) if line.status == FAIL]
    assert [line.check for line in failing] == [check]
    assert says in failing[0].value
    assert fix in failing[0].fix


def test_what_megatron_does_otherwise_than_asked_is_a_warning():
    copied = Layout(tp=4, kv_heads=2).lines(4)[-1]
    assert (copied.status, copied.value) == (WARN, '2 on tp 4: each on 2 ranks')
    uneven = Layout(tp=4, seq_length=1002).lines(4)[-1]
    assert (uneven.status, uneven.value) == (WARN, 'cp · tp = 4 does not divide 1002')


def test_a_layout_that_fits_says_what_each_rank_gets():
    layout = Layout(2, 2, 2, 1, 2, layers=8, heads=8, kv_heads=2, vocab_size=50257, hidden_size=512, seq_length=2048)
    lines = {line.check: line for line in layout.lines(16)}
    assert all(line.status == OK for line in lines.values())
    assert lines['layout'].value == 'tp · pp · cp = 2 · 2 · 2 = 8 on 16 processes: dp 2'
    assert lines['vocabulary'].value == '50257 ids, padded to 50432 = 2 · 25216 (a multiple of 128 · tp)'
    assert lines['sequence length'].value == '2048: 1024 a rank, 512 under sequence parallelism'
    assert layout.sizes(16) == {'tp': 2, 'pp': 2, 'cp': 2, 'ep': 1, 'vpp': 2, 'dp': 2}
    assert 'dp' not in layout.sizes(7)
