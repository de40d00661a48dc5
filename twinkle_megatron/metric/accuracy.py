"""Token accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .base import Metric, checked_keywords
from .features import Features, counted_of, labels_of, micro_batches
from .state import SUM


class Accuracy(Metric):
    """The share of counted tokens whose largest logit, over the whole vocabulary, is that of the label.

    A token counts if its label is not -100 and its `completion_mask`, if given, is not 0. Among equal logits the lowest
    id is the prediction, on every layout.

    Keys: `accuracy` (2 decimals), `correct_tokens`, `total_tokens` (integers); none at all without counted tokens.
    """

    reads = 'logits'
    fields = {'correct': SUM, 'total': SUM}  # noqa: RUF012
    needs = frozenset({'argmax'})

    @checked_keywords
    def accumulate(self, inputs: Any = None, outputs: Any = None) -> None:
        """Takes in one micro-batch, or a list of them with their outputs as a list or concatenated. No host sync.

        Args:
            inputs: `labels[...]`, already shifted, and optionally `completion_mask[...]`.
            outputs: `token_stats` with `argmax[...]`, as the loss's sweep leaves it; else `logits[..., V/tp]` with the
                `vocab_shard` that says which ids they are. Without that key they are this rank's shard when
                `device_mesh` tells a tensor parallel group of several ranks, and the whole vocabulary otherwise.

        From a shard it is collective over the tensor parallel group: one all-gather (and, once, one more).
        On a pipeline stage that is not the last one it does nothing.
        """
        if not self.is_last_stage:
            return
        for features, output in micro_batches(inputs, outputs):
            for part, result in _split(features, output):
                if any(part) or result:
                    self._count(part, result)

    def figures(self, totals: Mapping[str, float]) -> dict[str, float]:
        """`accuracy` in [0, 1], `correct_tokens` and `total_tokens`; empty without tokens."""
        correct, total = totals['correct'], totals['total']
        if total == 0:
            return {}
        return {'accuracy': correct / total, 'correct_tokens': correct, 'total_tokens': total}

    def display(self, totals: Mapping[str, float]) -> dict[str, Any]:
        """`accuracy` with 2 decimals, the counts as integers."""
        figures = self.figures(totals)
        return {name: f'{x:.2f}' if name == 'accuracy' else round(x) for name, x in figures.items()}

    def _count(self, features: list[Features], output: Features) -> None:
        labels, counted = _joined(features)
        stats = output.get('token_stats')
        predicted = getattr(stats, 'argmax', None)
        if predicted is not None:
            _check_shape(labels, tuple(predicted.shape), "outputs['token_stats'].argmax")
        else:
            predicted = self._argmax(output, labels)
        labels, counted = (
            labels.to(predicted.device, non_blocking=True),
            counted.to(predicted.device, non_blocking=True),
        )
        self.state.fold(correct=((predicted == labels) & counted).sum(), total=counted.sum())

    def _argmax(self, output: Features, labels: Tensor) -> Tensor:
        from ..vocab_parallel import LinearHead, argmax

        logits = output.get('logits')
        if logits is None:
            raise ValueError(
                'outputs must hold logits, or token_stats with argmax, to count correct tokens from, got '
                f'{sorted(key for key, value in output.items() if value is not None)}; is the model to return them?'
            )
        if isinstance(logits, LinearHead):
            shard = self.shard_of(output, logits)
            shape = (*logits.lead(shard.size), logits.local_size)
        else:
            shape = tuple(getattr(logits, 'shape', ())) or (0,)
        _check_shape(labels, shape[:-1], f"outputs['logits'] {shape} without the last dim")
        return argmax(logits, shard=self.shard_of(output, logits))


def _split(features: list[Features], output: Features) -> list[tuple[list[Features], Features]]:
    """One pair a micro-batch where `logits` or `token_stats` are lists; else all of them together."""
    lists = {key: output[key] for key in ('logits', 'token_stats') if isinstance(output.get(key), list | tuple)}
    if not lists:
        return [(features, output)]
    for key, items in lists.items():
        if len(items) != len(features):
            raise ValueError(f"outputs['{key}'] must hold one entry a micro-batch, {len(features)}, got {len(items)}")
    return [([f], {**output, **{key: items[i] for key, items in lists.items()}}) for i, f in enumerate(features)]


def _joined(features: list[Features]) -> tuple[Tensor, Tensor]:
    """Labels of all `features` and which of them count: concatenated rows; several 1-D samples are stacked."""
    pairs = []
    for feature in features:
        labels = labels_of(feature)
        if labels is None:
            raise ValueError(f'inputs must hold labels to count correct tokens against, got {sorted(feature)}')
        pairs.append((labels, counted_of(feature, labels)))
    if not pairs:
        raise ValueError('inputs must hold the labels of the micro-batches whose outputs are given, got none')
    if len(pairs) == 1:
        return pairs[0]
    shapes = [tuple(labels.shape) for labels, _ in pairs]
    if len({shape[min(len(shape) - 1, 1) :] for shape in shapes}) > 1 or len({len(shape) for shape in shapes}) > 1:
        raise ValueError(
            'labels of micro-batches with one outputs dictionary must be equally long to match concatenated logits, '
            f'got shapes {shapes}; pass outputs as a list of dictionaries'
        )
    join = torch.stack if len(shapes[0]) == 1 else torch.cat
    return join([labels for labels, _ in pairs]), join([counted for _, counted in pairs])


def _check_shape(labels: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(labels.shape) != shape:
        raise ValueError(f"inputs['labels'] must have the shape of {name}, {shape}, got {tuple(labels.shape)}")
