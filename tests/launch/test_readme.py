"""The examples of README.md and CONTRIBUTING.md run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def examples(name):
    return [
        re.sub('^   ', '', code, flags=re.M)
        for code in re.findall(r'```python\n(.*?)```', (ROOT / name).read_text(), re.S)
    ]


def test_first_examples_train_on_two_ranks(tmp_path):
    first, responses, preference, distillation, encoder = examples('README.md')[:5]
    end = 'dist.destroy_process_group()'
    more = f"{responses}\nassert metrics['train/approx_kl'] > 0 and output['loss'] != 0\n"
    more += f"{preference}\nassert float(metrics['margin']) > 0 and output['loss'] < 0.693\n"
    more += f"{distillation}\nassert 0 < divergences[-1] < divergences[0] and output['loss'] > 0\n"
    more += f"{encoder}\nassert similarity['pos_sim'] > similarity['neg_sim'] and len(embeddings) == 2\n{end}"
    (tmp_path / 'first.py').write_text(first.replace(end, more))
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', 'first.py']
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    losses = [float(line.split()[1]) for line in lines]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert "'total_tokens': 101" in lines[0]


def test_examples_without_a_model_run():
    names = {}
    exec(examples('README.md')[5], names)
    assert names['loss'].isfinite()
    assert names['logits'].grad[:, 1000:].eq(0).all()
    assert torch.equal(names['ids'][:, 0], names['best'])
    exec(examples('README.md')[6], names)
    built = torch.nn.functional.cross_entropy((names['hidden'] @ names['weight'].T)[:, :1000], names['target'])
    torch.testing.assert_close(names['loss'], built)
    assert names['hidden'].grad.abs().sum() > 0


@pytest.fixture(scope='module')
def contributed():
    """The classes of CONTRIBUTING.md."""
    lines = ['import math', 'from typing import Any, Mapping', 'from torch import Tensor']
    lines += [
        'from twinkle_megatron.loss.base import TokenLoss',
        'from twinkle_megatron.vocab_parallel import TokenStats',
    ]
    lines += [
        'from twinkle_megatron.metric import SUM, Metric',
        'from twinkle_megatron.metric.base import checked_keywords',
    ]
    names = {}
    exec('\n'.join(lines + examples('CONTRIBUTING.md')[1:]), names)
    return names


def test_example_of_a_loss_computes_its_formula(contributed):
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, 2, -100], [6, 0, 3]])
    result = contributed['FocalLoss'](gamma=3.0)({'labels': labels}, {'logits': logits})
    p = logits.detach().softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels != -100]
    assert result['loss'].item() == pytest.approx((-((1 - p) ** 3) * p.log()).mean().item(), rel=1e-12)
    with pytest.raises(ValueError, match="'gama'; did you mean 'gamma'"):
        contributed['FocalLoss'](gama=3.0)


def test_example_of_a_metric_is_the_exp_of_the_mean_over_tokens(contributed):
    metric = contributed['Perplexity']()
    for logps, labels in (([-1.0, 0.0], [3, -100]), ([-2.0, -3.0], [4, 5])):
        metric.accumulate({'labels': torch.tensor([labels])}, {'logps': torch.tensor([logps])})
    assert metric.values()['perplexity'] == pytest.approx(torch.tensor(2.0, dtype=torch.float64).exp().item())
