"""What metrics of per-token statistics share: reading a micro-batch and its log-probs."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..batch import TokenBatch
from ..data_format import InputFeature
from .base import Metric
from .features import IGNORED, Features, as_tensor

if TYPE_CHECKING:
    from ..vocab_parallel import TokenStats


class SweepMetric(Metric):
    """A metric of what one sweep over the logits finds: `needs`, and always the log-probs.

    Inside `MegatronModel` that is the sweep of the loss, at its temperature.
    """

    reads = 'logits'
    temperature: float = 1.0
    """Of log-probs taken from `outputs['logits']`."""

    ignore_index: int = IGNORED

    def marked(self, features: Features) -> Features:
        """With `ignore_index` also where `MegatronModel` says -100, as it does whatever that of the loss is."""
        if self.ignore_index == IGNORED or features.get('labels') is None:
            return features
        labels = torch.as_tensor(features['labels'])
        return {**features, 'labels': labels.masked_fill(labels == IGNORED, self.ignore_index)}

    def read(self, features: Features, output: Features) -> tuple[TokenBatch, TokenStats]:
        """The tokens of one micro-batch, and their statistics, on the device of these. ValueError without any."""
        batch = TokenBatch.of(cast(InputFeature, features), self.ignore_index, cp=self.mesh_group('cp'))
        stats = self._statistics(batch, output).detach()
        device = cast(Tensor, stats.log_prob).device
        if batch.labels.device != device:
            moved = {key: v.to(device) if isinstance(v, Tensor) else v for key, v in features.items()}
            batch = TokenBatch.of(cast(InputFeature, moved), self.ignore_index, cp=batch.cp)
        return batch, stats

    def _statistics(self, batch: TokenBatch, output: Features) -> TokenStats:
        from ..vocab_parallel import TokenStats, token_stats

        ready, logits = output.get('token_stats'), output.get('logits')
        if ready is not None:
            return ready
        if output.get('logps') is not None:
            wanted = tuple(batch.labels.shape)
            given = {n: as_tensor(output[n], n) for n in ('logps', 'entropies') if output.get(n) is not None}
            for name, values in given.items():
                if tuple(values.shape) != wanted:
                    raise ValueError(
                        f"outputs['{name}'] must have the shape of labels, {wanted}, got {tuple(values.shape)}"
                    )
            return TokenStats(log_prob=given['logps'], entropy=given.get('entropies'))
        if logits is None:
            raise ValueError(f'outputs must hold token_stats, logps or logits, got {sorted(output)}')
        with torch.no_grad():
            return token_stats(
                logits, batch.labels.to(logits.device), shard=self.shard_of(output, logits),
                entropy='entropy' in self.needs, temperature=self.temperature, ignore_index=self.ignore_index,
                plain_log_prob='plain_log_prob' in self.needs,
            )  # fmt: skip
