"""Where the linear head puts tiles and gradients: the workspace, tiles that are kept, Megatron's gradient buffer."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from tests.vocab_parallel.linear_reference import gradients, largest_tile, poisoned
from tests.vocab_parallel.probes import NewTensors, needs_peak, peak_memory
from tests.vocab_parallel.reference import DIFFERENTIABLE, ours, plain, upstream
from twinkle_megatron.vocab_parallel import (
    LinearHead,
    VocabShard,
    cross_entropy,
    gather,
    head_gradients,
    log_probs,
    token_stats,
    topk,
    workspace,
)
from twinkle_megatron.vocab_parallel.head_gradients import HeadGradients, add_product
from twinkle_megatron.vocab_parallel.linear_source import LinearSource

F64, CPU = torch.float64, torch.device('cpu')
SMALL = 4e-4
"""MiB that hold a few dozen logits."""


def parts(rows, columns, width, dtype=F64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, width, generator=g, dtype=F64).to(dtype) for n in (rows, columns))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(columns, (rows,), generator=g)


class Kept:
    """How many blocks of logits are kept for the backward pass, and how many there are."""

    def __init__(self, monkeypatch, keeps=True):
        self.kept, self.blocks, self.elements = [], [], []
        original = LinearSource._rooms

        def watched(source, blocks, trained):
            rooms = original(source, blocks, trained) if keeps else {}
            self.kept.append(len(rooms))
            self.blocks.append(len(blocks))
            self.elements.append(sum(room.numel() for room in rooms.values()))
            return rooms

        monkeypatch.setattr(LinearSource, '_rooms', watched)


@pytest.mark.parametrize('dtype', [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ('rows', 'columns', 'width'), [(3, 40, 16), (16, 40, 16), (90, 40, 16), (90, 200, 3), (7, 9, 1)]
)
@pytest.mark.parametrize('spare', [0, 2 * SMALL, 100])
def test_whether_tiles_are_kept_changes_no_number(monkeypatch, dtype, rows, columns, width, spare):
    """They are kept in the storage of the weight's gradient, in the spare workspace, or not at all."""
    hidden, weight, target = parts(rows, columns, width, dtype)
    target[::3] = -100
    shard, found = VocabShard.from_group(columns, vocab_size=columns - 2), []
    target = target.clamp_max(columns - 3)
    for keeps in (True, False):
        with monkeypatch.context() as patch, poisoned(), largest_tile(SMALL):
            kept = Kept(patch, keeps)
            head = LinearHead(hidden, weight, max_workspace_mb=SMALL + spare)
            outs = ours(head, target, shard, temperature=0.7)
            grads = gradients(outs, (hidden, weight), upstream(1, (rows,)), DIFFERENTIABLE)
            again = gradients(outs, (hidden, weight), upstream(1, (rows,)), DIFFERENTIABLE)
        assert all(torch.equal(*pair) for pair in zip(grads, again))
        found.append([*outs.values(), *grads])
        if keeps and spare == 100:
            assert kept.kept == kept.blocks
        elif keeps and rows == 16 and not spare:
            assert all(0 < some < all_of_them for some, all_of_them in zip(kept.kept, kept.blocks))
    assert all(torch.equal(*pair) for pair in zip(*found))


@pytest.mark.parametrize('mb', [SMALL, 3 * SMALL, 7.5 * SMALL, 100])
def test_what_is_kept_beside_the_tile_at_work_fits_the_workspace(monkeypatch, mb):
    hidden, weight, target = parts(20, 100, 4)
    kept = Kept(monkeypatch)
    with largest_tile(SMALL):
        head = LinearHead(hidden, weight.detach(), max_workspace_mb=mb)
        log_probs(head, target, shard=VocabShard.from_group(100)).sum().backward()
    (elements,), tile, whole = kept.elements, int(SMALL * 2**20 / 8), mb * 2**20 / 8
    assert elements + tile <= whole
    assert elements == 20 * 100 or elements + 2 * tile >= whole  # not one more would fit


@pytest.mark.parametrize('chunk_size', [1, 7, 100, None])
def test_a_tile_is_no_wider_than_the_chunk(chunk_size):
    hidden, weight, target = parts(2000, 150, 2)
    with NewTensors() as new:
        loss = log_probs(LinearHead(hidden, weight), target, shard=VocabShard.from_group(150), chunk_size=chunk_size)
        loss.sum().backward()
    tile, state = 8 * 2000 * (chunk_size or 150), 8 * 2000 * 8
    assert tile <= new.sizes[0] <= max(tile, state)


@pytest.mark.parametrize('dtype', [F64, torch.bfloat16])
@pytest.mark.parametrize(('rows', 'columns', 'width'), [(5, 300, 64), (300, 70, 8), (64, 64, 64)])
def test_values_do_not_depend_on_the_workspace(dtype, rows, columns, width):
    hidden, weight, target = parts(rows, columns, width, dtype)
    want = None
    for mb in (SMALL, 3e-3, 0.05, 1, None, 1e9):
        for tile in (1e-3, 8):
            with poisoned(), largest_tile(tile):
                head = LinearHead(hidden, weight, max_workspace_mb=mb)
                outs = ours(head, target, VocabShard.from_group(columns))
                grads = gradients(outs, (hidden, weight), upstream(1, (rows,)), ('log_prob', 'entropy'))
            found = [outs[name] for name in ('log_prob', 'entropy', 'log_normalizer', 'cross_entropy')]
            want = want or (found, grads)
            close = {'rtol': 1e-12, 'atol': 1e-12} if dtype == F64 else {'rtol': 2e-2, 'atol': 2e-1}
            torch.testing.assert_close(found, want[0], **close)
            torch.testing.assert_close(grads, want[1], **close)


@pytest.mark.parametrize('mb', [5e-324, 1e-9, 1, 8, 9.5, 1e9, 1e308])
def test_tile_and_spare_memory_share_the_workspace(mb):
    tile, spare = (f(CPU, torch.float32, mb) for f in (workspace.tile_elements, workspace.spare_elements))
    assert tile == max(1, int(min(mb, 8) * 2**18))
    assert spare == max(0, int(min(mb, 2.0**40) * 2**18) - tile)


def test_the_default_workspace_has_nothing_to_spare():
    assert workspace.spare_elements(CPU, torch.float32, None) == 0
    assert workspace.tile_elements(CPU, torch.bfloat16, 8) == 4 << 20


@pytest.mark.parametrize(
    ('free', 'mb'), [(None, 8), (1 << 40, 8), (1 << 30, 8), (400 << 20, 4), (100 << 20, 1), (0, 1)]
)
def test_the_default_workspace_comes_from_the_free_memory(monkeypatch, caplog, free, mb):
    monkeypatch.setattr(workspace, 'free_memory', lambda kind: free)
    workspace.default_workspace_mb.cache_clear()
    try:
        assert [workspace.default_workspace_mb('cpu') for _ in range(2)] == [mb, mb]
        assert len(caplog.records) == (mb < 8)  # what is small is said, once
    finally:
        workspace.default_workspace_mb.cache_clear()


def test_the_free_memory_of_this_machine_is_known():
    free = workspace.free_memory('cpu')
    assert free is None or 1 << 20 < free < 1 << 50


MAIN_DTYPES = [F64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize('dtype', [F64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('main_dtype', MAIN_DTYPES)
@pytest.mark.parametrize('mb', [None, SMALL, SMALL / 10, 100])
def test_micro_batches_add_up_in_main_grad(dtype, main_dtype, mb):
    """The buffer holds what it held and the gradient of every micro-batch; autograd is given nothing to add."""
    columns, true, width = 20, 17, 4
    shard = VocabShard.from_group(columns, vocab_size=true)
    _, weight, _ = parts(1, columns, width, dtype)
    weight.data[true:] = math.nan
    before = torch.randn(columns, width, generator=torch.Generator().manual_seed(1), dtype=F64).to(main_dtype)
    main_grad, want, terms = before.clone(), before.double(), before.double().abs()
    for batch in range(3):
        hidden, _, target = parts(30, columns, width, dtype, seed=batch + 5)
        target = target.clamp_max(true - 1)
        target[batch::4] = -100
        hidden.data[batch] = math.nan  # ignored
        grad_out = upstream(batch, (30,))['cross_entropy']
        with poisoned():
            head = LinearHead(hidden, weight, max_workspace_mb=mb, main_grad=main_grad)
            loss = cross_entropy(head, target, shard=shard, label_smoothing=0.1)
            loss.backward(grad_out.to(loss.dtype))
        h = torch.where((target == -100)[:, None], 0, hidden.detach()).double().requires_grad_()
        w = weight.detach()[:true].double().requires_grad_()
        x = h @ w.T
        plain_loss = torch.nn.functional.cross_entropy(x, target, label_smoothing=0.1, reduction='none')
        d_hidden, d_weight, d_x = torch.autograd.grad(plain_loss, [h, w, x], grad_out)
        want[:true] += d_weight
        terms[:true] += d_x.abs().T @ h.detach().abs()
        assert weight.grad.layout == torch.sparse_coo
        assert weight.grad._nnz() == 0
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(hidden.grad.double(), d_hidden, rtol=8 * eps, atol=8 * eps)
    # products are rounded to the dtype of the weight, sums to that of the buffer
    eps = max(torch.finfo(dtype).eps, torch.finfo(main_dtype).eps)
    assert ((main_grad.double() - want).abs() <= 4 * eps * terms).all()
    assert torch.equal(main_grad[true:], before[true:])


@pytest.mark.parametrize('sequence_parallel', [False, True])
def test_main_grad_on_two_ranks_is_the_rows_of_the_whole_gradient(sequence_parallel):
    hidden, weight, target = parts(12, 10, 3)
    grad_out = upstream(2, (12,))['log_prob']

    def on_rank():
        rank, shard = dist.get_rank(), VocabShard.from_group(5, dist.group.WORLD)
        own = (hidden.detach().chunk(2)[rank] if sequence_parallel else hidden.detach()).clone().requires_grad_()
        rows = weight.detach()[shard.start : shard.stop].clone().requires_grad_()
        main_grad = torch.ones(5, 3)
        head = LinearHead(
            own, rows, sequence_parallel=sequence_parallel, main_grad=main_grad, max_workspace_mb=SMALL / 4
        )
        log_probs(head, target, shard=shard).backward(grad_out)
        return own.grad, main_grad

    want = torch.autograd.grad(plain(hidden @ weight.T, target, 10)['log_prob'], [hidden, weight], grad_out)
    ranks = run_ranks(on_rank, 2)
    got = torch.cat([grad for grad, _ in ranks]) if sequence_parallel else ranks[0][0]
    torch.testing.assert_close(got, want[0])
    torch.testing.assert_close(torch.cat([grad for _, grad in ranks]), 1 + want[1].float(), rtol=1e-6, atol=1e-6)


def test_main_grad_takes_the_gradients_of_lookups_too():
    hidden, weight, target = parts(6, 9, 4)
    shard, main_grad = VocabShard.from_group(9), torch.zeros(9, 4, dtype=F64)
    head = LinearHead(hidden, weight, main_grad=main_grad, logit_scale=0.5)
    for found in (gather(head, target[:, None], shard=shard), topk(head, 2, shard=shard)[0]):
        found.backward(torch.ones_like(found))
    x = hidden @ weight.T * 0.5
    (want,) = torch.autograd.grad(x.gather(-1, target[:, None]).sum() + x.topk(2).values.sum(), weight)
    torch.testing.assert_close(main_grad, want)


def test_main_grad_stays_where_the_weight_is_frozen_or_nothing_is_trained():
    hidden, weight, target = parts(6, 9, 4)
    shard, main_grad = VocabShard.from_group(9), torch.zeros(9, 4)
    log_probs(LinearHead(hidden, weight.detach(), main_grad=main_grad), target, shard=shard).sum().backward()
    log_probs(LinearHead(hidden, weight, main_grad=main_grad), target, shard=shard)
    head = LinearHead(hidden, weight, main_grad=main_grad)
    log_probs(head, torch.full_like(target, -100), shard=shard).sum().backward()
    assert head.detach().main_grad is None
    assert torch.equal(main_grad, torch.zeros(9, 4))


@pytest.mark.parametrize('lead', [(0,), (2, 0)])
def test_no_tokens_give_autograd_an_empty_gradient_beside_main_grad(lead):
    _, weight, _ = parts(1, 9, 4)
    head = LinearHead(torch.zeros(*lead, 4, dtype=F64), weight, main_grad=torch.zeros(9, 4))
    log_probs(head, torch.zeros(lead, dtype=torch.long), shard=VocabShard.from_group(9)).sum().backward()
    assert weight.grad.layout == torch.sparse_coo


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_two_heads_may_share_a_weight_of_which_one_adds_to_main_grad(dtype):
    hidden, weight, target = parts(6, 9, 4, dtype)
    shard, main_grad = VocabShard.from_group(9), torch.zeros(9, 4)
    one = log_probs(LinearHead(hidden, weight, main_grad=main_grad), target, shard=shard)
    for other in (LinearHead(hidden * 2, weight), LinearHead(hidden * 2, weight, main_grad=main_grad)):
        main_grad.zero_()
        weight.grad = None
        (one.sum() + log_probs(other, target, shard=shard).sum()).backward(retain_graph=True)
        got = main_grad + weight.grad.to_dense()
        x = hidden.double(), weight.double()
        both = sum(plain(k * x[0] @ x[1].T, target, 9)['log_prob'].sum() for k in (1, 2))
        (want,) = torch.autograd.grad(both, weight)
        torch.testing.assert_close(got, want.float(), rtol=8e-2, atol=8e-2)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it lies on a GPU."""

    is_cuda = True


def apex_kernel(hidden, grad, out):
    """As Apex's: memory is read and written as if every tensor were contiguous, and nothing is rounded between."""
    assert hidden.dtype == grad.dtype in (torch.bfloat16, torch.float16)
    assert out.dtype == torch.float32
    hidden, grad, out = (t.as_subclass(torch.Tensor).as_strided(t.shape, (t.shape[1], 1)) for t in (hidden, grad, out))
    out += grad.float().T @ hidden.float()


@pytest.fixture
def apex(monkeypatch):
    calls = []

    def kernel(*args):
        calls.append([tuple(t.shape) for t in args])
        apex_kernel(*args)

    monkeypatch.setattr(head_gradients, '_apex', lambda: SimpleNamespace(wgrad_gemm_accum_fp32=kernel))
    return calls


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('layout', ['whole', 'columns of a wider tensor', 'transposed'])
def test_apex_adds_products_in_float32_where_it_is_installed(apex, dtype, layout):
    g = torch.Generator().manual_seed(0)
    hidden, grad = torch.randn(8, 5, generator=g).to(dtype), torch.randn(8, 9, generator=g).to(dtype)
    rows = {
        'whole': hidden,
        'columns of a wider tensor': torch.cat([hidden, hidden], 1)[:, :5],
        'transposed': hidden.T.contiguous().T,
    }[layout]
    main_grad = torch.ones(12, 5)
    grads = HeadGradients(rows, torch.randn(9, 5).to(dtype), main_grad, True, wants_rows=False, wants_bias=False)
    for at in (slice(0, 3), slice(3, 6), slice(6, 8)):
        grads.add(at, slice(0, 4), grad[at, :4].contiguous().as_subclass(OnGpu))
    grads.add(slice(0, 8), slice(4, 9), grad[:, 4:].contiguous().as_subclass(OnGpu))
    want = torch.ones(12, 5, dtype=F64)
    want[:9] += grad.double().T @ hidden.double()
    torch.testing.assert_close(main_grad.double(), want, rtol=1e-6, atol=1e-6)
    if layout == 'whole':
        assert len(apex) == 4
        assert apex[-1] == [(8, 5), (8, 5), (5, 5)]


def test_apex_is_asked_for_nothing_that_it_cannot_do(apex):
    for dtype, main_dtype, on in (
        (torch.float32, torch.float32, OnGpu),
        (F64, torch.float32, OnGpu),
        (torch.bfloat16, torch.bfloat16, OnGpu),
        (torch.bfloat16, F64, OnGpu),
        (torch.bfloat16, torch.float32, torch.Tensor),
    ):
        hidden, grad, out = (
            torch.ones(3, 2, dtype=dtype),
            torch.ones(3, 4, dtype=dtype),
            torch.ones(4, 2).to(main_dtype),
        )
        add_product(out, grad.as_subclass(on), hidden)
        assert torch.equal(out, torch.full((4, 2), 4, dtype=main_dtype))
    assert apex == []


def test_apex_is_looked_for_by_the_name_of_its_extension(monkeypatch):
    head_gradients._apex.cache_clear()
    fake = SimpleNamespace(wgrad_gemm_accum_fp32=apex_kernel)
    monkeypatch.setitem(__import__('sys').modules, 'fused_weight_gradient_mlp_cuda', fake)
    assert head_gradients._apex() is fake
    head_gradients._apex.cache_clear()
    monkeypatch.setitem(__import__('sys').modules, 'fused_weight_gradient_mlp_cuda', None)
    assert head_gradients._apex() is None
    head_gradients._apex.cache_clear()


def everything(head, target, shard):
    """Forward and backward of the statistics and of both lookups."""
    tensors = [t for t in head.tensors if t.requires_grad]
    stats = token_stats(head, target, shard=shard, entropy=True, mean_logit=True, argmax=True)
    outs = [getattr(stats, name) for name in DIFFERENTIABLE]
    outs += [topk(head, 2, shard=shard)[0], gather(head, target[:, None], shard=shard)]
    return torch.autograd.grad(outs, tensors, [torch.ones_like(out) for out in outs])


class NewDenseTensors(NewTensors):
    """Sparse ones have no storage to tell a view by; those of the head are empty."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get('layout') == torch.sparse_coo or any(isinstance(t, torch.Tensor) and t.is_sparse for t in args):
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(
    ('dtype', 'options'),
    [(torch.bfloat16, {}), (torch.float32, {'max_workspace_mb': 2}), (torch.float32, {'max_workspace_mb': 12})],
)
def test_no_tensor_of_the_size_of_the_logits_is_ever_made(dtype, options):
    rows, columns, width = 1024, 1 << 14, 16
    hidden, weight, target = parts(rows, columns, width, dtype)
    for main_grad in (None, torch.zeros(columns, width)):
        with NewDenseTensors() as new:
            everything(
                LinearHead(hidden, weight, main_grad=main_grad, **options), target, VocabShard.from_group(columns)
            )
        assert max(new.sizes) < rows * columns  # bytes: less than one for each logit
        assert max(new.sizes) <= max(min(options.get('max_workspace_mb', 8), 8) * 2**20, 4 * columns * width)


@needs_peak
@pytest.mark.parametrize('frozen', [False, True])
def test_peak_memory_follows_the_workspace_and_not_tokens_times_vocabulary(frozen):
    width = 32

    def on_rank(rows, columns):
        hidden, weight, target = parts(rows, columns, width, torch.float32)
        weight.requires_grad_(not frozen)
        shard = VocabShard.from_group(columns)
        return peak_memory(lambda: everything(LinearHead(hidden, weight, max_workspace_mb=4), target, shard))

    for rows, columns in ((1024, 16_000), (4096, 32_000)):
        (peak,) = run_ranks(on_rank, 1, rows, columns)
        whole, of_rows, of_weight = (4 * n for n in (rows * columns, rows * width, columns * width))
        tiles, per_token = 16 << 20, 500 * rows
        # the gradient of one of the three functions beside the sum of the others
        assert peak <= tiles + per_token + 6 * of_rows + (0 if frozen else 2 * of_weight)
        assert rows == 1024 or peak < whole / 8


@needs_peak
def test_case_25_the_peak_follows_the_chunk_and_stays_far_below_the_logits():
    rows, columns, width = 4096, 32_000, 16
    hidden, weight, target = parts(rows, columns, width, torch.float32)
    shard = VocabShard.from_group(columns)

    def sweep(chunk_size, mb):
        loss = cross_entropy(
            LinearHead(hidden, weight, max_workspace_mb=mb), target, shard=shard, chunk_size=chunk_size
        )
        return loss, *torch.autograd.grad(loss.sum(), [hidden, weight])

    def on_rank():
        found, peaks = [], []
        for options in ((300, 4), (7000, 4), (1 << 20, 4), (1 << 20, 64)):
            found.append(sweep(*options))
            peaks.append(peak_memory(lambda: sweep(*options)))  # noqa: B023
        return found, peaks

    ((found, peaks),) = run_ranks(on_rank, 1, timeout=200)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)
    logits, gradients_and_tiles = 4 * rows * columns, 4 * (rows + columns) * width + (8 << 20)
    assert all(peak <= gradients_and_tiles for peak in peaks[:3]), peaks
    assert peaks[3] <= gradients_and_tiles + (64 << 20)
    assert max(peaks[:3]) < logits / 15


@pytest.mark.parametrize('mb', [None, 1e-2])
def test_case_25_chunks_of_one_of_no_divisor_and_of_more_than_all_agree(mb):
    hidden, weight, target = parts(24, 1000, 8)
    target[3] = -100
    shard = VocabShard.from_group(1000, vocab_size=997)
    target = target.clamp_max(996)
    weights = upstream(25, (24,))
    want = plain(torch.where((target == -100)[:, None], 0, hidden) @ weight[:997].T, target, 997)
    want_grads = gradients(want, (hidden, weight), weights, ('cross_entropy',))
    for chunk_size in (1, 300, 997, 5000):
        with poisoned():
            found = ours(LinearHead(hidden, weight, max_workspace_mb=mb), target, shard, chunk_size=chunk_size)
            grads = gradients(found, (hidden, weight), weights, ('cross_entropy',))
        for name in (*DIFFERENTIABLE, 'cross_entropy'):
            torch.testing.assert_close(found[name], want[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads, want_grads, rtol=1e-12, atol=1e-12)
