"""InfonceLoss over a data parallel group: unequal ranks give the loss and the gradients of one process, replicas are no
negatives, and whatever is wrong with one rank ends all of them."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.distributed as dist
from ranks import device, run_ranks

from tests.metric.layouts import groups_of
from tests.vocab_parallel.probes import counted
from twinkle_megatron.groups import group_rank, sum_over
from twinkle_megatron.loss import InfonceLoss, contrast

F64 = torch.float64
PRECISE = {'rtol': 1e-11, 'atol': 1e-13}
NEGATIVES = (2, 1, 3, 5, 3)
SHARES = ((0, 3), (3, 3), (3, 5))  # groups of each rank: three, none, two
OPTIONS = [
    {},
    {'use_batch': False},
    {'use_batch': False, 'mask_fake_negative': True, 'hard_negatives': 2},
    {'hard_negatives': 4},
    {'mask_fake_negative': True, 'include_qq': True},
    {'include_dd': True, 'temperature': 0.5},
    {'include_qq': True, 'include_dd': True, 'mask_fake_negative': True, 'hard_negatives': 1},
]


def data(first=0, last=5):
    """Labels and embeddings of groups."""
    generator = torch.Generator().manual_seed(6)
    sizes = [m + 2 for m in NEGATIVES]
    rows = 0.6 * torch.randn(sum(sizes), 5, generator=generator, dtype=F64)
    labels = [torch.tensor([1] + [0] * (size - 1)) for size in sizes]
    none = [torch.zeros(0, 5, dtype=F64)]
    return (
        torch.cat([torch.zeros(0, dtype=torch.long), *labels[first:last]]).to(device()),
        torch.cat(none + list(rows.split(sizes)[first:last])).to(device()),
    )


def called(init, first, last, upstream=1.0, **more):
    labels, rows = data(first, last)
    rows.requires_grad_()
    loss = InfonceLoss(**init, **more)({'labels': labels}, {'embeddings': rows})['loss']
    (upstream * loss).backward()
    return loss.detach(), rows.grad


def test_unequal_ranks_give_the_loss_and_the_gradients_of_one_process():
    """On every rank the whole loss; the gradient of its rows is that of the whole loss. Blocks of few anchors, too."""

    def case():
        found = []
        for block in (contrast.BLOCK, 40):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(contrast, 'BLOCK', block)
                share = SHARES[dist.get_rank()]
                found += [called(init, *share, upstream=-1.7, process_group=dist.group.WORLD) for init in OPTIONS]
        return found

    every = run_ranks(case, 3)
    for i, init in enumerate(OPTIONS * 2):
        loss, grad = (x.cpu() for x in called(init, 0, len(NEGATIVES), upstream=-1.7))
        assert [found[i][0].item() for found in every] == pytest.approx([loss.item()] * 3, rel=1e-12), init
        torch.testing.assert_close(torch.cat([found[i][1] for found in every]), grad, **PRECISE)


def test_shares_add_up_to_the_loss_and_losses_are_those_of_own_anchors():
    def case():
        labels, rows = data(*SHARES[dist.get_rank()])
        coupled = InfonceLoss().couple(rows, labels, dist.group.WORLD, True)
        return coupled.share, coupled.gradient, coupled.losses

    every = run_ranks(case, 3)
    labels, rows = data()
    whole = InfonceLoss().couple(rows, labels, None, True)
    torch.testing.assert_close(sum(share for share, _, _ in every), whole.share.cpu(), **PRECISE)
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in every]), whole.gradient.cpu(), **PRECISE)
    torch.testing.assert_close(torch.cat([losses for _, _, losses in every]), whole.losses.cpu(), **PRECISE)
    assert [len(losses) for _, _, losses in every] == [3, 0, 2]


def test_gradients_of_a_shared_encoder_add_up_to_those_of_one_process():
    """Summed over the ranks, not averaged."""
    init = {'include_qq': True, 'include_dd': True}

    def gradient(first, last, **more):
        labels, rows = data(first, last)
        weight = torch.eye(5, dtype=F64, device=device()).requires_grad_()
        InfonceLoss(**init, **more)({'labels': labels}, {'embeddings': torch.tanh(rows @ weight)})['loss'].backward()
        return weight.grad

    def case():
        group = dist.group.WORLD
        return sum_over(gradient(*SHARES[dist.get_rank()], process_group=group), group)

    want = gradient(0, len(NEGATIVES)).cpu()
    for found in run_ranks(case, 3):
        torch.testing.assert_close(found, want, **PRECISE)


def test_replicas_are_no_negatives_and_the_world_is_never_taken_silently():
    """Two data parallel ranks, each twice. Copies of every document would add ln 2."""
    shares = ((0, 3), (3, 5))

    def case():
        from megatron.core import parallel_state

        groups = groups_of('dp2 tp2')
        share = shares[group_rank(groups.dp)]
        right, grad = called({}, *share, process_group=groups.dp)
        wrong, _ = called({}, *share, process_group=dist.group.WORLD)
        with pytest.raises(ValueError, match='process_group must be the data parallel group: there are 4 ranks'):
            called({}, *share)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        assert parallel_state.get_data_parallel_rank() == group_rank(groups.dp)
        return right, grad, wrong, called({}, *share)

    loss, grad = (x.cpu() for x in called({}, 0, len(NEGATIVES)))
    every = run_ranks(case, 4)
    for right, _, wrong, (megatron, _) in every:
        torch.testing.assert_close(right, loss, **PRECISE)
        torch.testing.assert_close(megatron, loss, **PRECISE)
        assert wrong.item() == pytest.approx(loss.item() + math.log(2), rel=1e-12)
    for own in ([x[1] for x in every], [x[3][1] for x in every]):
        torch.testing.assert_close(torch.cat([own[0], own[2]]), grad, **PRECISE)
        assert torch.equal(own[0], own[1])
        assert torch.equal(own[2], own[3])


def test_context_parallel_ranks_are_no_negatives_either():
    def case():
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(context_parallel_size=2)
        dp = parallel_state.get_data_parallel_rank()
        return called({}, *((0, 3), (3, 5))[dp])[0]

    loss, _ = called({}, 0, len(NEGATIVES))
    for found in run_ranks(case, 4):
        torch.testing.assert_close(found, loss.cpu(), **PRECISE)


def test_collectives_are_four_and_none_in_backward():
    def case():
        group = dist.group.WORLD
        labels, rows = data(*((0, 3), (3, 5))[dist.get_rank()])
        calls = []
        for init, leaf in (({}, rows.requires_grad_()), ({}, rows.detach()), ({'use_batch': False}, rows)):
            with counted() as forward:
                loss = InfonceLoss(process_group=group, **init)({'labels': labels}, {'embeddings': leaf})['loss']
            with counted() as backward:
                if loss.requires_grad:
                    loss.backward()
            calls.append((dict(forward), sum(backward.values())))
        return calls

    gather = 'all_gather' if device().type == 'cpu' else 'all_gather_into_tensor'
    for calls in run_ranks(case, 2):
        assert calls == [
            ({gather: 2, 'reduce_scatter_tensor': 1, 'all_reduce': 1}, 0),
            ({gather: 2, 'all_reduce': 1}, 0),
            ({gather: 1, 'all_reduce': 1}, 0),
        ]


def test_ranks_may_disagree_on_type_and_on_the_wish_for_a_gradient():
    """One rank holds nothing, not even columns; one is in float64; one wants no gradient."""
    shares = ((0, 3), (3, 3), (3, 5))

    def case():
        rank, group = dist.get_rank(), dist.group.WORLD
        labels, rows = data(*shares[rank])
        rows = [rows, torch.zeros(0, 0, device=device()), rows.float()][rank].requires_grad_(rank < 2)
        loss = InfonceLoss(process_group=group)({'labels': labels}, {'embeddings': rows})['loss']
        if rank < 2:
            loss.backward()
        return loss.detach(), loss.requires_grad, rows.grad

    every = run_ranks(case, 3)
    loss, grad = (x.cpu() for x in called({}, 0, len(NEGATIVES)))
    assert [wants for _, wants, _ in every] == [True, True, False]
    for value, _, _ in every:
        assert value.dtype == F64
        assert value.item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(every[0][2], grad[: len(every[0][2])], rtol=1e-5, atol=1e-6)
    assert every[1][2].shape == (0, 0)


@pytest.mark.parametrize('rows', [0, 3])
def test_a_group_without_any_anchor_gives_zero_and_gradients_of_zeros(rows):
    def case():
        leaf = torch.ones(rows * dist.get_rank(), 4, device=device(), requires_grad=True)
        inputs = {'labels': torch.zeros(len(leaf))}
        loss = InfonceLoss(process_group=dist.group.WORLD)(inputs, {'embeddings': leaf})['loss']
        loss.backward()
        return loss, leaf.grad

    for loss, grad in run_ranks(case, 2):
        assert loss == 0
        assert (grad == 0).all()


def test_a_failed_rank_ends_the_call_on_all():
    def case():
        labels, rows = data(0, 2)
        failed = dist.get_rank() == 1
        given = (None, None) if failed else (rows, labels)
        return [InfonceLoss(use_batch=use_batch).couple(*given, dist.group.WORLD, True) for use_batch in (True, False)]

    assert run_ranks(case, 2, timeout=20) == [[None, None]] * 2


FAULTS = [  # in the data of rank 1
    ({}, [0, 0, 1, 0], 5, 'on rank 1: labels must mark the first row'),
    ({}, [0, 0, 0, 0], 5, 'on rank 1: labels must mark the first row'),
    ({}, [1, 0, 0, 1], 5, 'on rank 1: labels must mark groups .* at row 3 has no positive'),
    ({'hard_negatives': 2}, [1, 0, 1, 0], 5, 'on rank 1: hard_negatives=2 must find .* at row 0 has none'),
    ({}, [1, 0, 0], 5, 'on rank 1: labels must be one number for each of the 4 embeddings, got 3'),
    ({}, [1, 0, 1, 0], 4, 'as many columns on every rank, got 4 on rank 1, 5 on rank 0'),
]


def test_a_fault_in_the_data_of_one_rank_is_an_error_on_all():
    def case():
        messages = []
        for init, labels, columns, _ in FAULTS:
            for use_batch in (True, False):
                own, rows = data(0, 2)
                if dist.get_rank() == 1:
                    own, rows = torch.tensor(labels), torch.ones(4, columns, dtype=F64)
                loss = InfonceLoss(use_batch=use_batch, process_group=dist.group.WORLD, **init)
                try:
                    loss({'labels': own}, {'embeddings': rows.to(device())})
                except ValueError as error:
                    messages.append(str(error))
                else:
                    messages.append('none')
        return messages

    for messages in run_ranks(case, 2, timeout=20):
        for i, (_, _, _, expected) in enumerate(FAULTS):
            for message in messages[2 * i : 2 * i + 2]:
                assert re.search(expected, message), message


def test_inputs_that_cannot_be_read_on_one_rank_are_an_error_on_all():
    def case():
        labels, rows = data(0, 2)
        outputs = {'embeddings': rows} if dist.get_rank() == 1 else {}
        InfonceLoss(process_group=dist.group.WORLD)({'labels': labels}, outputs)

    first, second = run_ranks(case, 2, timeout=20, collect_errors=True)
    assert first.error == second.error == 'ValueError'
    assert "outputs must hold 'embeddings'" in first.message
    assert 'another rank of the data parallel group' in second.message
