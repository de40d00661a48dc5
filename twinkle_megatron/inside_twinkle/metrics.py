"""Metrics as Twinkle's `MegatronModel` feeds them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from twinkle.metric import Metric as TwinkleMetric  # type: ignore[import-not-found]

from ..groups import Groups, all_gather_rows, group_size, tensor_parallel_group
from ..metric import Metric
from ..metric.base import STEP_KEYWORDS
from .rows import Rows

logger = logging.getLogger('twinkle_megatron')


def adapted_metric(cls: type[Metric]) -> Any:
    """A class of that name that Twinkle's `add_metric` takes: a subclass of both `cls` and `twinkle.metric.Metric`.

    `cls` is one of this package's metrics, or a `Metric` of your own. Twinkle's device mesh is read as Megatron's
    groups; of the keywords of a call, all of which Twinkle hands to every metric, it is given those that it names.
    """
    if not issubclass(cls, Metric):
        raise ValueError(f'cls must be a Metric of this package, got {cls.__name__}')
    names = [p.name for p in inspect.signature(cls.accumulate).parameters.values() if p.kind is p.KEYWORD_ONLY]
    known = STEP_KEYWORDS.union(names)

    def __init__(self: Any, device_mesh: Any = None, process_group: Any = None, **init: Any) -> None:
        cls.__init__(self, device_mesh=_groups(device_mesh), process_group=process_group, **init)

    def accumulate(self: Any, inputs: Any = None, outputs: Any = None, **given: Any) -> None:
        features, found = _fed(self, inputs, outputs)
        if found is not None:
            cls.accumulate(self, features, found, **{key: value for key, value in given.items() if key in known})

    body = {
        '__module__': 'twinkle_megatron.inside_twinkle',
        '__doc__': cls.__doc__,
        '__init__': __init__,
        'accumulate': accumulate,
    }
    return type(cls.__name__, (cls, TwinkleMetric), body)


def _groups(mesh: Any) -> Groups | None:
    """Context parallel ranks hold whole sequences in Twinkle, so that each of them has all the numbers."""
    if mesh is None or isinstance(mesh, Groups):
        return mesh
    if tensor_parallel_group() is None:
        return None
    found = Groups.from_megatron()
    return replace(found, cp=None, dp_cp=found.dp)


def _fed(metric: Metric, inputs: Any, outputs: Any) -> tuple[list[Any], Mapping[str, Any] | None]:
    """Of the last pipeline stage its micro-batches, one dictionary each, and what the model gave for them."""
    if not metric.is_last_stage or outputs is None:
        return [], outputs
    features = [inputs] if isinstance(inputs, Mapping) else list(inputs or ())
    found = {key: value for key, value in outputs.items() if value is not None}
    if metric.reads == 'embeddings':
        return _pooled(features, found)
    if metric.reads is None:  # labels may be marks of samples
        return [
            {key: one[key] for key in ('input_ids', 'labels') if one.get(key) is not None} for one in features
        ], found
    rows = [Rows.of(one) for one in features if one.get('labels') is not None]
    if metric.reads == 'logits':
        keys = ('logits',) if 'logps' not in found or not _does_with_logps(metric) else ('logps',)
        if not found.keys() & keys:
            _tell(metric, 'log-probs or logits' if _does_with_logps(metric) else 'logits')
            return [], None
        found = {key: value for key, value in found.items() if key not in ('logits', 'logps') or key in keys}
        if 'logits' in found:
            found['logits'] = _each(found['logits'], rows)
    return [one.inputs for one in rows], found


def _does_with_logps(metric: Metric) -> bool:
    return 'argmax' not in metric.needs


def _each(logits: Any, rows: list[Rows]) -> list[Tensor]:
    """The logits of each micro-batch as whole rows `[n, s, V/tp]`."""
    cp = None if tensor_parallel_group() is None else Groups.from_megatron().cp
    parts = list(logits) if isinstance(logits, (list, tuple)) else list(logits.split([one.shape[0] for one in rows]))
    out = []
    for part, one in zip(parts, rows):
        n, s = one.shape
        whole = part.new_zeros((n * s, part.shape[-1]))
        if group_size(cp) == 1:
            whole[one.cells().to(part.device)] = part
        else:
            at = all_gather_rows(one.local_cells(cp).to(part.device), cp)
            whole[at] = all_gather_rows(part, cp)
        out.append(whole.view(n, s, -1))
    return out


def _pooled(features: list[Any], found: dict[str, Any]) -> tuple[list[Any], Mapping[str, Any] | None]:
    """Embeddings, which Twinkle shows as the logits that the model returned."""
    if 'embeddings' not in found and 'logits' in found:
        found['embeddings'] = found.pop('logits')
    return [{'labels': torch.as_tensor(one['labels']).reshape(-1)} for one in features], found


_TOLD: set[str] = set()


def _tell(metric: Metric, what: str) -> None:
    name = type(metric).__name__
    if name not in _TOLD:
        _TOLD.add(name)
        logger.warning(
            'twinkle_megatron: %s has nothing to say: the model returned no %s; call forward_backward(..., '
            'return_logits=True), or set a loss that asks for log-probs',
            name,
            what,
        )
