"""The benchmarks run, and what they print and write is complete. Their figures are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ['--tp', '2', '--tokens', '64', '--vocab', '512', '--rounds', '1', '--no-megatron', '--no-scaling']
ROWS = {
    'token_stats': ['compiled', 'compiled, reuse_storage', 'compiled, entropy', 'eager', 'eager, entropy'],
    'linear_head': ['ours', 'ours, workspace 64 MiB', 'ours, into main_grad', 'ours, frozen weight', 'ours, eager'],
    'divergence': ['plain, beta 0.5', 'ours, beta 0.5', 'ours, beta 0', 'ours, beta 1', 'ours, eager, beta 0.5'],
}


@pytest.mark.parametrize(
    ('name', 'options', 'dtypes'),
    [
        ('token_stats', ['--dtype', 'bfloat16'], []),
        pytest.param(
            'linear_head',
            ['--hidden', '16', '--dtype', 'bfloat16', 'float32'],
            ['bfloat16', 'float32'],
            marks=pytest.mark.long,
        ),
        pytest.param('divergence', ['--hidden', '16', '--dtype', 'bfloat16'], [], marks=pytest.mark.long),
    ],
)
def test_benchmark_prints_its_table_and_writes_its_figures(name, options, dtypes, tmp_path):
    file = tmp_path / 'figures.json'
    command = [sys.executable, f'benchmarks/{name}.py', *SMALL, *options, '--json', str(file)]
    environment = {**os.environ, 'TORCHDYNAMO_DISABLE': '1', 'CUDA_VISIBLE_DEVICES': ''}  # compiles would take seconds
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    record = json.loads(file.read_text())
    assert '64 tokens' in record['about']['case']
    assert 'vocabulary 512' in record['about']['case']
    assert record['about']['case'] in done.stdout
    tables = [record['comparison'][dtype] for dtype in dtypes] if dtypes else [record['comparison']]
    lines = done.stdout.splitlines()
    for figures in tables:
        assert set(ROWS[name]) <= set(figures)
        for row, result in figures.items():
            assert len(result['seconds']) == 1
            assert result['ms'] == pytest.approx(result['seconds'][0] * 1e3)
            assert any(line.startswith(f'{row} ') for line in lines), row
    assert sum(line.startswith('method ') for line in lines) == len(tables)
