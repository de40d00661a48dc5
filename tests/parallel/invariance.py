"""One global batch under any layout and split, beside the plain float64 formula in one process.

A case cuts the same samples into data parallel replicas and micro-batches in its own way, trains one
`forward_backward` on a tiny real Megatron GPT, and returns the loss, every parameter's gradient, the log-probs and the
metrics. The reference runs the whole batch through the same GPT in one process and writes the formulas out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gradients import Part, collect_grads
from ranks import device, run_ranks
from tiny_gpt import Layout, Spec, build, initialize, unwrapped, wrap

from twinkle_megatron import MegatronModel
from twinkle_megatron.metric import Accuracy, LossMetric

LENGTH = 16
KEPT = (14, 1, 0, 9, 16, 2, 0, 5)
"""Trained tokens of each of the eight samples: very unequal, and two samples without any."""


@dataclass(frozen=True)
class Split:
    """Which samples each data parallel replica has in each of its micro-batches."""

    name: str
    replicas: tuple[tuple[tuple[int, ...], ...], ...]

    def __str__(self) -> str:
        return self.name


def even(dp: int, micro_batches: int) -> Split:
    """The eight samples in order, in equal shares. With dp 4 one micro-batch holds sample 2 only, without a trained
    token."""
    size = 8 // (dp * micro_batches)
    starts = [[(r * micro_batches + m) * size for m in range(micro_batches)] for r in range(dp)]
    return Split(f'mb{micro_batches}', tuple(tuple(tuple(range(s, s + size)) for s in row) for row in starts))


UNEVEN = {
    1: Split('uneven', (((0, 1, 2), (6,), (3, 4, 5, 7)),)),
    2: Split('uneven', (((0, 1), (2, 6), (3,)), ((4, 5, 7),))),  # 3 and 1 micro-batches, one of them all ignored
    4: Split('uneven', (((0, 1, 3), (7,)), ((2, 6),), ((4,),), ((5,),))),  # a replica without trained tokens
}
EMPTY_RANK = Split('empty', (((0, 1, 2, 3), (4, 5, 6, 7)), ()))
"""A replica without any data, dp 2."""


def samples(spec: Spec, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """The global batch, one sample `[LENGTH]` each, labels shifted."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for kept in KEPT:
        ids = torch.randint(0, spec.vocab_size, (LENGTH + 1,), generator=generator)
        labels = ids[1:].clone()
        labels[torch.randperm(LENGTH, generator=generator)[kept:]] = -100
        out.append({'input_ids': ids[:-1].clone(), 'labels': labels})
    return out


def micro_batches(spec: Spec, split: Split, replica: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of one replica, `[b, LENGTH]`."""
    whole = samples(spec, seed)
    return [{key: torch.stack([whole[i][key] for i in at]) for key in whole[0]} for at in split.replicas[replica]]


@dataclass(frozen=True)
class Result:
    """What one rank, or the reference, found."""

    loss: float
    grads: dict[str, Part]
    metrics: dict[str, Any]
    logps: list[torch.Tensor]


def train_once(
    spec: Spec,
    layout: Layout,
    split: Split,
    loss: str = 'ChunkedCrossEntropyLoss',
    init: dict | None = None,
    ddp: dict | None = None,
    **model_arguments: Any,
) -> Result:
    """On every rank: one forward-backward of this rank's replica."""
    model = model_on(spec, layout, loss, init, ddp, **model_arguments)
    batches = micro_batches(spec, split, dist.get_rank(model.groups.dp))
    before = [{k: v.clone() for k, v in batch.items()} for batch in batches]
    out = model.forward_backward(inputs=batches)
    for batch, old in zip(batches, before):
        assert batch.keys() == old.keys()
        assert all(torch.equal(batch[k], old[k]) for k in old), 'the inputs were written to'
    values = model.metric_values()
    return Result(
        out['loss'], collect_grads(model.chunks), {**model.calculate_metric(), 'values': values}, out['logps']
    )


def model_on(
    spec: Spec,
    layout: Layout,
    loss: Any = 'ChunkedCrossEntropyLoss',
    init: dict | None = None,
    ddp: dict | None = None,
    **model_arguments: Any,
) -> MegatronModel:
    """Megatron, the tiny GPT and a MegatronModel with the loss and two metrics, on this rank."""
    initialize(layout)
    chunks = wrap(build(spec, layout), **(ddp or {}))
    model = MegatronModel(chunks, vocab_size=spec.vocab_size, **model_arguments)
    model.set_loss(loss, **(init or {}))
    model.add_metric(LossMetric)
    model.add_metric(Accuracy)
    return model


def formula(logits: torch.Tensor, labels: torch.Tensor, init: dict) -> torch.Tensor:
    """The mean loss over trained tokens, plainly, in the dtype of the logits `[n, V]`."""
    logits, labels = logits[labels != -100], labels[labels != -100]
    smoothing, z_loss = init.get('label_smoothing', 0.0), init.get('z_loss', 0.0)
    nll = F.cross_entropy(logits, labels, reduction='none')
    if init.get('dft'):
        nll = nll * (-nll).exp().detach()
    if smoothing:
        nll = (1 - smoothing) * nll + smoothing * -logits.log_softmax(-1).mean(-1)
    return (nll + z_loss * logits.logsumexp(-1) ** 2).mean()


_references: dict[str, Result] = {}


def reference(spec: Spec, init: dict[str, Any]) -> Result:
    """The whole batch in one process in float64, without this package. Computed once for each spec and loss."""
    key = repr((spec, init))
    if key not in _references:
        _references[key] = run_ranks(_reference, 1, spec, init)[0]
    return _references[key]


def _reference(spec: Spec, init: dict) -> Result:
    initialize(Layout())
    (chunk,) = build(spec)
    whole = samples(spec)
    ids = torch.stack([s['input_ids'] for s in whole]).to(device())
    labels = torch.stack([s['labels'] for s in whole]).to(device())
    positions = torch.arange(LENGTH, device=device()).expand(len(whole), LENGTH)
    logits = chunk(ids, positions, None)[..., : spec.vocab_size]
    loss = formula(logits.flatten(0, 1), labels.flatten(), init)
    loss.backward()
    trained = labels != -100
    logps = torch.where(trained, logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0], 0)
    correct = int(((logits.argmax(-1) == labels) & trained).sum())
    metrics = {'loss': f'{loss.item():.4f}', 'correct_tokens': correct, 'total_tokens': int(trained.sum())}
    return Result(loss.item(), collect_grads([unwrapped(chunk)]), metrics, [logps.detach()])
