"""Which ids a rank holds, and who is told when that cannot be."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from twinkle_megatron.vocab_parallel import VocabShard


def test_one_process_holds_everything():
    shard = VocabShard.from_group(8)
    assert (shard.start, shard.stop, shard.vocab_size, shard.group, shard.size) == (0, 8, 8, None, 1)
    assert (shard.local_size, shard.true_columns) == (8, 8)


@pytest.mark.parametrize(
    ('start', 'stop', 'vocab_size', 'true_columns'),
    [(0, 4, 10, 4), (8, 12, 10, 2), (12, 16, 10, 0), (4, 4, 10, 0), (10, 14, 10, 0)],
)
def test_true_columns_end_where_the_padding_begins(start, stop, vocab_size, true_columns):
    shard = VocabShard(start, stop, vocab_size, group=_any_group())
    assert shard.true_columns == true_columns
    ids = torch.tensor([-100, -1, *range(20), 1 << 40])
    want = [i - start if start <= i < start + true_columns else -1 for i in ids.tolist()]
    assert shard.local_ids(ids).tolist() == want
    assert shard.local_ids(ids).dtype == torch.int32


def _any_group():
    """Something that is not None: the properties that are tested ask no other rank."""
    return object()


@pytest.mark.parametrize('widths', [[4, 4], [1, 7], [0, 5, 0], [5, 0, 3, 1]])
def test_shards_are_consecutive_in_rank_order(widths):
    def on_rank():
        width = widths[dist.get_rank()]
        made = [VocabShard.from_group(width, dist.group.WORLD), VocabShard.from_group(width, dist.group.WORLD, 5)]
        return [(s.start, s.stop, s.vocab_size, s.true_columns, s.size) for s in made]

    start = 0
    for width, (plain, padded) in zip(widths, run_ranks(on_rank, len(widths))):
        assert plain == (start, start + width, sum(widths), width, len(widths))
        assert padded == (start, start + width, 5, min(max(5 - start, 0), width), len(widths))
        start += width


def test_a_size_may_be_any_integer_type():
    shard = VocabShard.from_group(np.int64(8), vocab_size=np.int32(7))
    assert (shard.stop, shard.vocab_size) == (8, 7)
    assert type(shard.stop) is int


WRONG_ON_ONE_RANK = {
    'negative size': ((4, -1), (None, None), r'local_size must be an int >= 0 .* rank\(s\) \[1\]'),
    'float size': ((4, 4.0), (None, None), r'local_size must be an int >= 0 .* rank\(s\) \[1\]'),
    'float vocabulary': ((4, 4), (8, 7.5), r'vocab_size must be an int >= 0 .* rank\(s\) \[1\]'),
    'text vocabulary': ((4, 4), (8, '8'), r'vocab_size must be an int >= 0 .* rank\(s\) \[1\]'),
    'vocabularies differ': ((4, 4), (8, 7), r'vocab_size must be the same .* got \[8, 7\]'),
    'given once': ((4, 4), (8, None), r"vocab_size must be the same .* got \[8, 'not given'\]"),
    'too many ids': ((4, 4), (9, 9), r'vocab_size must lie in \[1, 8\].* got 9'),
    'no ids': ((4, 4), (0, 0), r'vocab_size must lie in \[1, 8\].* got 0'),
    'no columns': ((0, 0), (None, None), 'local_size must be > 0 on at least one rank'),
    'gathered': ((8, 8), (8, 8), r'8 ids, but every rank holds 8 columns.*gather_output=False'),
}


def test_a_wrong_call_on_one_rank_is_the_same_error_on_all():
    def on_rank():
        rank, found = dist.get_rank(), {}
        for name, (sizes, vocabs, _) in WRONG_ON_ONE_RANK.items():
            with pytest.raises(ValueError) as error:  # noqa: PT011
                VocabShard.from_group(sizes[rank], dist.group.WORLD, vocabs[rank])
            found[name] = str(error.value)
        return found

    for found in run_ranks(on_rank, 2):
        for name, (_, _, pattern) in WRONG_ON_ONE_RANK.items():
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(found[name])


@pytest.mark.parametrize(
    ('arguments', 'pattern'),
    [
        ((4, 2, 8, None), r'0 <= start <= stop, got \[4, 2\)'),
        ((-1, 2, 8, None), r'0 <= start <= stop, got \[-1, 2\)'),
        ((0, 2, 0, None), 'vocab_size must be at least 1, got 0'),
        ((0, 4, 8, None), r'group must be given .* \[0, 4\) of 8'),
        ((4, 8, 8, None), r'group must be given .* \[4, 8\) of 8'),
    ],
)
def test_impossible_shards_are_refused(arguments, pattern):
    with pytest.raises(ValueError, match=pattern):
        VocabShard(*arguments)


@pytest.mark.parametrize('group', [2, 'tp', [0, 1]])
def test_a_group_that_is_none_is_refused(group):
    with pytest.raises(ValueError, match='group must be a ProcessGroup'):
        VocabShard.from_group(8, group)


def test_a_group_of_other_ranks_is_refused():
    def on_rank():
        group = dist.new_group([0])
        if dist.get_rank() == 0:
            return VocabShard.from_group(8, group).size
        with pytest.raises(ValueError, match='of which this process is a member'):
            VocabShard.from_group(8, group)
        return 'refused'

    assert run_ranks(on_rank, 2) == [1, 'refused']
