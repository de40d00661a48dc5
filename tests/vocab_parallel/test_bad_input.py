"""Wrong calls: one ValueError that names the argument, what it must be and what came."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from tests.vocab_parallel.probes import counted
from twinkle_megatron.vocab_parallel import (
    LinearHead,
    VocabShard,
    argmax,
    cross_entropy,
    gather,
    labels,
    log_probs,
    log_probs_and_entropy,
    token_stats,
    topk,
)

X, Y, SHARD = torch.randn(3, 8), torch.tensor([1, 2, 3]), VocabShard.from_group(8)

LOGITS = {
    'numpy': (X.numpy(), r'logits must be a tensor \[\.\.\., 8\] or a LinearHead, got ndarray'),
    'list': (X.tolist(), 'logits must be a tensor .* got list'),
    'none': (None, 'logits must be a tensor .* got NoneType'),
    'integers': (X.long(), 'logits must be float16, bfloat16, float32 or float64, got torch.int64'),
    'complex': (X.to(torch.complex64), 'logits must be float16.* got torch.complex64'),
    'too wide': (torch.randn(3, 16), r'8 ids \[0, 8\) .* on the last dim, got shape \(3, 16\)'),
    'vocabulary first': (X.T, r'last dim, got shape \(8, 3\); .*the vocabulary not on the last dim'),
    'a number': (torch.tensor(1.0), r'got shape \(\)'),
}
TARGET = {
    'none': (None, 'target must be a tensor of global ids, got None'),
    'list': ([1, 2, 3], 'target must be a tensor of global ids, got list'),
    'floats': (Y.float(), 'target must hold integer ids, got torch.float32'),
    'booleans': (Y.bool(), 'target must hold integer ids, got torch.bool'),
    'short': (Y[:2], r'target must have the shape of the logits without .* \(3,\), got \(2,\)'),
    'one-hot': (torch.zeros(3, 8).long(), r'target must have the shape .* \(3,\), got \(3, 8\)'),
    'elsewhere': (Y.to('meta'), 'target must be on the device of the logits, cpu, got meta'),
    'past the end': (torch.tensor([1, 8, -1]), r'ids in \[0, 8\) .* got \[8, -1\] at \[\(1,\), \(2,\)\], 2 in all'),
}
OPTIONS = {
    'temperature zero': ({'temperature': 0}, 'temperature must be a finite number > 0 .* got 0'),
    'temperature negative': ({'temperature': -1.0}, 'temperature must be .* got -1.0'),
    'temperature nan': ({'temperature': math.nan}, 'temperature must be .* got nan'),
    'temperature infinite': ({'temperature': math.inf}, 'temperature must be .* got inf'),
    'temperature without inverse': ({'temperature': 1e-40}, 'temperature must be .* got 1e-40'),
    'temperature tensor': ({'temperature': torch.ones(3)}, 'temperature must be a finite number'),
    'temperature text': ({'temperature': '1'}, "temperature must be a finite number .* got '1'"),
    'chunk zero': ({'chunk_size': 0}, 'chunk_size must be an int >= 1 .* got 0'),
    'chunk float': ({'chunk_size': 4.0}, 'chunk_size must be an int >= 1 .* got 4.0'),
    'ignore none': ({'ignore_index': None}, 'ignore_index must be an int, got None; -100 where no label'),
    'shard none': ({'shard': None}, r'shard must be a VocabShard, got NoneType; VocabShard.from_group'),
    'shard size': ({'shard': 8}, 'shard must be a VocabShard, got int'),
}
HIDDEN, WEIGHT = torch.randn(3, 4), torch.randn(8, 4)
HEADS = {
    'hidden list': ({'hidden': HIDDEN.tolist()}, 'hidden must be a tensor, got list'),
    'hidden none': ({'hidden': None}, 'hidden must be a tensor, got NoneType'),
    'hidden integers': ({'hidden': HIDDEN.long()}, 'hidden must be float16, .* got torch.int64'),
    'hidden complex': ({'hidden': HIDDEN.to(torch.complex64)}, 'hidden must be float16, .* got torch.complex64'),
    'hidden a number': ({'hidden': torch.tensor(1.0)}, r'hidden must be \[\.\.\., H\] .* got \(\) and \(8, 4\)'),
    'hidden elsewhere': (
        {'hidden': HIDDEN.to('meta')},
        'weight must have the dtype and device of hidden, .* on meta, got',
    ),
    'weight none': ({'weight': None}, 'weight must be a tensor, got NoneType'),
    'weight numpy': ({'weight': WEIGHT.numpy()}, 'weight must be a tensor, got ndarray'),
    'weight transposed': (
        {'weight': WEIGHT.T},
        r'weight \[V/tp, H\] with the same H > 0, got \(3, 4\) and \(4, 8\); .* weight is not transposed',
    ),
    'weight 1-D': ({'weight': WEIGHT[0]}, r'weight \[V/tp, H\] .* got \(3, 4\) and \(4,\)'),
    'weight 3-D': ({'weight': WEIGHT[None]}, r'weight \[V/tp, H\] .* got \(3, 4\) and \(1, 8, 4\)'),
    'no width': (
        {'hidden': HIDDEN[:, :0], 'weight': WEIGHT[:, :0]},
        r'the same H > 0, got \(3, 0\) and \(8, 0\)',
    ),
    'weight dtype': (
        {'weight': WEIGHT.bfloat16()},
        'weight must have the dtype and device of hidden, torch.float32 on cpu, got torch.bfloat16 on cpu',
    ),
    'weight elsewhere': (
        {'weight': WEIGHT.to('meta')},
        'weight must have the dtype and device of hidden, torch.float32 on cpu, got torch.float32 on meta',
    ),
    'bias text': ({'bias': 'none'}, 'bias must be a tensor, got str'),
    'bias false': ({'bias': False}, 'bias must be a tensor, got bool'),
    'bias width': ({'bias': torch.zeros(4)}, r'bias must be \[V/tp\] = \(8,\), got \(4,\)'),
    'bias 2-D': ({'bias': torch.zeros(8, 1)}, r'bias must be \[V/tp\] = \(8,\), got \(8, 1\)'),
    'bias dtype': (
        {'bias': torch.zeros(8).double()},
        'bias must have the dtype .* torch.float32 on cpu, got torch.float64',
    ),
    'bias elsewhere': ({'bias': torch.zeros(8).to('meta')}, 'bias must have the dtype and device .* on meta'),
    'sequence parallel number': ({'sequence_parallel': 1}, 'sequence_parallel must be True or False, got 1'),
    'sequence parallel none': ({'sequence_parallel': None}, 'sequence_parallel must be True or False, got None'),
    'no sequence': (
        {'hidden': HIDDEN[0], 'sequence_parallel': True},
        r'sequence_parallel needs hidden \[s/tp, \.\.\., H\], got \(4,\)',
    ),
    **{
        f'logit_scale {value}': ({'logit_scale': value}, f'logit_scale must be a finite number > 0, got {value!r}')
        for value in (0, -1.0, math.nan, math.inf, None, '2')
    },
    'logit_scale tensor': ({'logit_scale': torch.ones(8)}, 'logit_scale must be a finite number > 0, got tensor'),
    **{
        f'max_workspace_mb {value}': (
            {'max_workspace_mb': value},
            f'max_workspace_mb must be a number of MiB > 0, or None, got {value!r}',
        )
        for value in (0, -8, math.nan, math.inf, '8', True)
    },
    'main_grad true': ({'main_grad': True}, 'main_grad must be a tensor, got bool'),
    'main_grad flat': (
        {'main_grad': torch.zeros(32)},
        r'main_grad must be a buffer of the shape and device of weight, \(8, 4\) on cpu, got \(32,\) on cpu',
    ),
    'main_grad elsewhere': ({'main_grad': torch.zeros(8, 4).to('meta')}, r'main_grad must be .* got \(8, 4\) on meta'),
    'main_grad integers': ({'main_grad': WEIGHT.int()}, 'main_grad must be a plain buffer of floats .* torch.int32'),
    'main_grad a parameter': (
        {'main_grad': torch.nn.Parameter(torch.zeros(8, 4))},
        'main_grad must be a plain buffer of floats without a gradient, got torch.float32, which requires a gradient',
    ),
}
WITH_TARGET = [log_probs, log_probs_and_entropy, cross_entropy]


@pytest.mark.parametrize('name', LOGITS)
def test_logits(name):
    logits, pattern = LOGITS[name]
    ids = torch.zeros(3, 1, dtype=torch.long)
    calls = [lambda f=f: f(logits, Y, shard=SHARD) for f in (*WITH_TARGET, token_stats)]
    calls += [
        lambda: argmax(logits, shard=SHARD),
        lambda: topk(logits, 2, shard=SHARD),
        lambda: gather(logits, ids, shard=SHARD),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=pattern):
            call()


@pytest.mark.parametrize('name', HEADS)
def test_linear_head(name):
    options, pattern = HEADS[name]
    with pytest.raises(ValueError, match=pattern) as error:
        LinearHead(**{'hidden': HIDDEN, 'weight': WEIGHT, **options})
    assert 'tensor([[' not in str(error.value)  # no data of a weight's size


def test_a_linear_head_of_another_shard():
    ids = torch.zeros(3, 1, dtype=torch.long)
    for weight in (WEIGHT[:4], torch.cat([WEIGHT, WEIGHT])):
        head = LinearHead(HIDDEN, weight)
        calls = [lambda f=f, x=head: f(x, Y, shard=SHARD) for f in (*WITH_TARGET, token_stats)]
        calls += [lambda f=f, x=head: f(x, shard=SHARD) for f in (argmax, token_stats)]
        calls += [lambda x=head: topk(x, 2, shard=SHARD), lambda x=head: gather(x, ids, shard=SHARD)]
        pattern = rf"weight must hold the 8 ids \[0, 8\) of this rank's shard, one a row, got \({len(weight)}, 4\)"
        for call in calls:
            with pytest.raises(ValueError, match=pattern):
                call()


@pytest.mark.parametrize('dims', [(0, 2), (2, 0), (-1, 0), (1, -1), (0, 3), (-4, 0)])
def test_a_linear_head_keeps_the_vocabulary_last(dims):
    head = LinearHead(HIDDEN[None], WEIGHT)
    pattern = rf'transpose must exchange two of the 2 leading dims of the logits, got {dims[0]} and {dims[1]}'
    with pytest.raises(ValueError, match=pattern):
        head.transpose(*dims)


def test_labels_and_ids_have_the_shape_of_the_logits_of_a_linear_head():
    head = LinearHead(torch.randn(2, 3, 4), WEIGHT).transpose(0, 1)
    with pytest.raises(ValueError, match=r'target must have the shape of the logits .* \(3, 2\), got \(2, 3\)'):
        log_probs(head, torch.zeros(2, 3).long(), shard=SHARD)
    with pytest.raises(ValueError, match=r"ids must have shape \(3, 2, 'k'\).* got \(2, 3, 1\)"):
        gather(head, torch.zeros(2, 3, 1).long(), shard=SHARD)
    with pytest.raises(ValueError, match='target must be on the device of the logits, cpu, got meta'):
        log_probs(head, torch.zeros(3, 2).long().to('meta'), shard=SHARD)
    with pytest.raises(ValueError, match=r'got \[9\] at \[\(2, 0\)\], 1 in all'):
        log_probs(head, torch.tensor([[1, 2], [3, 4], [9, 0]]), shard=SHARD)


@pytest.mark.parametrize('name', TARGET)
def test_target(name):
    target, pattern = TARGET[name]
    for function in WITH_TARGET:
        with pytest.raises(ValueError, match=pattern):
            function(X, target, shard=SHARD)


@pytest.mark.parametrize('name', OPTIONS)
def test_options(name):
    options, pattern = OPTIONS[name]
    for function in (*WITH_TARGET, token_stats):
        with pytest.raises(ValueError, match=pattern):
            function(X, Y, **{'shard': SHARD, **options})


@pytest.mark.parametrize(
    ('options', 'pattern'),
    [
        ({'label_smoothing': 1.5}, r'label_smoothing must be a number in \[0, 1\], got 1.5'),
        ({'label_smoothing': -0.1}, 'label_smoothing must be .* got -0.1'),
        ({'label_smoothing': math.nan}, 'label_smoothing must be .* got nan'),
        ({'label_smoothing': '0.1'}, "label_smoothing must be a number .* got '0.1'"),
        ({'z_loss': -1}, 'z_loss must be a finite number >= 0, got -1'),
        ({'z_loss': math.inf}, 'z_loss must be a finite number >= 0, got inf'),
        ({'z_loss': None}, 'z_loss must be a finite number >= 0, got None'),
    ],
)
def test_weights_of_cross_entropy(options, pattern):
    with pytest.raises(ValueError, match=pattern):
        cross_entropy(X, Y, shard=SHARD, **options)


@pytest.mark.parametrize('k', [0, 9, -1, 2.0, True, None])
def test_k(k):
    with pytest.raises(ValueError, match=rf'k must be an int in \[1, 8\], the true vocabulary size, got {k}'):
        topk(X, k, shard=SHARD)


@pytest.mark.parametrize(
    ('ids', 'pattern'),
    [
        ([[1]] * 3, 'ids must be a tensor of global ids, got list'),
        (np.ones((3, 1), dtype=np.int64), 'ids must be a tensor of global ids, got ndarray'),
        (torch.zeros(3, 1), 'ids must be int64 or int32 global ids, got torch.float32'),
        (torch.zeros(3).long(), r"ids must have shape \(3, 'k'\).* got \(3,\)"),
        (torch.zeros(2, 1).long(), r"ids must have shape \(3, 'k'\).* got \(2, 1\)"),
        (torch.zeros(3, 1).long().to('meta'), 'ids must be on the device of the logits, cpu, got meta'),
        (torch.tensor([[0], [8], [1]]), r'ids must lie in \[0, 8\), got \[0, 8\]'),
        (torch.tensor([[0], [-100], [1]]), r'ids must lie in \[0, 8\), got \[-100, 1\]'),
    ],
)
def test_ids(ids, pattern):
    with pytest.raises(ValueError, match=pattern):
        gather(X, ids, shard=SHARD)


def test_storage_that_is_not_the_logits_own_is_not_reused():
    with pytest.raises(
        ValueError, match='reuse_storage needs logits with a storage of their own, got an expanded tensor'
    ):
        log_probs(X[:1].expand(3, 8), Y, shard=SHARD, reuse_storage=True)


def test_the_place_of_a_bad_label_is_the_callers_whatever_the_memory_layout():
    logits = torch.randn(2, 3, 8).transpose(0, 1)
    with pytest.raises(ValueError, match=r'got \[9\] at \[\(2, 0\)\], 1 in all'):
        log_probs(logits, torch.tensor([[1, 2], [3, 4], [9, 0]]), shard=SHARD)


def test_labels_of_padding_are_out_of_range():
    shard = VocabShard.from_group(8, vocab_size=7)
    with pytest.raises(ValueError, match=r'\[0, 7\) .* got \[7\] at \[\(0,\)\].* the padded vocabulary'):
        log_probs(X, torch.tensor([7, 0, 6]), shard=shard)


@pytest.mark.parametrize('variable', ['fast', ''])
def test_an_unknown_kernel_choice(monkeypatch, variable):
    monkeypatch.setenv('TWINKLE_MEGATRON_KERNELS', variable)
    with pytest.raises(ValueError, match=f"TWINKLE_MEGATRON_KERNELS must be .* got '{variable}'"):
        log_probs(X, Y, shard=SHARD)


def test_gathered_logits_name_the_layer_and_no_rank_enters_a_collective():
    def on_rank():
        shard = VocabShard.from_group(4, dist.group.WORLD)
        with counted() as calls, pytest.raises(ValueError, match=r"this rank's shard .* gather_output=True\?"):
            log_probs(torch.randn(3, 8), Y, shard=shard)
        return sum(calls.values())

    assert run_ranks(on_rank, 2) == [0, 0]


def test_shapes_dtypes_and_options_are_checked_before_any_collective():
    def on_rank():
        shard, x = VocabShard.from_group(4, dist.group.WORLD), torch.randn(3, 4)
        wrong = [
            lambda: log_probs(x, Y.float(), shard=shard),
            lambda: log_probs(x, Y[:2], shard=shard),
            lambda: log_probs(x.long(), Y, shard=shard),
            lambda: log_probs(x, Y, shard=shard, temperature=0),
            lambda: log_probs(x, Y, shard=shard, chunk_size=0),
            lambda: cross_entropy(x, Y, shard=shard, label_smoothing=2),
            lambda: topk(x, 9, shard=shard),
            lambda: gather(x, torch.full((3, 1), 8), shard=shard),
        ]
        with counted() as calls:
            for call in wrong:
                with pytest.raises(ValueError):  # noqa: PT011
                    call()
        return sum(calls.values())

    assert run_ranks(on_rank, 2) == [0, 0]


class FakeEvent:
    """A CUDA event that has happened, and what came over with it."""

    def __init__(self):
        self.waited = False

    def synchronize(self):
        self.waited = True


def test_marks_from_the_gpu_are_raised_at_the_same_later_call_on_every_rank(monkeypatch):
    monkeypatch.setattr(labels, '_pending', [])

    def mark(bad):
        labels._pending.append(labels._Pending(FakeEvent(), torch.tensor(bad), f'marked {bad}'))

    mark(False)
    mark(True)
    log_probs(X, Y, shard=SHARD)
    mark(True)
    with pytest.raises(ValueError, match='marked True'):
        log_probs(X, Y, shard=SHARD)
    assert labels._pending == []
    mark(True)
    log_probs(X, Y, shard=SHARD)
    with pytest.raises(ValueError, match='marked True'):
        labels.raise_pending(wait=True)
