"""Advantages in groups: each sample's reward against those of the other samples of its prompt."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .groups import Groups, all_gather_rows, group_rank, group_size, raise_together

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Scale = Literal['group', 'batch', 'none']
_SCALES: tuple[str, ...] = get_args(Scale)


def group_advantages(
    rewards: Any,
    num_generations: int,
    group_ids: Sequence[int | str] | Any = None,
    scale: Scale = 'group',
    *,
    leave_one_out: bool = False,
    group: ProcessGroup | Groups | None = None,
    ddof: int = 1,
    epsilon: float = 1e-8,
) -> Tensor:
    """Advantages `[n]` of `n` samples whose rewards are compared within groups, in float64 throughout.

        A_i = (r_i − b_i) / s_i

    b_i is the mean over the group of i (GRPO), or over its other members with `leave_one_out` (RLOO). s_i is σ + ε with
    the standard deviation σ of the rewards of its group ('group', GRPO), of all samples ('batch'), or 1 ('none',
    Dr. GRPO and RLOO as published). Where the rewards of a group are equal in float64 its advantages are exactly 0,
    whatever rounding does to their mean; so is that of a group of one sample.

    Args:
        rewards: `[n]`, or `[n, k]` components, which are summed: a tensor of any dtype and device, a numpy array, or a
            list of numbers, of 0-d tensors or of lists. Not differentiated, not written to.
        num_generations: samples to a group where groups go by position; with `group_ids` groups have any size.
        group_ids: `[n]` ints or strings, such as the prompt's: equal ids are one group. None: groups go by position,
            consecutive `num_generations` samples, rank after rank. A sampler that deals samples out round robin tears
            such groups apart: give it ids.
        scale: 'group', 'batch' or 'none'.
        leave_one_out: whether a sample is left out of its own baseline.
        group: the data parallel ranks that groups, and the batch of `scale='batch'`, may span: `Groups`, whose `dp` is
            taken, so that tensor, pipeline and context parallel replicas do not count again; or a process group
            without replicas. None: the samples of this process are all there are. Collective if given.
        ddof: 1 for the unbiased deviation, as `torch.std` has it, or 0.
        epsilon: added to the standard deviation.

    Returns:
        The advantages of this rank's own samples, in their order: float64 `[n]`, on the device of a tensor, else on the
        CPU. Ranks may hold different numbers of samples, or none.

    Over several ranks there is one all-gather of a few integers, and a second one, of the rewards, only where they are
    needed elsewhere: with `group_ids` (and a third one, of pickled ids), with `scale='batch'`, or where some rank's
    count is no multiple of `num_generations`. All ranks decide alike. Waits for `rewards` on a GPU.

    ValueError, after those integers and so on every rank, naming the first such rank: a reward that is NaN, infinite
    or no number; ids that are neither int nor str, or not one a sample; samples that leave a last group incomplete;
    `num_generations` or `scale` that differ between ranks. Other wrong settings raise before any collective.

    References: GRPO, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783; RLOO, arXiv 2402.14740.

    >>> group_advantages([1.0, 0.0, 0.0, 0.0, 0.1, 0.1], 2, scale='none').tolist()
    [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    >>> group_advantages([3, 1, 7, 5], 4, group_ids=['a', 'b', 'a', 'a'], scale='none', leave_one_out=True).tolist()
    [-3.0, 0.0, 3.0, 0.0]
    """
    _check_settings(num_generations, scale, ddof, epsilon)
    ranks = group.dp if isinstance(group, Groups) else group
    own, ids, error = torch.zeros(0, dtype=torch.float64), None, None
    try:
        own = _finite(summed_rewards(rewards))
        ids = None if group_ids is None else _read_ids(group_ids, len(own))
    except Exception as caught:  # raised below, on every rank
        error = caught
    counts, by_id = _agreed(len(own), ids is not None, error, num_generations, scale, ranks)
    values, start = own, 0
    if len(counts) > 1 and (by_id or scale == 'batch' or any(count % num_generations for count in counts)):
        values, start = _gathered(own, counts, ranks), sum(counts[: group_rank(ranks)])
        ids = _gathered_ids(ids or [], ranks) if by_id else None
    index = torch.arange(len(values)) // num_generations if ids is None else _numbered(ids)
    advantages = _advantages(values, index, scale, leave_one_out, ddof, epsilon)
    device = rewards.device if isinstance(rewards, Tensor) else torch.device('cpu')
    return advantages[start : start + len(own)].to(device)


def summed_rewards(rewards: Any, name: str = 'rewards') -> Tensor:
    """Rewards as float64 `[n]` on the CPU, `[n, k]` components summed; a copy, detached.

    Takes what `group_advantages` takes. The sum is correctly rounded: the order of the components does not matter.
    ValueError, naming `name`, for anything else; NaN and infinity pass.
    """
    try:
        array = np.asarray(_plain(rewards))
    except (TypeError, ValueError) as error:
        raise ValueError(f'{name} must hold one number, or equally many components, a sample: {error}') from error
    if array.dtype.kind not in 'biuf':
        raise ValueError(f'{name} must be numbers in a list, an array or a tensor, got {_what(rewards)}')
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] == 0):
        raise ValueError(f'{name} must have shape [n], or [n, k] for k components, got {list(array.shape)}')
    array = np.array(array, dtype=np.float64, order='C')  # a copy that torch can take, whatever its strides were
    return torch.from_numpy(array if array.ndim == 1 else _row_sums(array))


def _plain(value: Any) -> Any:
    """Tensors, within lists too, as numpy arrays, which numpy can put together."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        return (tensor if tensor.is_complex() else tensor.double()).numpy()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _row_sums(array: np.ndarray) -> np.ndarray:
    sums = [math.fsum(row) if np.isfinite(row).all() else row.sum() for row in array]
    return np.array(sums, dtype=np.float64)


def _what(value: Any) -> str:
    items = value if isinstance(value, list | tuple) else []
    odd = sorted({type(item).__name__ for item in items})
    return f'a {type(value).__name__}' + (f' of {", ".join(odd)}' if odd else '')


def _check_settings(num_generations: Any, scale: Any, ddof: Any, epsilon: Any) -> None:
    if not isinstance(num_generations, Integral) or num_generations < 1:
        raise ValueError(f'num_generations must be an int of at least 1, got {num_generations!r}')
    if scale not in _SCALES:
        raise ValueError(f"scale must be 'group', 'batch' or 'none', got {scale!r}")
    if ddof not in (0, 1):
        raise ValueError(f'ddof must be 1 (unbiased) or 0, got {ddof!r}')
    if not 0 <= epsilon < math.inf:
        raise ValueError(f'epsilon must be finite and at least 0, got {epsilon!r}')


def _finite(values: Tensor) -> Tensor:
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        others = f', and so must {len(bad) - 1} others' if len(bad) > 1 else ''
        raise ValueError(f'rewards[{bad[0]}] must be finite, got {values[bad[0]].item()}{others}')
    return values


def _read_ids(group_ids: Any, n: int) -> list[Any]:
    items = group_ids.tolist() if isinstance(group_ids, Tensor | np.ndarray) else group_ids
    if not isinstance(items, list | tuple):
        raise ValueError(f'group_ids must be a list, a tensor or an array, got {type(group_ids).__name__}')
    ids = [item.tolist() if isinstance(item, Tensor | np.ndarray | np.generic) else item for item in items]
    for i, item in enumerate(ids):
        if not isinstance(item, int | str):
            raise ValueError(f'group_ids[{i}] must be an int or a str, got the {type(item).__name__} {item!r}')
    if len(ids) != n:
        raise ValueError(f'group_ids must hold one id for each of the {n} rewards, got {len(ids)}')
    return ids


def _agreed(
    n: int, has_ids: bool, error: Exception | None, num_generations: int, scale: str, ranks: ProcessGroup | None
) -> tuple[list[int], bool]:
    """The samples of each rank, and whether groups go by id; the same on every rank. One collective of integers."""
    if group_size(ranks) == 1 and error is not None:
        raise error
    row = torch.tensor([n, error is not None, has_ids, num_generations, _SCALES.index(scale)])
    counts, failed, with_ids, sizes, scales = all_gather_rows(row, ranks).T.tolist()
    if any(failed):
        raise_together(Groups(dp_cp=ranks), error)
    if len(set(sizes)) > 1 or len(set(scales)) > 1:
        raise ValueError(
            f'num_generations and scale must be the same on every rank, got {sizes} and {[_SCALES[s] for s in scales]}'
        )
    without = [rank for rank, (count, given) in enumerate(zip(counts, with_ids)) if count and not given]
    if any(with_ids) and without:
        raise ValueError(f'group_ids must be given on every rank that has samples, but ranks {without} have none')
    if not any(with_ids) and sum(counts) % num_generations:
        held = f' ({" + ".join(map(str, counts))} over {len(counts)} ranks)' if len(counts) > 1 else ''
        raise ValueError(
            f'rewards must make whole groups of num_generations={num_generations}, but {sum(counts)} samples{held} '
            f'leave {sum(counts) % num_generations} over; pass group_ids for groups of unequal size'
        )
    return counts, any(with_ids)


def _gathered(own: Tensor, counts: list[int], ranks: ProcessGroup | None) -> Tensor:
    """The samples of all ranks in rank order."""
    padded = own.new_zeros(max(counts))
    padded[: len(own)] = own
    return torch.cat([row[:count] for row, count in zip(all_gather_rows(padded, ranks), counts)])


def _gathered_ids(ids: list[Hashable], ranks: ProcessGroup | None) -> list[Hashable]:
    parts: list[Any] = [None] * group_size(ranks)
    dist.all_gather_object(parts, ids, group=ranks)
    return [item for part in parts for item in part]


def _numbered(ids: list[Hashable]) -> Tensor:
    """Ids as 0, 1, … in the order in which they first come."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(item, len(numbers)) for item in ids], dtype=torch.int64)


def _advantages(values: Tensor, index: Tensor, scale: str, leave_one_out: bool, ddof: int, epsilon: float) -> Tensor:
    """The formula, over `values[n]` with groups `index[n]`."""
    deviations, sizes = _deviations(values, index)
    result = deviations * sizes / (sizes - 1).clamp(min=1) if leave_one_out else deviations
    if scale == 'group':
        result = result / (_std(deviations, index, sizes, ddof) + epsilon)
    elif scale == 'batch':
        everyone = torch.zeros_like(index)
        spread, count = _deviations(values, everyone)
        result = result / (_std(spread, everyone, count, ddof) + epsilon)
    return torch.where(deviations == 0, 0.0, result)


def _deviations(values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """`values[n]` less the mean of their group, and the size `[n]` of it.

    Counted from the group's least value, so that equal values have no rounded mean and deviate by 0.
    """
    sizes = torch.bincount(index).double()
    least = torch.full_like(sizes, math.inf).scatter_reduce(0, index, values, 'amin')
    above = values - least[index]
    means = torch.zeros_like(sizes).index_add(0, index, above) / sizes
    return above - means[index], sizes[index]


def _std(deviations: Tensor, index: Tensor, sizes: Tensor, ddof: int) -> Tensor:
    """The standard deviation `[n]` of each sample's group; 0 for a group of one."""
    squares = torch.zeros(len(deviations), dtype=torch.float64).index_add(0, index, deviations.square())
    return (squares[index] / (sizes - ddof).clamp(min=1)).sqrt()
