"""Training on rollouts: ratios begin at 1, and the figures are the same however it is split."""

import json

import numpy as np
import pytest
from ranks import run_ranks

from launch.kinds import ROLLOUTS
from tests.launch.tiny_policy import options_for, trained

PNG = b'\x89PNG\r\n\x1a\n'
LAYOUTS = {
    'tp2 pp2': (4, ['--tp=2', '--pp=2']),
    'dp2': (2, ['--dp=2']),
    'packed tp2 pp2': (4, ['--tp=2', '--pp=2', '--packed']),
    'linear': (2, ['--tp=2', '--head=linear']),
}


@pytest.fixture
def train(policy_file, rollouts_file, tmp_path):
    """Trains on `ranks` ranks with each of some lists of options; for each the lines of figures and the weights."""

    def run(ranks, *lists):
        runs = [
            options_for(rollouts_file, policy_file, tmp_path, f'--name={ranks}-{i}', *more)
            for i, more in enumerate(lists)
        ]
        ends = run_ranks(trained, ranks, *runs, timeout=120)[0]
        texts = [(args.run / 'metrics.jsonl').read_text().splitlines() for args in runs]
        assert all((args.run / 'policy.png').read_bytes().startswith(PNG) for args in runs)
        return [([json.loads(line) for line in lines], end) for lines, end in zip(texts, ends)]

    return run


def without_times(line):
    return {name: x for name, x in line.items() if name not in ('tokens_per_second', 'seconds')}


def assert_same(one, other):
    """Figures to 1e-4; those of the largest tokens, which no mean smooths, and differences around 0 beside an absolute
    1e-5."""
    for mine, theirs in zip(*(map(without_times, lines) for lines in (one[0], other[0])), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, tensor in one[1].items():
        np.testing.assert_allclose(tensor, other[1][name], rtol=1e-3, atol=1e-5)


def test_the_ratios_of_the_first_step_are_1_at_the_temperature_of_the_sampler(train):
    ((first, second), _) = train(1, ['--steps=2'])[0]
    assert first['token_ratio_max'] == pytest.approx(1, abs=1e-5)
    assert abs(first['logp_diff_mean']) < 1e-6
    assert 0 <= first['token_kl_max'] < 1e-9
    assert first['clip_ratio'] == 0
    assert second['approx_kl'] > 1e-6  # and then the policy moves


@pytest.mark.parametrize('layout', ['tp2 pp2', *(pytest.param(x, marks=pytest.mark.long) for x in
                                    ('dp2', 'packed tp2 pp2', 'linear'))])  # fmt: skip
def test_figures_and_weights_are_the_same_under_every_layout_and_packed(train, layout):
    ranks, options = LAYOUTS[layout]
    both = ['--epochs=2', '--beta=0.1', '--entropy-coef=0.01', '--clip-range-high=0.3']
    one, packed = train(1, both, [*both, '--packed'])
    assert_same(one, packed)
    assert_same(one, train(ranks, [*both, *options])[0])


def test_every_loss_trains_the_same_on_one_process_and_on_data_parallel_ranks(train):
    lists = [[f'--loss={loss}', '--steps=3'] for loss in ROLLOUTS.losses]
    for one, two in zip(train(1, *lists), train(2, *([*options, '--dp=2'] for options in lists))):
        assert one[0][2]['approx_kl'] > 0
        assert_same(one, two)


def test_the_reference_is_the_policy_of_the_start(train):
    (plain, _), (held, _) = train(1, *(['--epochs=4', f'--beta={beta}', '--lr=3e-3'] for beta in (0, 3)))
    assert without_times(plain[0]) == pytest.approx(without_times(held[0]), rel=1e-4, abs=1e-5)  # its KL begins at 0
    assert held[-1]['approx_kl'] < 0.5 * plain[-1]['approx_kl']


def test_the_loss_of_all_rollouts_begins_at_0_where_advantages_cancel_and_falls(train):
    (lines, _) = train(1, ['--micro-batch-size=8', '--steps=12'])[0]
    losses = [line['loss'] for line in lines]
    assert losses[0] == pytest.approx(0, abs=1e-6)
    assert losses[-1] < min(-0.1, *losses[:4])
