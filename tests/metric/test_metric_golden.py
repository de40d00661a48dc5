"""Twinkle's recorded results of the metrics, and where its records are wrong the results by definition."""

from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch

from tests.policy_formulas import METRICS, Response, metric_of, records_of
from twinkle_megatron.metric import build_metric

RECORDS = torch.load(Path(__file__).parents[1] / 'golden' / 'metrics.pt', weights_only=True)
PLAIN = [record for record in RECORDS if record['cls'] in ('Accuracy', 'LossMetric')]
EQUAL = [record for record in PLAIN if 'error' not in record]
REFUSED = [record for record in PLAIN if 'error' in record]
POLICY = [record for record in RECORDS if record['cls'] in METRICS]
TOP = '_high_kl_records'


def replay(record: dict[str, Any]) -> Any:
    metric = build_metric(record['cls'], None, None, **record['init'])
    for inputs, outputs, keywords in record['ops']:
        metric.accumulate(inputs, outputs, **keywords)
    return metric


@pytest.mark.parametrize('record', EQUAL, ids=lambda record: record['name'])
def test_calculate_gives_the_recorded_result_and_resets(record):
    metric = replay(record)
    assert metric.calculate() == record['result']
    assert metric.calculate() == record['second_calculate']


@pytest.mark.parametrize('record', REFUSED, ids=lambda record: record['name'])
def test_what_twinkle_refused_as_a_list_counts_like_the_single_micro_batch(record):
    (single,) = [r for r in EQUAL if r['name'] == record['name'].removesuffix(' list')]
    assert replay(record).calculate() == single['result']


def responses_of(record: dict[str, Any]) -> list[Response]:
    """The recorded batch, sequence by sequence. Ready log-probs stay at whatever temperature they have."""
    ((inputs, outputs, extra),) = record['ops']
    parts = inputs if isinstance(inputs, list) else [inputs]
    joined = {k: torch.cat(v) if isinstance(v, list) else v for k, v in outputs.items()}
    found = []
    for i, row in enumerate(torch.cat([part['labels'] for part in parts])):
        at = row != -100
        new = joined['logps'][i, at].double()
        old = extra.get('old_logps', joined['logps'])
        old = (old[i, at] if isinstance(old, torch.Tensor) else torch.tensor(old[i], dtype=torch.float32)).double()
        advantage = torch.tensor(extra['advantages'][i] if 'advantages' in extra else 0.0).double()
        entropy = joined['entropies'][i, at].double() if 'entropies' in joined else new
        where, tokens = at.nonzero()[:, 0].tolist(), row[at].tolist()
        found.append(Response(new, old, new, advantage, entropy, positions=where, token_ids=tokens))
    return found


@pytest.mark.parametrize('record', POLICY, ids=lambda record: record['name'])
def test_policy_metrics_are_those_of_the_records_by_definition(record):
    """Log-probs are not multiplied by a temperature, and the highest KL is that of the whole step: there the records
    differ. Where they say nothing against themselves they hold."""
    metric = replay(record)
    result, again = metric.calculate(), metric.calculate()
    want = metric_of(record['cls'], record['init'], responses_of(record))
    top = result.pop(TOP, [])
    keys = record['result'].keys() - {TOP}
    assert result.keys() == keys
    assert result == pytest.approx({key: want[key] for key in keys}, rel=2e-6, abs=1e-7)
    if not record['why']:
        assert result == pytest.approx(record['result'], rel=2e-6, abs=1e-7)
    wanted = records_of(record['init'].get('top_k_kl', 0), responses_of(record))
    assert len(top) == len(wanted)
    for mine, right in zip(top, wanted):
        assert mine == pytest.approx(right, rel=2e-5)
        assert any(mine == pytest.approx(theirs, rel=2e-5) for theirs in record['result'][TOP]), 'its fields hold'
    assert again == record['second_calculate']


def test_what_the_records_say_with_why():
    """So that a record which is right is not set aside: what each of them is judged by."""
    reasons = {record['name'].split(' ', 1)[-1]: record['why'] for record in POLICY if record['why']}
    assert reasons == {
        'list': 'where old_logps are full rows in a list upstream misaligns',
        'T=2': "upstream's rescaling by temperature is not the T=1 log-prob and changes the KL",
        'CISPOMetric': 'upstream counts low clips the loss never makes',
        'old tensor': 'upstream counts low clips the loss never makes',
        'no old': 'upstream counts low clips the loss never makes',
    }


def test_ready_log_probs_are_not_taken_to_another_temperature():
    """Numbers by hand: the record multiplies −3.888 by 2."""
    (record,) = [r for r in POLICY if r['name'] == 'GRPOMetric T=2']
    (plain,) = [r for r in POLICY if r['name'] == 'GRPOMetric old tensor']
    assert replay(record).calculate() == pytest.approx(plain['result'], rel=2e-6)
    assert record['result']['train/mean_new_logp'] == pytest.approx(2 * plain['result']['train/mean_new_logp'])


def test_full_rows_in_a_list_are_aligned_like_a_tensor():
    """What the records call misaligned upstream."""
    (record,) = [r for r in POLICY if r['name'] == 'GRPOMetric list']
    (inputs, outputs, extra) = record['ops'][0]
    labels = torch.cat([part['labels'] for part in inputs])
    rows = [torch.full((10,), torch.nan).masked_scatter_(row != -100, torch.tensor(old)).tolist()
            for row, old in zip(labels, extra['old_logps'])]  # fmt: skip
    again = {**record, 'ops': [(inputs, outputs, {**extra, 'old_logps': rows})]}
    assert replay(again).calculate() == replay(record).calculate()


def test_rewards_by_definition():
    """The documented names beside Twinkle's, and a reset. The two lists of the first call have no common samples, so
    that `mean_reward` is of the second call alone."""
    (record,) = [r for r in RECORDS if r['cls'] == 'CompletionRewardMetric']
    metric = replay(record)
    result = metric.calculate()
    assert {key: value for key, value in result.items() if '/' in key} == pytest.approx(record['result'], rel=1e-14)
    assert {key: value for key, value in result.items() if '/' not in key} == {
        'generation_time': '2.0000', 'weight_sync_time': '0.5000', 'mean_reward': '0.0000', 'reward_std': '0.0000',
        'mean_completion_length': '5.3333', 'completion_length_std': f'{stdev([3, 5, 8]):.4f}',
    }  # fmt: skip
    assert metric.calculate() == {}
