"""What several tests of policies start from."""

import pytest
from ranks import run_ranks

from tests.launch.tiny_policy import PROMPTS, as_lines, sampled, write_weights


@pytest.fixture(scope='session')
def policy_file(tmp_path_factory):
    """Weights of a tiny policy."""
    path = tmp_path_factory.mktemp('policy') / 'policy.npz'
    run_ranks(write_weights, 1, path)
    return path


@pytest.fixture(scope='session')
def rollouts_file(policy_file):
    """32 rollouts that it has sampled."""
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    path = policy_file.parent / 'rollouts.jsonl'
    path.write_text(as_lines(run_ranks(sampled, 1, policy_file, 1, 1, prompts)[0]))
    return path
