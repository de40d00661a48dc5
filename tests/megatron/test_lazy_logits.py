"""An output layer that is taken over returns logits which are a product until somebody uses them as a tensor."""

from __future__ import annotations

import contextlib
import copy
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from ranks import device, run_ranks
from tiny_gpt import Layout, Spec, build, initialize, unwrapped, wrap

from twinkle_megatron.megatron import lazy_logits
from twinkle_megatron.megatron.heads import check_no_hook, head_taken, why_no_linear_head
from twinkle_megatron.megatron.lazy_logits import LazyLogits
from twinkle_megatron.vocab_parallel import VocabShard, token_stats

GPT = Spec(vocab_size=62, pad_vocab_to=4, layers=1)
TIED = Spec(vocab_size=62, pad_vocab_to=4, layers=1, tied=True)
LENGTH, ROWS = 8, 3


def _no_loss(logits, labels):
    raise AssertionError('nobody gave labels')


def _model(spec, layout):
    """The model, and ids and positions `[b, s]`."""
    initialize(layout)
    (chunk,) = build(spec, layout)
    ids = torch.randint(0, spec.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).to(device())
    return chunk, ids, torch.arange(LENGTH, device=device()).expand_as(ids)


def _head(spec, layout, dtype=torch.float64):
    """The output layer, its input on this rank, as a leaf that wants a gradient, and the weight it is called with."""
    chunk, _, _ = _model(spec, layout)
    layer = chunk.output_layer.to(dtype)
    length = LENGTH // layout.tp if layout.sp else LENGTH
    seed = 1 + (dist.get_rank() if layout.sp else 0)
    hidden = torch.randn(length, ROWS, spec.hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight = chunk.embedding.word_embeddings.weight.data.to(dtype).requires_grad_() if spec.tied else None
    return chunk, layer, hidden.to(device(), dtype).requires_grad_(), weight


LAYOUTS = pytest.mark.parametrize(
    ('spec', 'layout'),
    [
        pytest.param(GPT, Layout(), id='one'),
        pytest.param(GPT, Layout(tp=2), id='tp2'),
        pytest.param(GPT, Layout(tp=2, sp=True), id='tp2-sp'),
        pytest.param(TIED, Layout(tp=2, sp=True), id='tp2-sp-tied'),
    ],
)


@LAYOUTS
def test_a_model_without_labels_returns_bitwise_the_stock_logits_and_gradients(spec, layout):
    run_ranks(_without_labels, layout.world, spec, layout, timeout=30)


def _without_labels(spec, layout):
    model, ids, positions = _model(spec, layout)

    def run(gather):
        model.zero_grad()
        logits = model(ids, positions, None, runtime_gather_output=gather)
        weights = torch.rand(logits.shape, generator=torch.Generator().manual_seed(3), dtype=logits.dtype)
        (logits * weights.to(logits)).sum().backward()
        return logits.detach(), [p.grad for p in model.parameters()]

    for gather in (None, True):
        stock, grads = run(gather)
        with head_taken(model, _no_loss):
            ours, found = run(gather)
        assert type(ours) is torch.Tensor
        assert torch.equal(ours, stock)
        assert all(map(torch.equal, found, grads))
    model.eval()
    with torch.no_grad(), head_taken(model, _no_loss):
        assert torch.equal(model(ids, positions, None, runtime_gather_output=True), stock)


AS_TENSOR = {
    'argmax': lambda x, stock: torch.argmax(x, dim=-1),
    'max': lambda x, stock: x.max(dim=-1).values,
    'float': lambda x, stock: x.float(),
    'to': lambda x, stock: x.to(torch.bfloat16),
    'index': lambda x, stock: x[..., :3],
    'mask': lambda x, stock: x[stock > 0],
    'view': lambda x, stock: x.view(-1, x.size(-1)),
    'clone': lambda x, stock: x.clone(),
    'contiguous': lambda x, stock: x.transpose(0, 1).contiguous(),
    'part of the sequence': lambda x, stock: x.narrow(0, 1, 2),
    'part of the vocabulary': lambda x, stock: x.narrow(-1, 1, 3),
    'part of the batch': lambda x, stock: x.narrow(1, 0, 1) + 0,
    'part of the transposed batch': lambda x, stock: x.transpose(0, 1).narrow(0, 1, 1) + 0,
    'vocabulary first': lambda x, stock: x.transpose(0, -1),
    'permute': lambda x, stock: x.permute(2, 0, 1),
    'mT': lambda x, stock: x.mT,
    'add': lambda x, stock: x + 1,
    'radd': lambda x, stock: stock + x,
    'sub': lambda x, stock: x - stock.mean(),
    'rsub': lambda x, stock: 1 - x,
    'mul': lambda x, stock: x * stock,
    'rmul': lambda x, stock: stock * x,
    'by zero': lambda x, stock: x * 0,
    'by a negative number': lambda x, stock: -1.5 * x,
    'div': lambda x, stock: x / 3,
    'rdiv': lambda x, stock: 3 / x,
    'floordiv': lambda x, stock: x // 0.3,
    'mod': lambda x, stock: x % 0.3,
    'pow': lambda x, stock: x**2,
    'rpow': lambda x, stock: 2**x,
    'matmul': lambda x, stock: x @ stock.mT,
    'rmatmul': lambda x, stock: stock.mT @ x,
    'neg': lambda x, stock: -x,
    'abs': lambda x, stock: abs(x),
    'eq': lambda x, stock: x == stock.amax(),
    'eq number': lambda x, stock: x == 0,
    'ne': lambda x, stock: x != stock,
    'lt': lambda x, stock: x < 0,
    'ge': lambda x, stock: x >= stock,
    'len': lambda x, stock: torch.tensor(len(x)),
    'iter': lambda x, stock: torch.stack(list(x)),
    'log_softmax': lambda x, stock: F.log_softmax(x, dim=-1),
    'method': lambda x, stock: x.softmax(-1),
    'stack': lambda x, stock: torch.stack([x, stock, x]),
    'cat': lambda x, stock: torch.cat((x, x)),
    'where': lambda x, stock: torch.where(x > 0, x, 0),
    'like': lambda x, stock: torch.ones_like(x),
    'expand': lambda x, stock: torch.broadcast_to(x, torch.Size((2, *stock.shape))),
    'data': lambda x, stock: x.data,
    'in place on another': lambda x, stock: stock.clone().add_(x),
    'scaled': lambda x, stock: (0.3 * (x * 0.7)).exp(),
    'cross_entropy': lambda x, stock: F.cross_entropy(x.flatten(0, 1), stock.flatten(0, 1).argmin(-1)),
}


@LAYOUTS
@pytest.mark.parametrize('gather', [None, True], ids=['shard', 'gathered'])
def test_all_that_a_tensor_can_do_gives_what_the_stock_logits_give(spec, layout, gather):
    run_ranks(_as_tensor, layout.world, spec, layout, gather, timeout=30)


def _as_tensor(spec, layout, gather):
    model, layer, hidden, weight = _head(spec, layout)
    stock = layer(hidden, weight=weight, runtime_gather_output=gather)[0]
    with head_taken(model, _no_loss):
        lazy, bias = layer(hidden, weight=weight, runtime_gather_output=gather)
        assert bias is None
        _check_facts(lazy, stock)
        for name, operation in AS_TENSOR.items():
            found = operation(copy.copy(lazy), stock)
            assert type(found) is torch.Tensor, name
            expected = operation(stock, stock)
            exact = name != 'scaled'  # one product of two factors
            torch.testing.assert_close(found, expected, rtol=0 if exact else 1e-12, atol=0, msg=name)
            assert found.requires_grad == expected.requires_grad, name


def _check_facts(lazy, stock):
    """What is known without a product."""
    assert isinstance(lazy, LazyLogits)
    for lazily in (
        lambda x: x, lambda x: x.transpose(0, 1), lambda x: x.detach(), lambda x: x.narrow(1, 0, 1),
        lambda x: x.narrow(-2, 1, 1),
    ):  # fmt: skip
        x, y = lazily(lazy), lazily(stock)
        assert (x.shape, x.dtype, x.device, x.requires_grad) == (y.shape, y.dtype, y.device, y.requires_grad)
        assert (x.size(), x.size(-1), x.size(0), x.dim(), x.ndim) == (y.size(), y.size(-1), y.size(0), 3, 3)
        assert x.numel() == y.numel()
        assert isinstance(x.shape, torch.Size)
        assert hash(x) is not None
        assert x._built is None, 'built to tell its shape'


@LAYOUTS
def test_the_gradient_of_built_logits_is_that_of_the_layer(spec, layout):
    run_ranks(_gradient, layout.world, spec, layout, timeout=30)


def _gradient(spec, layout):
    model, layer, hidden, weight = _head(spec, layout)
    leaves = [hidden, layer.weight if weight is None else weight]

    def grads(logits):
        upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5 + dist.get_rank()))
        return torch.autograd.grad((logits.transpose(0, 1) * 0.5).exp(), leaves, upstream.transpose(0, 1).to(hidden))

    stock = layer(hidden, weight=weight)[0]
    with head_taken(model, _no_loss):
        lazy = layer(hidden, weight=weight)[0]
    for found, expected in zip(grads(lazy), grads(stock)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_mups_scale_and_a_transposition_stay_lazy_and_their_statistics_are_exact():
    run_ranks(_scaled, 2, timeout=30)


def _scaled():
    layout = Layout(tp=2, sp=True)
    model, layer, hidden, _ = _head(GPT, layout)
    stock = layer(hidden)[0]
    with head_taken(model, _no_loss):
        lazy = layer(hidden)[0]
    shard = VocabShard.from_group(32, ps.get_tensor_model_parallel_group(), 62)
    target = torch.randint(0, 62, (ROWS, LENGTH), generator=torch.Generator().manual_seed(7))
    forms = {
        'once': (lazy * 0.5, stock * 0.5),
        'from the left': (0.25 * lazy, stock * 0.25),
        'twice': (lazy * 0.5 * 3, stock * 1.5),
        'integer': (lazy * 2, stock * 2),
        'after the logits were built': (_used(lazy) * 0.5, stock * 0.5),
    }
    for name, (found, expected) in forms.items():
        assert isinstance(found, LazyLogits), name
        assert found._built is None, name
        ours, theirs = (
            token_stats(x.transpose(0, 1), target, shard=shard, entropy=True, argmax=True) for x in (found, expected)
        )
        for one, other in ((ours.log_prob, theirs.log_prob), (ours.entropy, theirs.entropy)):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)
        assert torch.equal(ours.argmax, theirs.argmax), name
        torch.testing.assert_close(found.exp(), expected.exp(), rtol=1e-12, atol=1e-12)
    for factor in (0, -1.0, float('inf'), torch.tensor(0.5)):
        assert type(lazy * factor) is torch.Tensor


def _used(lazy):
    lazy.exp()
    return lazy


@contextlib.contextmanager
def _messages():
    """What the package logs inside the block."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    lazy_logits.logger.addHandler(handler)
    try:
        yield found
    finally:
        lazy_logits.logger.removeHandler(handler)


@contextlib.contextmanager
def _products(layer):
    """A list that grows with each run of the layer's own forward."""
    made: list[int] = []
    original = ColumnParallelLinear.forward

    def forward(self, *args, **kwargs):
        made.append(1)
        return original(self, *args, **kwargs)

    ColumnParallelLinear.forward = forward
    try:
        yield made
    finally:
        ColumnParallelLinear.forward = original


def test_logits_are_built_once_and_it_is_said_once():
    run_ranks(_built_once, 1, timeout=30)


def _built_once():
    lazy_logits._say_once.cache_clear()
    model, layer, hidden, _ = _head(GPT, Layout())
    with _messages() as said, _products(layer) as made:
        with head_taken(model, _no_loss):
            first, second = (layer(hidden)[0] for _ in range(2))
        assert (said, made) == ([], [])
        assert first.exp().requires_grad
        assert first.exp().requires_grad
        first.sum()
        assert len(made) == 1
        second.exp()
        assert len(made) == 2
    assert len(said) == 1
    assert '(exp)' in said[0]
    assert "head='linear'" in said[0]


def test_it_does_not_matter_in_which_mode_logits_are_first_asked_for():
    """An accuracy under no_grad, or in inference mode, and then a loss on the same logits: it has its gradient. Logits
    of a layer that was called under no_grad have none, whoever asks."""
    run_ranks(_modes, 1, timeout=30)


def _modes():
    model, layer, hidden, _ = _head(GPT, Layout())
    expected = torch.autograd.grad(layer(hidden)[0].logsumexp(-1).sum(), hidden)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with head_taken(model, _no_loss), _products(layer) as made:
            lazy = layer(hidden)[0]
            with mode():
                assert not lazy.argmax(-1).requires_grad
                assert not lazy.exp().requires_grad
            loss = lazy.logsumexp(-1).sum()
            assert torch.equal(torch.autograd.grad(loss, hidden)[0], expected)
            assert len(made) == 1
            with mode():
                constant = layer(hidden)[0]
        assert not constant.requires_grad
        assert not constant.exp().requires_grad


def test_detached_logits_keep_no_history_and_nobody_elses_product():
    run_ranks(_detached, 1, timeout=30)


def _detached():
    model, layer, hidden, _ = _head(GPT, Layout())
    layer.bias = torch.nn.Parameter(torch.randn(layer.weight.shape[0], dtype=torch.float64, device=device()))
    with head_taken(model, _no_loss):
        lazy = layer(hidden)[0]
    stock = layer(hidden)[0]
    built = lazy.exp()
    constant = lazy.detach()
    assert constant._built is None
    assert torch.equal(constant.exp(), built.detach())
    assert not constant.exp().requires_grad
    assert torch.equal(stock.exp(), built)


WRITES = {
    'method': lambda x: x.mul_(2.0),
    'fill': lambda x: x.zero_(),
    'function': lambda x: torch.relu_(x),
}


def test_logits_cannot_be_written_to():
    """Statistics are found from the hidden states and would not see it."""
    run_ranks(_written, 1, timeout=30)


def _written():
    model, layer, hidden, _ = _head(GPT, Layout())
    with head_taken(model, _no_loss):
        lazy = layer(hidden)[0]
    for write in WRITES.values():
        with pytest.raises(AttributeError, match='cannot be written to'):
            write(lazy)
    with pytest.raises(TypeError, match='assignment'):
        lazy[0] = 0
    with pytest.raises(AttributeError, match='has no attribute'):
        lazy.no_such_thing  # noqa: B018
    with pytest.raises(AttributeError, match='has no attribute'):
        lazy._version  # noqa: B018


def test_a_layer_whose_sequence_parallelism_is_switched_off_for_one_call_is_built_as_called():
    """Megatron's dynamic inference gathers the hidden states itself, calls the layer, and switches it on again."""
    run_ranks(_switched, 2, timeout=30)


def _switched():
    model, layer, _, _ = _head(GPT, Layout(tp=2, sp=True))
    whole = torch.randn(LENGTH, 1, GPT.hidden, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def called():
        layer.sequence_parallel = False
        logits = layer(whole.to(device()), runtime_gather_output=True)[0]
        layer.sequence_parallel = True
        return logits

    stock = called()
    with head_taken(model, _no_loss):
        lazy = called()
    assert lazy.shape == stock.shape == (LENGTH, 1, 64)
    assert torch.equal(lazy.clone(), stock)
    assert layer.sequence_parallel


def test_a_layer_that_gathers_its_output_by_itself_has_the_shape_of_whole_logits():
    run_ranks(_gathering_layer, 2, timeout=30)


def _gathering_layer():
    model, layer, hidden, _ = _head(GPT, Layout(tp=2))
    layer.gather_output = True
    stock = layer(hidden)[0]
    with head_taken(model, _no_loss):
        lazy = layer(hidden)[0]
    assert lazy.shape == stock.shape == (LENGTH, ROWS, 64)
    assert torch.equal(lazy.clone(), stock)


def test_a_taken_head_is_given_back_whatever_happens():
    run_ranks(_given_back, 1, timeout=30)


def _given_back():
    model, ids, positions = _model(GPT, Layout())
    before = dict(vars(model)), dict(vars(model.output_layer))
    stock = model(ids, positions, None)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), head_taken(model, _no_loss):
            raise error
        assert (dict(vars(model)), dict(vars(model.output_layer))) == before
        assert torch.equal(model(ids, positions, None), stock)
    with head_taken(model, _no_loss), pytest.raises(ValueError, match='compute_language_model_loss'):  # noqa: SIM117
        with head_taken(model, _no_loss):
            pass
    assert (dict(vars(model)), dict(vars(model.output_layer))) == before
    check_no_hook([model])


class _Capped(ColumnParallelLinear):
    """As some models cap their logits."""

    def forward(self, *args, **kwargs):
        logits, bias = super().forward(*args, **kwargs)
        return torch.tanh(logits / 30) * 30, bias


def _set(**values):
    def change(model):
        for name, value in values.items():
            setattr(model.output_layer, name, value)

    return change


def _become(kind):
    def change(model):
        model.output_layer.__class__ = kind

    return change


OBSTACLES = {
    'no output layer': (lambda model: delattr(model, 'output_layer'), 'has no output_layer'),
    'another layer': (lambda model: setattr(model, 'output_layer', torch.nn.Linear(2, 2)), 'is Linear, not Megatron'),
    'not the last stage': (lambda model: setattr(model, 'post_process', False), 'has no output_layer'),
    'deferred': (lambda model: setattr(model.config, 'defer_embedding_wgrad_compute', True), 'defer_embedding_wgrad'),
    'a capping layer': (_become(_Capped), '_Capped, has a forward of its own'),
    'a forward on the instance': (_set(forward=lambda x, **kwargs: (x, None)), 'has a forward of its own'),
    'another product': (_set(_forward_impl=lambda **kwargs: None), 'has a _forward_impl of its own'),
    'hooks backward': (lambda m: m.output_layer.register_full_backward_hook(lambda *a: None), 'hooks on its backward'),
    'before backward': (
        lambda m: m.output_layer.register_full_backward_pre_hook(lambda *a: None),
        'hooks on its backward',
    ),
    'bias for the caller': (_set(skip_bias_add=True, bias=torch.nn.Parameter(torch.zeros(64))), 'skip_bias_add'),
    'expert layer': (_set(explicit_expert_comm=True), 'does not sum the gradient'),
    'no sum': (_set(disable_grad_reduce=True), 'does not sum the gradient'),
    'rematerialised': (_set(gtp_remat_size=2), 'does not sum the gradient'),
}


def test_what_keeps_a_head_from_being_taken_is_named():
    run_ranks(_obstacles, 1, timeout=30)


def _obstacles():
    initialize()
    for name, (change, words) in OBSTACLES.items():
        (model,) = build(GPT)
        assert why_no_linear_head(model, model.config) is None
        change(model)
        assert words in (why_no_linear_head(model, model.config) or ''), name


def test_the_buffer_of_a_weight_is_used_where_nobody_else_looks_at_its_gradient():
    run_ranks(_buffers, 1, timeout=30)


def _buffers():
    initialize()
    (chunk,) = wrap(build(GPT))
    weight = unwrapped(chunk).output_layer.weight
    assert lazy_logits.main_grad_of(weight) is weight.main_grad
    assert lazy_logits.main_grad_of(weight.detach()) is None
    handle = weight.register_hook(lambda grad: grad)
    assert lazy_logits.main_grad_of(weight) is None
    handle.remove()
    assert lazy_logits.main_grad_of(weight) is weight.main_grad
    weight.__fsdp_param__ = True
    assert lazy_logits.main_grad_of(weight) is None
    assert lazy_logits.main_grad_of(torch.zeros(2, 2, requires_grad=True)) is None
    assert lazy_logits.main_grad_of(SimpleNamespace(requires_grad=False)) is None
