"""A tiny policy in a file of weights, rollouts that it has sampled, pairs, groups, and trainings on them, on ranks."""

import json

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from launch import gpt, options, policy, prepare, sampling, weights
from launch.datasets import tokens
from launch.datasets.documents import Turn
from twinkle_megatron import MegatronModel
from twinkle_megatron.survive import StopSignals

TEXT = 'one two three four five six seven eight nine ten ' * 3 + 'a = f(b) + 1 = 2 3'
VOCAB = 301  # odd: Megatron pads it to a multiple of its own
TEMPERATURE = 0.7
PROMPTS = [[0, *range(10 + i, 13 + 2 * i)] for i in range(8)]


def write_weights(path):
    """2 layers, random, with rather sure opinions."""
    parallel_state.initialize_model_parallel()
    args = options.parse(['--layers=2', '--hidden-size=32', '--save-weights', str(path), '--steps=1'])
    tokenizer = tokens.train_tokenizer([(Turn(TEXT),)], vocab_size=VOCAB)
    chunk = gpt.build(args, tokenizer.get_vocab_size())[0]
    chunk.module.output_layer.weight.data.mul_(5)
    gpt.save_weights(args, chunk, tokenizer.get_vocab_size(), tokenizer.to_str())


def sampled(path, tp, pp, prompts, seed=3, max_tokens=6, micro_batch_size=7):
    """Completions of the policy in `path`, the same on every rank."""
    args = options.parse([f'--init-weights={path}', f'--tp={tp}', f'--pp={pp}', '--steps=1'])
    parallel_state.initialize_model_parallel(tp, pp)
    chunk = gpt.build(args, VOCAB)[0]
    model = MegatronModel(chunk, vocab_size=VOCAB, head='logits')
    stop = frozenset([tokens.SPECIAL_IDS[tokens.END]])
    settings = {'temperature': TEMPERATURE, 'max_tokens': max_tokens, 'micro_batch_size': micro_batch_size}
    return sampling.sample_completions(model, prompts, seed=seed, stop=stop, **settings)


def as_lines(completions):
    """A file of rollouts of `PROMPTS`, 4 each, with two rewards."""
    lines = [{'temperature': TEMPERATURE, 'num_generations': 4}]
    for i, completion in enumerate(completions):
        found = {'prompt': PROMPTS[i // 4], 'completion': completion.tokens, 'old_logps': completion.log_probs}
        reward = {'odd': sum(token % 2 for token in completion.tokens), 'short': -0.1 * len(completion.tokens)}
        lines.append(found | {'reward': reward})
    return '\n'.join(map(json.dumps, lines))


def as_pairs(seeds):
    """A file of a pair for each of these numbers: chosen are words in the order in which the policy counts."""
    words, lines = TEXT.split()[:10], []
    for seed in seeds:
        first, length = seed % 6, 2 + seed % 3
        chosen = words[first : first + length]
        lines.append({'prompt': f'{seed}:', 'chosen': f' {" ".join(chosen)}', 'rejected': f' {" ".join(chosen[::-1])}'})
    return '\n'.join(map(json.dumps, lines))


def as_groups(seeds):
    """A file of a group for each of these numbers: some words, the words that follow them, and two negatives."""
    words, lines = TEXT.split()[:10], []
    for seed in seeds:
        first, length = seed % 10, 2 + seed % 3
        texts = [' '.join((words * 3)[start : start + length]) for start in (first, first + 2, first + 5, first + 7)]
        anchor, positive, *negatives = texts
        lines.append({'anchor': f'{seed}: {anchor}', 'positive': f'{positive} {seed}', 'negatives': negatives})
    return '\n'.join(map(json.dumps, lines))


def numbers(*values):
    """A tensor of whole numbers."""
    return torch.tensor(values, dtype=torch.int64)


def options_for(rollouts, weights_file, runs, *more):
    """Checked options and prepared data of a training."""
    files = [f'--data={rollouts}', f'--init-weights={weights_file}', f'--runs={runs}', f'--save-weights={runs}/end.npz']
    sizes = ['--micro-batch-size=4', '--micro-batches=4', '--lr=1e-3', '--log-every=1']
    args = options.parse([*files, *sizes, '--loss=grpo', *more])
    args.dataset, _ = prepare.prepare(args)
    return args


def trained(*runs, train=policy.train):
    """Calls `train` with each of these options; for each the weights it ends with, on the first rank."""
    parallel_state.initialize_model_parallel(runs[0].tp, runs[0].pp)
    found = []
    for args in runs:
        train(args, StopSignals())
        dist.barrier()  # the first rank has written its files
        found.append(weights.read(args.save_weights) if dist.get_rank() == 0 else None)
    return found
