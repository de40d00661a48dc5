"""Samples come from the very distribution that a loss sees, and are the same under every layout."""

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks

from launch import gpt, options
from tests.launch.tiny_policy import PROMPTS, TEMPERATURE, VOCAB, sampled


def distributions(path, prompt):
    """log softmax(logits / temperature) over the true vocabulary after `prompt`, in float64 from Megatron's logits."""
    parallel_state.initialize_model_parallel()
    args = options.parse([f'--init-weights={path}', '--steps=1'])
    model = gpt.build(args, VOCAB)[0]
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits = model(ids, torch.arange(len(prompt))[None], None)
    return (logits[0, :, :VOCAB].double() / TEMPERATURE).log_softmax(-1)


def test_a_token_comes_as_often_as_its_probability_says(policy_file):
    n = 6000
    found = run_ranks(sampled, 1, policy_file, 1, 1, [PROMPTS[2]] * n, 8, 1, 500)[0]
    p = run_ranks(distributions, 1, policy_file, PROMPTS[2])[0][-1].exp().numpy()
    counts = np.bincount([c.tokens[0] for c in found], minlength=VOCAB)
    often = p * n >= 10
    expected = np.append(p[often], p[~often].sum()) * n
    observed = np.append(counts[often], counts[~often].sum())
    chi2, degrees = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert degrees > 20
    assert abs(chi2 - degrees) < 4 * (2 * degrees) ** 0.5


def test_each_log_prob_is_that_of_the_token_at_the_temperature(policy_file):
    found = run_ranks(sampled, 1, policy_file, 1, 1, PROMPTS[:3])[0]
    for prompt, completion in zip(PROMPTS, found):
        logs = run_ranks(distributions, 1, policy_file, [*prompt, *completion.tokens[:-1]])[0]
        own = logs[len(prompt) - 1 :].gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert completion.log_probs == pytest.approx(own.tolist(), abs=1e-5)


def test_a_completion_ends_with_the_end_token_or_at_its_most_tokens(policy_file):
    found = run_ranks(sampled, 1, policy_file, 1, 1, PROMPTS * 40, 4, 3)[0]
    ended = [completion for completion in found if completion.tokens[-1] == 1]
    assert ended
    assert all(1 not in completion.tokens[:-1] for completion in found)
    assert {len(completion.tokens) for completion in found if completion.tokens[-1] != 1} == {3}


@pytest.mark.parametrize(('ranks', 'tp', 'pp'), [(4, 2, 2), (3, 1, 1)])
def test_every_layout_samples_the_same(policy_file, ranks, tp, pp):
    prompts = PROMPTS * 2
    alone = run_ranks(sampled, 1, policy_file, 1, 1, prompts)[0]
    for split in run_ranks(sampled, ranks, policy_file, tp, pp, prompts):  # what is left over goes to data parallel
        assert [c.tokens for c in split] == [c.tokens for c in alone]
        for one, other in zip(split, alone):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_another_seed_and_each_sample_of_a_prompt_are_drawn_anew(policy_file):
    one, other = (run_ranks(sampled, 1, policy_file, 1, 1, [PROMPTS[0]] * 8, seed)[0] for seed in (1, 2))
    assert len({tuple(c.tokens) for c in [*one, *other]}) > 12
