"""The samples, and what losses and metrics of them are: written plainly, in float64, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from gradients import Part, collect_grads
from tiny_gpt import Layout, Spec, build, initialize, unwrapped

from tests import distillation_formulas, policy_formulas, preference_formulas
from tests.policy_formulas import Response
from tests.preference_formulas import Pair

SPEC = Spec(vocab_size=64, layers=2, hidden=16, heads=2, max_length=32)
LENGTHS = (16, 5, 7, 15, 12, 9, 3, 11)
KEPT = (13, 2, 0, 9, 0, 0, 2, 6)
"""Trained tokens of each sample: the two halves of the batch differ in tokens, sequences and pairs that count."""
SIZE = 4
"""Samples of a micro-batch."""


def samples(lengths: Sequence[int] = LENGTHS, kept: Sequence[int] = KEPT) -> list[dict[str, torch.Tensor]]:
    """As Twinkle's templates make them, labels shifted."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for length, trained in zip(lengths, kept):
        ids = torch.randint(0, SPEC.vocab_size, (length + 1,), generator=generator)
        labels = ids[1:].clone()
        labels[torch.randperm(length, generator=generator)[trained:]] = -100
        out.append({
            'input_ids': ids[:-1].clone(), 'labels': labels, 'position_ids': torch.arange(length),
            'attention_mask': torch.ones(length, dtype=torch.long),
        })  # fmt: skip
    return out


def extras() -> dict[str, list[Any]]:
    """Of each sample: for its trained tokens alone, or for all of them."""
    generator = torch.Generator().manual_seed(5)

    def near(count: int) -> torch.Tensor:
        return -4.2 + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64)

    teacher = [torch.randn(n, SPEC.vocab_size, generator=generator, dtype=torch.float64) for n in LENGTHS]
    best = [logits.log_softmax(-1).topk(5, -1) for logits in teacher]
    return {
        'old_logps': [near(n) for n in KEPT],
        'ref_logps': [near(n) for n in KEPT],
        'advantages': torch.randn(8, generator=generator).tolist(),
        'teacher_logits': teacher,
        'teacher_topk_logprobs': [found.values for found in best],
        'teacher_topk_indices': [found.indices for found in best],
    }


@dataclass(frozen=True)
class Found:
    """Of each sample, with a history: logits `[L, V]`, the last hidden state; labels."""

    logits: list[torch.Tensor]
    last: list[torch.Tensor]
    labels: list[torch.Tensor]

    def new(self, i: int, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs of the trained tokens."""
        at = self.labels[i] != -100
        return (self.logits[i][at] / temperature).log_softmax(-1).gather(-1, self.labels[i][at][:, None])[:, 0]


Formula = Callable[[Found, Sequence[int]], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """`keys` are the keywords of the call. `exact`: the mean is that of the global batch; else that of the losses of
    the micro-batches, as Twinkle weighs them."""

    loss: str
    formula: Formula
    init: dict[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    exact: bool = True
    task: str = 'causal_lm'

    def __str__(self) -> str:
        return '-'.join([self.loss, *map(str, self.init.values())])


def token_mean(found: Found, which: Sequence[int], smoothing: float = 0.0, z: float = 0.0) -> torch.Tensor:
    logits = torch.cat([found.logits[i][found.labels[i] != -100] for i in which])
    labels = torch.cat([found.labels[i][found.labels[i] != -100] for i in which])
    nll = F.cross_entropy(logits, labels, reduction='none')
    nll = (1 - smoothing) * nll - smoothing * logits.log_softmax(-1).mean(-1)
    return (nll + z * logits.logsumexp(-1) ** 2).mean()


def policy(loss: str, init: dict[str, Any]) -> Case:
    def formula(found: Found, which: Sequence[int]) -> torch.Tensor:
        return policy_formulas.loss_of(loss, init, responses(found, which, init.get('temperature', 1.0)))

    return Case(loss, formula, init, ('old_logps', 'ref_logps', 'advantages'))


def responses(found: Found, which: Sequence[int], temperature: float = 1.0) -> list[Response]:
    given, out = extras(), []
    for i in which:
        logp = (found.logits[i][found.labels[i] != -100] / temperature).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        advantage = torch.tensor(given['advantages'][i], dtype=torch.float64)
        old, ref = given['old_logps'][i], given['ref_logps'][i]
        out.append(Response(found.new(i, temperature), old, ref, advantage, entropy, found.new(i).detach()))
    return out


def preference(loss: str, init: dict[str, Any], exact: bool) -> Case:
    def formula(found: Found, which: Sequence[int]) -> torch.Tensor:
        return preference_formulas.loss_of(loss, init, pairs(found, which))

    return Case(loss, formula, init, ('ref_logps',) if loss == 'DPOLoss' else (), exact)


def pairs(found: Found, which: Sequence[int]) -> list[Pair]:
    ref = extras()['ref_logps']
    return [Pair(found.new(i), found.new(j), ref[i], ref[j]) for i, j in zip(which[::2], which[1::2])]


def distilled(found: Found, which: Sequence[int]) -> torch.Tensor:
    teacher = extras()['teacher_logits']
    each = [distillation_formulas.full(found.logits[i], teacher[i], 0.3)[found.labels[i] != -100] for i in which]
    return torch.cat(each).mean()


def distilled_remotely(found: Found, which: Sequence[int]) -> torch.Tensor:
    given = extras()
    each = [
        distillation_formulas.remote(
            found.logits[i], given['teacher_topk_logprobs'][i], given['teacher_topk_indices'][i], 'renormalize', 0.3
        )[found.labels[i] != -100]
        for i in which
    ]
    return torch.cat(each).mean()


def contrasted(found: Found, which: Sequence[int]) -> torch.Tensor:
    rows = torch.stack([F.normalize(found.last[i], dim=0) for i in which])
    return F.cross_entropy(rows[::2] @ rows[1::2].T / 0.1, torch.arange(len(which) // 2))


def squared(found: Found, which: Sequence[int]) -> torch.Tensor:
    values = torch.cat([found.logits[i][found.labels[i] != -100, 0] for i in which])
    return F.mse_loss(values, torch.cat([found.labels[i][found.labels[i] != -100] for i in which]).double())


CASES = [
    Case('CrossEntropyLoss', token_mean),
    Case('CrossEntropyLoss', token_mean, {'reduction': 'sum'}),
    Case(
        'ChunkedCrossEntropyLoss', lambda found, which: token_mean(found, which, 0.1, 0.01),
        {'chunk_size': 7, 'label_smoothing': 0.1, 'z_loss': 0.01},
    ),
    policy('GRPOLoss', {'clip_range': 0.1, 'beta': 0.04, 'entropy_coef': 0.01, 'temperature': 0.8}),
    policy('GSPOLoss', {'clip_range': 0.02, 'beta': 0.04}),
    policy('SAPOLoss', {'tau_pos': 1.5, 'tau_neg': 0.7}),
    policy('CISPOLoss', {'clip_range_high': 0.1}),
    policy('BNPOLoss', {'clip_range': 0.1}),
    policy('DRGRPOLoss', {'clip_range': 0.1, 'max_completion_length': 24}),
    preference('DPOLoss', {'beta': 0.3}, exact=True),
    preference('DPOLoss', {'loss_type': 'ipo'}, exact=True),
    preference('DPOLoss', {'loss_type': 'kto'}, exact=False),
    preference('DPOLoss', {'sft_weight': 0.5}, exact=False),
    preference('SimPOLoss', {'gamma': 0.3}, exact=True),
    preference('CPOLoss', {'cpo_alpha': 0.0}, exact=True),
    preference('CPOLoss', {}, exact=False),
    preference('ORPOLoss', {}, exact=False),
    Case('GKDLoss', distilled, {'beta': 0.3}, ('teacher_logits',)),
    Case('GKDLoss', distilled_remotely, {'beta': 0.3, 'teacher_mode': 'topk_remote'},
         ('teacher_topk_logprobs', 'teacher_topk_indices')),
    Case('InfonceLoss', contrasted, exact=False, task='embedding'),
    Case('MSELoss', squared, task='values'),
]  # fmt: skip


def forward() -> tuple[Any, Found]:
    """One GPT in one process, every sample by itself."""
    initialize(Layout())
    (chunk,) = build(SPEC)
    hidden: list[torch.Tensor] = []
    unwrapped(chunk).output_layer.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    logits = [chunk(s['input_ids'][None], s['position_ids'][None], None)[0] for s in samples()]
    return chunk, Found(logits, [h[-1, 0] for h in hidden], [s['labels'] for s in samples()])


@dataclass(frozen=True)
class Expected:
    """`loss` as Twinkle shows it, the mean over the replicas of what each found."""

    loss: float
    grads: dict[str, Part]


def expected(dp: int) -> dict[str, Expected]:
    """Of every case, with `dp` replicas. On the one rank of a run."""
    chunk, found = forward()
    each = 8 // dp
    replicas = [list(range(r * each, (r + 1) * each)) for r in range(dp)]
    out = {}
    for case in CASES:
        if case.task == 'embedding':  # a micro-batch is that of all replicas together
            steps = [[i for r in replicas for i in r[m : m + SIZE]] for m in range(0, each, SIZE)]
            trained = torch.stack([case.formula(found, step) for step in steps]).mean()
            shown = trained
        elif case.exact:
            trained = case.formula(found, range(8))
            shown = torch.stack([case.formula(found, r) for r in replicas]).mean()
        else:
            parts = [r[m : m + SIZE] for r in replicas for m in range(0, each, SIZE)]
            trained = shown = torch.stack([case.formula(found, part) for part in parts]).mean()
        for parameter in chunk.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trained.backward(retain_graph=True)
        out[str(case)] = Expected(shown.item(), collect_grads([chunk]))
    return out


def expected_metrics() -> dict[str, dict[str, float]]:
    """Of the whole batch. On the one rank of a run."""
    _, found = forward()
    given = [
        Response(*(x.detach() for x in (r.new, r.old, r.ref, r.advantages, r.entropy, r.new)))
        for r in responses(found, range(8))
    ]
    init = {'GRPOMetric': {'epsilon': 0.1}, 'GSPOMetric': {'epsilon': 0.02}, 'CISPOMetric': {'epsilon_high': 0.1}}
    out = {name: policy_formulas.metric_of(name, init.get(name, {}), given) for name in policy_formulas.METRICS}
    for one in out.values():
        one.pop('train/entropy')  # Twinkle shows metrics no entropies
    both = [
        Pair(*(x.detach() for x in (p.chosen, p.rejected, p.ref_chosen, p.ref_rejected)))
        for p in pairs(found, range(8))
    ]
    out['DPOMetric'] = preference_formulas.metric_of(0.3, both)
    hits = [(found.logits[i].argmax(-1) == found.labels[i]).sum().item() for i in range(8)]
    out['Accuracy'] = {'accuracy': sum(hits) / sum(KEPT), 'correct_tokens': sum(hits), 'total_tokens': sum(KEPT)}
    rows = torch.stack([F.normalize(last, dim=0) for last in found.last]).detach()
    cosines = (rows[::2] * rows[1::2]).sum(1)
    out['EmbeddingMetric'] = {
        'pos_sim': cosines.mean().item(), 'pos_sim_min': cosines.min().item(), 'pos_sim_max': cosines.max().item()
    }  # fmt: skip
    return out
