"""The compiled kernels against the eager ones, and the choice between them."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from twinkle_megatron.vocab_parallel import VocabShard, token_stats
from twinkle_megatron.vocab_parallel.kernels import compiled, eager, select
from twinkle_megatron.vocab_parallel.kernels.memory import empty
from twinkle_megatron.vocab_parallel.kernels.select import VARIABLE, Kernels, _compiled

CPU = torch.device('cpu')
needs_compiler = pytest.mark.skipif(shutil.which('g++') is None, reason='no C++ compiler')
HALF = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def _choose_anew() -> Iterator[None]:
    _compiled.cache_clear()
    yield
    _compiled.cache_clear()


def tile(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random logits with every value the kernels have to take: -inf, equal maxima, a row of -inf, rows with NaN."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).mul_(3)
    x[:, 1::7] = -torch.inf
    x[0, 2], x[0, columns // 2] = 30, 30
    if rows > 5:
        x[1], x[2], x[3, 4], x[4, 0] = -torch.inf, torch.nan, torch.nan, torch.inf
    return x.to(dtype)


def coefficients(rows: int, columns: int, dtype: torch.dtype, b: bool, c: bool) -> tuple[Tensor | None, ...]:
    """target, inv_t, m, log_s, at_target, a, b, c with the odd rows all 0."""
    random = torch.Generator().manual_seed(1)

    def row() -> Tensor:
        return torch.rand(rows, generator=random).to(dtype).sub_(0.5).index_fill_(0, torch.arange(1, rows, 2), 0)

    target = torch.randint(-1, columns, (rows,), generator=random, dtype=torch.int32)
    return target, row() + 40, row() + 2, row(), row(), row() if b else None, row() if c else None


def assert_same_grad(x: Tensor, out: Tensor, b: bool, c: bool) -> None:
    dtype = eager.accumulate_dtype(x.dtype)
    target, m, log_s, at_target, a, b_row, c_row = coefficients(*x.shape, dtype, b, c)
    inv_t = torch.tensor(0.7, dtype=dtype)
    expected = torch.empty(x.shape, dtype=x.dtype)
    eager.row_grad(x, expected, target, inv_t, m, log_s, at_target, a, b_row, c_row)
    compiled.row_grad(x, out, target, inv_t, m, log_s, at_target, a, b_row, c_row)
    torch.testing.assert_close(
        out, expected, rtol=HALF.get(x.dtype, 3e-6), atol=0 if x.dtype.itemsize > 2 else 1e-7, equal_nan=True
    )
    assert (out[1::2] == 0).all()


def assert_same_stats(x: Tensor, flags: tuple[bool, ...]) -> None:
    inv_t = torch.tensor(0.7, dtype=eager.accumulate_dtype(x.dtype))
    expected, found = eager.row_stats(x, inv_t, *flags), compiled.row_stats(x, inv_t, *flags)
    assert len(found) == 1 + sum(flags)
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=1e-5, equal_nan=True)
    if flags[2]:
        assert torch.equal(found[-1], expected[-1])
        assert torch.equal(found[-1].long(), torch.argmax(x, -1))


def kinds() -> int:
    return compiled._kernel.cache_info().currsize


@needs_compiler
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_compiled_equals_eager_in_every_dtype(dtype: torch.dtype) -> None:
    x = tile(9, 333, dtype)
    assert_same_stats(x, (True, True, True, True))
    assert_same_grad(x, torch.empty_like(x), True, True)


@needs_compiler
def test_compiled_equals_eager_for_what_training_asks() -> None:
    x = tile(9, 5000, torch.bfloat16)
    for flags in ((False, False, False, True), (False, False, True, True), (False, False, True, False)):
        assert_same_stats(x, flags)
    for b, c in ((False, False), (False, True), (True, False)):
        assert_same_grad(x, torch.empty_like(x), b, c)
    assert_same_grad(x, x, False, False)


@needs_compiler
def test_any_layout_gives_the_same_numbers_and_may_be_written_in_place() -> None:
    whole, out = tile(9, 400, torch.float32), torch.full((9, 400), torch.nan)
    assert_same_stats(whole[:, 50:350], (False, False, True, True))
    for x, y in (
        (whole[:, 50:350], out[:, 50:350]),  # part of the columns
        (whole.T[:9], out.T[:9]),  # columns apart
        (whole[:1], out[:1]),
        (whole[:, :1], out[:, :1]),
        (whole[::2, 3:], out[::2, 3:]),
    ):
        assert_same_stats(x, (False, False, False, True))
        assert_same_grad(x, y, False, False)
    assert_same_grad(whole[:, 100:300], whole[:, 100:300], False, False)


@needs_compiler
@pytest.mark.parametrize('columns', [4099, 9000, 20011])  # parts of unequal width, of equal width, many
def test_wide_rows_are_summed_in_parts_with_nothing_lost(columns: int) -> None:
    x = tile(9, columns, torch.bfloat16)
    x[6, : columns // 2] = -torch.inf  # whole parts without a probability
    x[7, columns // 3] = x[7, -1] = 50
    assert_same_stats(x, (True, False, True, True))
    y = torch.rand(9, columns).bfloat16()
    log_sum = compiled.row_stats(y, torch.tensor(1.0), True, False, True, True)[1].log()
    expected = (y.double() - y.double().amax(-1, keepdim=True)).logsumexp(-1)
    torch.testing.assert_close(log_sum.double(), expected, rtol=0, atol=2e-6)


@needs_compiler
def test_numbers_of_rows_and_columns_are_never_compiled_in() -> None:
    compiles = torch._dynamo.utils.counters['stats']
    compiled._kernel.cache_clear()  # so that the first size, with as many rows as columns, is the one compiled for
    sizes = list(itertools.product((300, 2, 7, 301), (300, 299, 2, 4096, 9000)))
    for at, (rows, columns) in enumerate(sizes):
        x = torch.randn(rows, columns)
        assert_same_stats(x, (False, False, False, True))
        assert_same_grad(x, torch.empty_like(x), False, False)
        if at == 0:
            before, known = compiles['unique_graphs'], kinds()
            assert before > 0  # really compiled
    assert (compiles['unique_graphs'], kinds()) == (before, known)


@needs_compiler
def test_a_compile_is_announced_once_with_its_time(caplog: pytest.LogCaptureFixture) -> None:
    compiled._kernel.cache_clear()
    x = torch.randn(3, 300)
    for _ in range(2):
        with caplog.at_level(logging.WARNING, 'twinkle_megatron'):
            assert_same_stats(x, (False, False, False, True))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert 'compiles row_stats (normalizer, float32' in messages[0]
    assert 'compiled row_stats' in messages[1]


def test_a_failing_compiler_leaves_the_eager_kernels_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError('the compiler is broken')

    compiled._kernel.cache_clear()
    monkeypatch.setattr(torch, 'compile', lambda function, **options: broken)
    x = tile(9, 333, torch.float32)
    for _ in range(2):
        with caplog.at_level(logging.WARNING, 'twinkle_megatron'):
            assert_same_stats(x, (False, False, False, True))
            assert_same_grad(x, torch.empty_like(x), False, False)
    told = [record.getMessage() for record in caplog.records if 'the compiler is broken' in record.getMessage()]
    assert len(told) == 2  # one for each kernel
    assert all('uses the eager kernel' in message for message in told)
    compiled._kernel.cache_clear()


def chosen(rows: int = 64, columns: int = 1 << 17) -> Kernels:
    return select(CPU, rows, columns)


def test_without_a_compiler_eager_is_chosen_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(shutil, 'which', lambda name: None)
    assert [chosen().name, chosen().name] == ['eager', 'eager']
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert 'no C++ compiler' in messages[0]


@needs_compiler
def test_large_logits_get_the_compiled_kernels_and_small_ones_the_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    assert chosen().name == 'compiled'
    assert chosen(4, 100).name == 'eager'
    monkeypatch.setenv(VARIABLE, 'compiled')
    assert chosen(4, 100).name == 'compiled'
    assert chosen(1, 100).name == 'eager'
    monkeypatch.setenv(VARIABLE, 'eager')
    assert chosen().name == 'eager'


def test_an_unknown_choice_of_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, 'fast')
    with pytest.raises(ValueError, match="'auto', 'eager' or 'compiled', got 'fast'"):
        token_stats(torch.randn(2, 5), torch.tensor([1, 2]), shard=VocabShard(0, 5, 5))


def test_a_gradient_in_huge_pages_is_an_ordinary_tensor() -> None:
    grad = empty((3, 1 << 22), torch.bfloat16, CPU)
    assert grad.shape == (3, 1 << 22)
    assert grad.is_contiguous()
    grad.fill_(1).add_(1)
    assert (grad.clone() == 2).all()
