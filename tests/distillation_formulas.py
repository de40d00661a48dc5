"""Generalised Jensen-Shannon divergences as the paper writes them, of whole distributions in float64, without any of
this package's code."""

from __future__ import annotations

import torch
from torch import Tensor


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(P‖Q) from log-probs `[..., V]`; where P is 0 nothing is added."""
    return torch.where(p > -torch.inf, p.exp() * (p - torch.where(p > -torch.inf, q, 0)), 0).sum(-1)


def jsd(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Of a student's and a teacher's log-probs."""
    if beta == 0:
        return kl(log_t, log_s)
    if beta == 1:
        return kl(log_s, log_t)
    log_m = torch.log(beta * log_t.exp() + (1 - beta) * log_s.exp())
    return beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)


def full(student: Tensor, teacher: Tensor, beta: float, temperature: float = 1.0) -> Tensor:
    """Over the ids that both have."""
    common = min(student.shape[-1], teacher.shape[-1])
    return jsd(*(x[..., :common].div(temperature).log_softmax(-1) for x in (student, teacher)), beta)


def best(student: Tensor, teacher: Tensor, k: int, tail: str, beta: float, temperature: float = 1.0) -> Tensor:
    """Over the teacher's k best tokens."""
    common = min(student.shape[-1], teacher.shape[-1])
    student, teacher = student[..., :common] / temperature, teacher[..., :common] / temperature
    ids = teacher.topk(k, -1).indices
    if tail == 'renormalize':
        return jsd(*(x.gather(-1, ids).log_softmax(-1) for x in (student, teacher)), beta)
    return jsd(bucketed(student.log_softmax(-1), ids), bucketed(teacher.log_softmax(-1), ids), beta)


def bucketed(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probs at the ids, and that of all other ids together `[..., k + 1]`."""
    others = torch.ones_like(log_p, dtype=torch.bool).scatter(-1, ids, False)
    rest = log_p.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), rest], -1)


def remote(student: Tensor, scores: Tensor, ids: Tensor, tail: str, beta: float, temperature: float = 1.0) -> Tensor:
    """From the log-probs of an API; none are −inf."""
    if tail == 'renormalize':
        return jsd(*(x.div(temperature).log_softmax(-1) for x in (student.gather(-1, ids), scores)), beta)
    rest = torch.log(1 - scores.exp().sum(-1, keepdim=True))
    return jsd(bucketed(student.log_softmax(-1), ids), torch.cat([scores, rest], -1), beta)
