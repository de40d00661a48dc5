"""Data and plain references that the metric tests share."""

from typing import Any

import torch

VOCAB = 12

MicroBatch = tuple[dict[str, Any], dict[str, Any]]


def micro_batch(seed: int, rows: int, length: int, trained: float = 0.6, masked: bool = True) -> MicroBatch:
    """Inputs and whole-vocabulary logits; about `trained` of the labels count, a third of the right ones by design."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, length, VOCAB, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (rows, length), generator=generator)
    labels = torch.where(torch.rand(rows, length, generator=generator) < 0.4, logits.argmax(-1), labels)
    labels[torch.rand(rows, length, generator=generator) >= trained] = -100
    inputs = {'labels': labels}
    if masked:
        inputs['completion_mask'] = (torch.rand(rows, length, generator=generator) < 0.8).long()
    return inputs, {'logits': logits}


def counts(batches: list[MicroBatch]) -> tuple[int, int]:
    """(correct, total) by looping over tokens."""
    correct = total = 0
    for inputs, outputs in batches:
        mask = inputs.get('completion_mask', torch.ones_like(inputs['labels']))
        for label, keep, row in zip(
            inputs['labels'].flatten().tolist(), mask.flatten().tolist(), outputs['logits'].flatten(0, -2).tolist()
        ):
            if label != -100 and keep:
                total += 1
                correct += row.index(max(row)) == label
    return correct, total


def shown(correct: int, total: int) -> dict[str, Any]:
    return {'accuracy': f'{correct / total:.2f}', 'correct_tokens': correct, 'total_tokens': total}


def losses(batches: list[MicroBatch]) -> list[tuple[float, int]]:
    """(summed loss, counted tokens) of each micro-batch, in float64."""
    result = []
    for inputs, outputs in batches:
        mask = inputs.get('completion_mask', torch.ones_like(inputs['labels'])).bool()
        labels = torch.where(mask, inputs['labels'], -100)
        loss = torch.nn.functional.cross_entropy(outputs['logits'].flatten(0, -2), labels.flatten(), reduction='sum')
        result.append((loss.item(), int((labels != -100).sum())))
    return result
