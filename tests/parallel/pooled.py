"""Losses of embeddings and of values on one global batch under any layout, padded on either side or packed, beside
their plain float64 formulas in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cover import SEQUENCE_FACTORS, SequenceCase, settings_of
from gradients import Part, collect_grads
from invariance import Result, Split
from ranks import device, run_ranks
from tiny_gpt import Layout, Spec, build, initialize, unwrapped, wrap

from twinkle_megatron import EmbeddingHead, MegatronModel, ScalarHead
from twinkle_megatron.megatron.embedding import add_value_head
from twinkle_megatron.metric import EmbeddingMetric, LossMetric

LENGTH = 16
GROUPS = ((LENGTH, 5, 9), (12, LENGTH), (7, 9, 3, 6), (4, 11, 8), (10, 7), (13, LENGTH, 1, 2))
"""Tokens of the sequences of each of the six groups: an anchor, its positive, and some negatives."""

ALL = tuple(range(6))
SPLITS: dict[tuple[str, int], Split] = {
    (name, len(replicas)): Split(name, replicas)
    for name, replicas in (
        ('one', ((ALL,),)),
        ('ones', (((0,), (1,), (2,), (3,), (4,), (5,)),)),
        ('uneven', (((0, 1), (3,), (2, 4, 5)),)),
        ('one', ((ALL[:2],), (ALL[2:],))),
        ('ones', (((0,), (1,), (2,)), ((3,), (4,), (5,)))),
        ('uneven', (((0, 1, 2), (3,)), ((4, 5),))),
        ('empty', (((0, 1, 2), (3,), (4, 5)), ())),
        ('one', ((ALL[:1],), (ALL[1:3],), (ALL[3:5],), (ALL[5:],))),
        ('uneven', (((0, 1), (2,)), ((3,),), (), ((4,), (5,)))),
    )
}
"""Which groups each replica has in each of its micro-batches, by name and dp."""


@dataclass(frozen=True)
class Kind:
    """A loss, what it is given, and the head. `labels`: 'starts', or numbers per 'sequence' or per 'token'."""

    loss: str
    head: Any
    labels: str
    init: dict[str, Any]


KINDS = {
    'plain': Kind('InfonceLoss', EmbeddingHead(), 'starts', {'temperature': 0.2}),
    'blocks': Kind(
        'InfonceLoss',
        EmbeddingHead('mean'),
        'starts',
        {'include_qq': True, 'include_dd': True, 'mask_fake_negative': True, 'fake_neg_margin': 0.02},
    ),
    'own': Kind('InfonceLoss', EmbeddingHead('first', normalize=False), 'starts', {'use_batch': False}),
    'reward': Kind('MSELoss', ScalarHead('last'), 'sequence', {}),
    'mean reward': Kind('MSELoss', ScalarHead('mean'), 'sequence', {'ignore_index': None}),
    'value': Kind('MSELoss', ScalarHead(), 'token', {'ignore_index': -7}),
}

SIDES = ('right', 'left', 'packed')


@dataclass(frozen=True, kw_only=True)
class Case(SequenceCase):
    """`side` is where the padding is; 'packed': there is none."""

    side: str = 'right'

    @property
    def cut(self) -> Split:
        return SPLITS[self.split, self.dp]

    def __str__(self) -> str:
        return f'{super().__str__()}-{self.side}'


def _case(settings: dict[str, Any], number: int) -> Case:
    return Case(**settings, packed=settings['side'] == 'packed', head='pooled', per_token=bool(number & 64))


FACTORS = {key: values for key, values in SEQUENCE_FACTORS.items() if key not in ('packed', 'head', 'split')}
EVERY = [
    case
    for settings, number in settings_of(FACTORS | {'side': SIDES, 'split': ('one', 'ones', 'uneven', 'empty')})
    if (case := _case(settings, number)).possible
]

Sample = dict[str, torch.Tensor]


def samples(spec: Spec, seed: int = 5) -> list[list[Sample]]:
    """The global batch by groups: ids of each sequence, a number for it, a number for each token, and which do not
    count."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for group in GROUPS:
        mine = []
        for i, length in enumerate(group):
            ids = torch.randint(0, spec.vocab_size, (length,), generator=generator)
            per_token = torch.randn(length, generator=generator, dtype=torch.float64)
            per_token[torch.rand(length, generator=generator) < 0.3] = -7
            per_sequence = torch.randn((), generator=generator, dtype=torch.float64)
            mine.append(
                {'input_ids': ids, 'token': per_token, 'sequence': per_sequence, 'starts': torch.tensor(i == 0)}
            )
        out.append(mine)
    out[2][1]['sequence'] = torch.tensor(-100.0, dtype=torch.float64)
    return out


def micro_batches(spec: Spec, split: Split, replica: int, side: str, labels: str) -> list[dict[str, torch.Tensor]]:
    """Of one replica: rows `[b, LENGTH]`, or packed rows `[1, T]`."""
    whole, out = samples(spec), []
    for at in split.replicas[replica]:
        sequences = [one for i in at for one in whole[i]]
        lengths = [len(one['input_ids']) for one in sequences]
        batch = {}
        if side == 'packed':
            batch['input_ids'] = torch.cat([one['input_ids'] for one in sequences])[None]
            batch['position_ids'] = torch.cat([torch.arange(n) for n in lengths])[None]
            batch['labels'] = torch.cat([one['token'] for one in sequences])[None]
        else:
            where = [slice(LENGTH - n, None) if side == 'left' else slice(n) for n in lengths]
            for key, of, fill in (('input_ids', 'input_ids', 1), ('labels', 'token', math.nan)):
                batch[key] = sequences[0][of].new_full((len(sequences), LENGTH), fill)
                for row, place, one in zip(batch[key], where, sequences):
                    row[place] = one[of]
            batch['attention_mask'] = torch.zeros(len(sequences), LENGTH, dtype=torch.int64)
            for row, place in zip(batch['attention_mask'], where):
                row[place] = 1
        if labels == 'starts':
            batch['labels'] = torch.tensor([int(one['starts']) for one in sequences])
        elif labels == 'sequence':
            batch['labels'] = torch.stack([one['sequence'] for one in sequences])
        out.append(batch)
    return out


def gpt(spec: Spec, layout: Layout, per_token: bool) -> list[Any]:
    """Bare chunks with a value head whose weights do not depend on the layout."""
    spec = Spec(**{**vars(spec), 'config': {**spec.config, 'calculate_per_token_loss': per_token}})
    chunks = build(spec, layout)
    add_value_head(chunks, std=0.3, seed=2)
    for chunk in chunks:
        if chunk.post_process:
            chunk.value_head.bias.data.fill_(0.1)
    return chunks


def train(
    spec: Spec, layout: Layout, split: Split, side: str, per_token: bool = True, kinds: Sequence[str] = tuple(KINDS)
) -> dict[str, Result]:
    """On every rank: for each kind of loss one forward-backward of this rank's replica, with its metrics."""
    initialize(layout)
    model = MegatronModel(wrap(gpt(spec, layout, per_token)), vocab_size=spec.vocab_size)
    replica, results = dist.get_rank(model.groups.dp), {}
    for name in kinds:
        kind = KINDS[name]
        model.zero_grad()
        model.set_head(kind.head)
        model.set_loss(kind.loss, **kind.init)
        model.set_metric(LossMetric, is_training=True)
        if kind.labels == 'starts':
            model.add_metric(EmbeddingMetric, is_training=True)
        out = model.forward_backward(micro_batches(spec, split, replica, side, kind.labels))
        results[name] = Result(out['loss'], collect_grads(model.chunks), model.metric_values(), out[kind.head.gives])
        model.calculate_metric()
    return results


_references: dict[str, dict[str, Result]] = {}


def reference(spec: Spec) -> dict[str, Result]:
    """The batch in one process in float64, without this package, for each kind. Computed once."""
    key = repr(spec)
    if key not in _references:
        _references[key] = run_ranks(_reference, 1, spec)[0]
    return _references[key]


def _reference(spec: Spec) -> dict[str, Result]:
    initialize(Layout())
    (chunk,) = gpt(spec, Layout(), True)
    groups = samples(spec)
    results = {}
    for name, kind in KINDS.items():
        chunk.zero_grad()
        found = [[_head(chunk, kind.head, _hidden(chunk, one['input_ids'])) for one in group] for group in groups]
        loss = _loss(kind, found, groups)
        loss.backward()
        metrics = {'loss': loss.item()}
        if kind.labels == 'starts':
            metrics |= cosines([group[0].detach() for group in found], [group[1].detach() for group in found])
        unused = {n: Part(torch.zeros_like(p)) for n, p in unwrapped(chunk).named_parameters()}  # DDP has zeros there
        grads = unused | collect_grads([unwrapped(chunk)])
        results[name] = Result(loss.item(), grads, metrics, [x.detach() for group in found for x in group])
    return results


def _hidden(chunk: Any, ids: torch.Tensor) -> torch.Tensor:
    """What goes into the output layer for one sequence, `[s, H]`."""
    kept = []
    handle = chunk.output_layer.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    chunk(ids[None].to(device()), torch.arange(len(ids), device=device())[None], None)
    handle.remove()
    return kept[0][:, 0]


def _head(chunk: Any, head: Any, hidden: torch.Tensor) -> torch.Tensor:
    if isinstance(head, ScalarHead):
        hidden = hidden @ chunk.value_head.weight[0] + chunk.value_head.bias
    pooled = {None: hidden, 'last': hidden[-1], 'first': hidden[0], 'mean': hidden.mean(0)}[head.pooling]
    return pooled / pooled.norm() if getattr(head, 'normalize', False) else pooled


def _loss(kind: Kind, found: list[list[torch.Tensor]], groups: list[list[Sample]]) -> torch.Tensor:
    if kind.loss == 'InfonceLoss':
        return infonce(found, **kind.init)
    squares = []
    for values, sequences in zip(found, groups):
        for value, one in zip(values, sequences):
            label = one[kind.labels].to(value)
            ignored = kind.init.get('ignore_index', -100)
            counted = label == label if ignored is None else label != ignored
            squares.append((value - label)[counted] ** 2)
    return torch.cat([x.reshape(-1) for x in squares]).mean()


def infonce(
    groups: list[list[torch.Tensor]],
    temperature: float = 0.1,
    use_batch: bool = True,
    mask_fake_negative: bool = False,
    fake_neg_margin: float = 0.1,
    include_qq: bool = False,
    include_dd: bool = False,
) -> torch.Tensor:
    """Term by term."""
    losses = []
    for i, (anchor, positive, *_) in enumerate(groups):
        own = (anchor @ positive).detach()
        terms = []
        for j, (other, *documents) in enumerate(groups):
            for k, document in enumerate(documents):
                score = anchor @ document
                fake = mask_fake_negative and score.item() > own.item() + fake_neg_margin
                if (use_batch or i == j) and not fake:
                    terms.append(score)
                if include_dd and (i, 0) != (j, k):
                    terms.append(positive @ document)
            score = anchor @ other
            if include_qq and i != j and not (mask_fake_negative and score.item() > own.item() + fake_neg_margin):
                terms.append(score)
        losses.append((torch.stack(terms) / temperature).logsumexp(0) - anchor @ positive / temperature)
    return torch.stack(losses).mean()


def cosines(anchors: list[torch.Tensor], positives: list[torch.Tensor]) -> dict[str, float]:
    """What EmbeddingMetric says, pair by pair."""
    of = [[float(torch.cosine_similarity(a, p, dim=0)) for p in positives] for a in anchors]
    own = [of[i][i] for i in range(len(of))]
    others = [of[i][j] for i in range(len(of)) for j in range(len(of)) if i != j]
    return {
        'pos_sim': sum(own) / len(own),
        'pos_sim_min': min(own),
        'pos_sim_max': max(own),
        'neg_sim': sum(others) / len(others),
    }
