"""Heads in place of the vocabulary: a causal GPT as a sentence encoder, and as a model of values or rewards.

The chunk stays as it is. While a schedule runs, its output layer hands the hidden states over instead of multiplying
them with the vocabulary; afterwards it is an output layer again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..batch import POOLINGS
from ..batch.targets import WEIGHTS
from ..batch.tokens import sum_over_context
from ..groups import Groups, all_gather_rows, group_rank, group_size, sum_over
from ..seen import Pooled, PooledHead
from ..vocab_parallel import Logits
from ..vocab_parallel.once import once_only
from .heads import has_loss_hook
from .lazy_logits import LazyLogits, main_grad_of

VALUE_HEAD = 'value_head'
"""The attribute of a chunk that holds its value head."""

_AT_ONCE = {'cpu': 1 << 20}
"""Elements of hidden states that are copied into the dtype of sums at a time, by the kind of device."""


class _InPlaceOfLogits(PooledHead):
    def why_not(self, model: Any) -> str | None:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        layer = getattr(model, 'output_layer', None)
        if not isinstance(layer, ColumnParallelLinear) or not has_loss_hook(model):
            return f'the last stage, {type(model).__name__}, has no output layer like that of GPTModel'
        config = getattr(model, 'config', None)
        if 'forward' in vars(layer):
            return f'the output layer, {type(layer).__name__}, has a forward of its own, which would not be called'
        if getattr(config, 'mtp_num_layers', None):
            return 'multi-token prediction trains on the logits of the output layer; build the model without it'
        if getattr(config, 'defer_embedding_wgrad_compute', False):
            return 'config.defer_embedding_wgrad_compute collects the gradients of logits, which never exist'
        return None


class EmbeddingHead(_InPlaceOfLogits):
    """Sentence embeddings `outputs['embeddings']` `[n, H]`: for each sequence the final hidden state of one token, or
    their mean, e = Σ_t w_t·h_t, and with `normalize` e / max(|e|, 1e-12).

    Args:
        pooling: 'last': the last token, which has seen all others; 'mean': the mean over the tokens; 'first'. Padding
            does not count, nor do tokens with `completion_mask` 0.
        normalize: to length 1, so that dot products are cosines.

    Hidden states are `[s, b, H]`, replicated over TP, or under sequence parallelism the sequence shard `[s/tp, b, H]`;
    sequences may be padded on either side, packed, and split over context parallel ranks. The embeddings are float32
    (float64 of float64), the same on all TP and CP ranks. The gradient of the hidden states is whole on each TP rank
    that holds them, as Megatron wants it: nothing is summed over TP on the way back. A loss divides by the context
    parallel size, as every rank has all sequences.

    Collectives: under sequence parallelism one all-reduce of `[n, H]` over TP; one over CP, and one on the way back;
    and one broadcast over TP in each direction, which keeps replicas alike to the bit. Kept for backward: `[n, H]`, and
    two numbers a token.

    The output layer, and a value head, get a gradient of zeros, as Megatron wants one for every parameter: weight decay
    and the optimizer's momentum still move them. Freeze them (`requires_grad_(False)` before the chunk is wrapped)
    where they are to stay as they are.
    """

    gives = 'embeddings'

    def __init__(self, pooling: str = 'last', normalize: bool = True) -> None:
        self.pooling = _checked_pooling(pooling)
        if not isinstance(normalize, bool):
            raise ValueError(f'normalize must be True or False, got {normalize!r}')
        self.normalize = normalize

    def read(self, model: Any, logits: Logits, batch: dict[str, Any], groups: Groups) -> Pooled:
        head = _not_built(logits)
        weights, numbers, count = _of_tokens(head, batch, groups.tp)
        pooled = _Pool.apply(head.hidden.flatten(0, -2), weights, numbers, count)
        pooled = _over_tensor(_without_product(pooled, head), groups.tp, split=head.sequence_parallel)
        pooled = _own(sum_over_context(pooled, groups.cp), batch)
        return Pooled(self.gives, F.normalize(pooled, dim=-1) if self.normalize else pooled, per_token=False)

    def __repr__(self) -> str:
        return f'EmbeddingHead(pooling={self.pooling!r}, normalize={self.normalize})'


class ScalarHead(_InPlaceOfLogits):
    """One number for each token, or each sequence, `outputs['values']`: v = w·h + b, of a value or a reward model.

    Args:
        pooling: None: a value for each token, `[b, s]`. 'last', 'mean', 'first': one for each sequence, `[n]`, that of
            the last or the first token, or their mean; see `EmbeddingHead`.

    w and b are those of the chunk's value head, which `add_value_head` makes. Values are float32 (float64 of float64),
    the same on all TP ranks; per token they are split over CP as the tokens are, pooled they are the same on all CP
    ranks. Collectives: over TP one broadcast of a number a token in each direction (under sequence parallelism one
    all-gather in place of the first); pooled one all-reduce over CP in each direction. Kept for backward: nothing but
    the hidden states.
    """

    gives = 'values'

    def __init__(self, pooling: str | None = None) -> None:
        self.pooling = None if pooling is None else _checked_pooling(pooling)

    def read(self, model: Any, logits: Logits, batch: dict[str, Any], groups: Groups) -> Pooled:
        head = _not_built(logits)
        values = _without_product(getattr(model, VALUE_HEAD)(head.hidden), head)  # [s, b], or the shard of it
        if head.sequence_parallel and group_size(groups.tp) > 1:
            values = _Gathered.apply(values, groups.tp)
        else:
            values = _over_tensor(values, groups.tp, split=False)
        values = values.t()
        if self.pooling is None:
            return Pooled(self.gives, values, per_token=True)
        weights = _pool_weights(batch).to(values.dtype)
        counted = torch.where(weights != 0, values, 0) * weights
        count = _sequences(batch)
        total = values.new_zeros(count).index_add(0, _numbers(batch).reshape(-1), counted.reshape(-1))
        return Pooled(self.gives, _own(sum_over_context(total, groups.cp), batch), per_token=False)

    def check_targets(self, targets: Tensor) -> None:
        if self.pooling is not None and targets.dim() != 1:
            raise ValueError(
                f'must be one number for each sequence, as {self!r} gives, got shape {tuple(targets.shape)}; for a '
                'number a token leave the pooling out: ScalarHead()'
            )

    def why_not(self, model: Any) -> str | None:
        if not isinstance(getattr(model, VALUE_HEAD, None), ValueHead):
            return (
                'the last stage has no value head: call twinkle_megatron.megatron.embedding.add_value_head(gpt) before '
                'the chunk is wrapped in DistributedDataParallel and before the optimizer is made'
            )
        return super().why_not(model)

    def __repr__(self) -> str:
        return f'ScalarHead(pooling={self.pooling!r})'


class ValueHead(torch.nn.Module):
    """v = w·h + b over the last dim of hidden states, in float32 (float64 of float64): `[..., H]` to `[...]`."""

    def __init__(self, width: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, width, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=device)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        values = _Dot.apply(hidden.flatten(0, -2), self.weight).view(hidden.shape[:-1])
        return values if self.bias is None else values + self.bias.to(values.dtype)


def add_value_head(chunks: Any, *, bias: bool = True, std: float = 0.0, seed: int = 0) -> None:
    """Gives a GPT a value head, of which `ScalarHead` makes values: a weight `[1, H]`, and a bias.

    Call it on this rank's bare chunk, or all of them, before they are wrapped in Float16Module and
    DistributedDataParallel and before the optimizer is made, on every rank: stages without an output layer stay as they
    are. It is replicated over TP; under sequence parallelism Megatron sums its gradient over TP, as that of a norm.

    Args:
        bias: whether there is one.
        std: of the normal distribution that the weight is drawn from, the same on every rank and layout; 0: zeros.
        seed: of that.
    """
    for model in chunks if isinstance(chunks, Iterable) and not isinstance(chunks, torch.nn.Module) else [chunks]:
        if not isinstance(model, torch.nn.Module) or not hasattr(model, 'config') or hasattr(model, 'module'):
            raise ValueError(
                f'add_value_head needs the bare GPTModel, before it is wrapped, got {type(model).__name__}'
            )
        if VALUE_HEAD in dict(model.named_children()):
            raise ValueError('the chunk has a value head already')
        if not getattr(model, 'post_process', True):
            continue
        some = next(model.parameters())
        config: Any = model.config
        head = ValueHead(config.hidden_size, bias, some.dtype, some.device)
        if std > 0:
            drawn = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            head.weight.data.copy_(drawn * std)
        for parameter in head.parameters():
            parameter.sequence_parallel = bool(config.sequence_parallel)  # type: ignore[attr-defined]
        setattr(model, VALUE_HEAD, head)


def _checked_pooling(pooling: Any) -> str:
    if pooling not in POOLINGS:
        raise ValueError(f'pooling must be one of {", ".join(map(repr, POOLINGS))}, got {pooling!r}')
    return pooling


def _not_built(logits: Logits) -> LazyLogits:
    if not isinstance(logits, LazyLogits):
        raise ValueError(f'a head needs the hidden states that go into the output layer, got {type(logits).__name__}')
    return logits


def _sequences(batch: dict[str, Any]) -> int:
    """At least one: the tokens of rows that a schedule has added count to the first, with a weight of 0."""
    tokens = batch.get('sequence_tokens')
    return 1 if tokens is None else max(1, int(tokens.numel()))


def _own(pooled: Tensor, batch: dict[str, Any]) -> Tensor:
    """Without the sequence that a micro-batch without any was given."""
    tokens = batch.get('sequence_tokens')
    return pooled if tokens is None or tokens.numel() else pooled[:0]


def _pool_weights(batch: dict[str, Any]) -> Tensor:
    weights = batch.get(WEIGHTS)
    return torch.zeros(batch['input_ids'].shape, device=batch['input_ids'].device) if weights is None else weights


def _numbers(batch: dict[str, Any]) -> Tensor:
    numbers = batch.get('sequence_ids')
    return torch.zeros_like(batch['input_ids']) if numbers is None else numbers


def _of_tokens(head: LazyLogits, batch: dict[str, Any], tp: ProcessGroup | None) -> tuple[Tensor, Tensor, int]:
    """Weights and sequence numbers of the tokens of `head.hidden`, `[tokens]` each, and how many sequences there
    are."""
    of_tokens = [x.t() for x in (_pool_weights(batch), _numbers(batch))]  # hidden states are [s, b, H]
    if head.sequence_parallel:
        mine = head.hidden.shape[0]
        of_tokens = [x[group_rank(tp) * mine :][:mine] for x in of_tokens]
    weights, numbers = (x.reshape(-1) for x in of_tokens)
    return weights, numbers, _sequences(batch)


def _sums_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Pool(torch.autograd.Function):
    """Σ over the tokens of each sequence of weight · hidden state: `[tokens, H]` to `[n, H]`, in float32 at least.

    Tokens of weight 0 are not read. Only some rows at a time are copied into the dtype of the sums.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, numbers: Tensor, count: int) -> Tensor:
        weights = weights.to(_sums_dtype(hidden.dtype))
        ctx.save_for_backward(weights, numbers)
        ctx.like = hidden.shape, hidden.dtype, hidden.device
        out = hidden.new_zeros((count, hidden.shape[1]), dtype=weights.dtype)
        for part, weight, number in _in_parts(hidden, weights, numbers):
            term = part.to(out.dtype) * weight[:, None]
            out.index_add_(0, number, term.masked_fill_(weight[:, None] == 0, 0))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, numbers = ctx.saved_tensors
        (grad,) = grads
        shape, dtype, device = ctx.like
        out = torch.empty(shape, dtype=dtype, device=device)
        for part, weight, number in _in_parts(out, weights, numbers):
            part.copy_(grad[number] * weight[:, None])
        (out,) = once_only([out], [grad])
        return out, None, None, None


class _Dot(torch.autograd.Function):
    """hidden `[tokens, H]` · weight `[1, H]`, in float32 at least, without a copy of all hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        dtype = _sums_dtype(hidden.dtype)
        out = hidden.new_empty(len(hidden), dtype=dtype)
        for part, there in _in_parts(hidden, out):
            torch.mv(part.to(dtype), weight[0].to(dtype), out=there)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        (grad,) = grads
        dtype = grad.dtype
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = weight.new_zeros(weight.shape[1], dtype=dtype) if ctx.needs_input_grad[1] else None
        if d_hidden is not None:
            for part, upstream in _in_parts(d_hidden, grad):
                part.copy_(upstream[:, None] * weight.to(dtype))
        if d_weight is not None:
            for part, upstream in _in_parts(hidden, grad):
                d_weight += torch.mv(part.to(dtype).t(), upstream)
        given = [d_hidden, None if d_weight is None else d_weight[None].to(weight.dtype)]
        return once_only(given, [grad, hidden, weight])


def _in_parts(hidden: Tensor, *along: Tensor) -> Iterable[tuple[Tensor, ...]]:
    rows = max(1, _AT_ONCE.get(hidden.device.type, 1 << 24) // max(1, hidden.shape[1]))
    return zip(*(x.split(rows) for x in (hidden, *along)))


def _over_tensor(x: Tensor, tp: ProcessGroup | None, split: bool) -> Tensor:
    """Of what every tensor parallel rank has, or where `split` a part of, the whole."""
    return _OverTensor.apply(x, tp, split) if group_size(tp) > 1 else x


class _OverTensor(torch.autograd.Function):
    """Each tensor parallel rank goes on with the same loss, so the gradient is whole on each of them. Values and
    gradient are those of the first one, for all of them the same to the bit: sums on a GPU may differ in the last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ProcessGroup, split: bool) -> Tensor:
        ctx.tp = tp
        return sum_over(x.detach().clone(), tp) if split else _from_first(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *once_only([_from_first(grads[0], ctx.tp)], grads), None, None


class _Gathered(torch.autograd.Function):
    """The shards of a sequence `[s/tp, b]` as a whole, `[s, b]`; back goes each rank's slice of the first one's
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ProcessGroup) -> Tensor:
        ctx.tp = tp
        return all_gather_rows(x, tp).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mine = _from_first(grads[0], ctx.tp).chunk(group_size(ctx.tp))[group_rank(ctx.tp)]
        return *once_only([mine], grads), None


def _from_first(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(out, src=dist.get_global_rank(group, 0), group=group)
    return out


def value_head_of(model: Any) -> list[torch.nn.Parameter]:
    """The parameters of this unwrapped chunk's value head."""
    head = getattr(model, VALUE_HEAD, None)
    return list(head.parameters()) if isinstance(head, ValueHead) else []


def idle_parameters(model: Any, head: PooledHead | None) -> list[Tensor]:
    """Parameters of the last stage's value head, where something else is trained: Megatron's DDP waits for their
    gradients."""
    if isinstance(head, ScalarHead):
        return []
    return [p for p in value_head_of(model) if p.requires_grad and hasattr(p, 'main_grad')]


def _without_product(x: Tensor, head: LazyLogits) -> Tensor:
    """`x`, with a gradient of nothing for the parameters of the output layer: Megatron's hooks on them, which wait for
    the gradients of all parameters, run as ever."""
    _, *parameters = head.tensors
    waiting = [p for p in parameters if p.requires_grad and hasattr(p, 'main_grad')]
    return _Unused.apply(x, *waiting) if waiting and torch.is_grad_enabled() else x


class _Unused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        kinds = [torch.strided if main_grad_of(p) is None else torch.sparse_coo for p in parameters]
        ctx.like = [(p.shape, p.dtype, p.device, kind) for p, kind in zip(parameters, kinds)]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [torch.zeros(s, dtype=t, device=d, layout=kind) for s, t, d, kind in ctx.like]
        return grads[0], *zeros
