"""Options are checked before anything is started, and a wrong one is told in one line."""

from dataclasses import replace
from pathlib import Path

import pytest

from launch import options, weights


def test_the_run_is_named_after_the_data_the_loss_and_the_layout(policy_file):
    assert options.parse(['--tp', '2', '--pp', '2']).run == Path('runs/python-reference-tp2-pp2')
    assert options.parse(['--data', 'a/my.jsonl', '--dp', '2', '--runs', 'out']).run == Path('out/my-tp1-pp1-dp2')
    assert options.parse(['--head', 'linear']).run == Path('runs/python-reference-tp1-pp1-linear')
    rollouts = options.parse(['--loss', 'gspo', '--data', 'r.jsonl', '--init-weights', str(policy_file)])
    assert rollouts.run == Path('runs/r-gspo-tp1-pp1')
    pairs = options.parse(['--loss', 'orpo', '--data', 'p.jsonl', '--init-weights', str(policy_file), '--tp', '2'])
    assert pairs.run == Path('runs/p-orpo-tp2-pp1')
    beside = options.parse(['--loss', 'gkd', '--teacher-weights', str(policy_file)])
    assert beside.run == Path('runs/python-reference-gkd-tp1-pp1')
    assert options.parse(['--name', 'first']).run == Path('runs/first')


GRPO = 'grpo, gspo, sapo, cispo, bnpo, dr-grpo'
DPO = 'dpo, simpo, cpo, orpo'
BESIDE = '--teacher-weights FILE'


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        ('--steps abc', "argument --steps: must be a whole number of at least 1, got 'abc'"),
        ('--steps 0', "argument --steps: must be a whole number of at least 1, got '0'"),
        ('--steps 1.5', "argument --steps: must be a whole number of at least 1, got '1.5'"),
        ('--lr nan', "argument --lr: must be a number above 0, got 'nan'"),
        ('--lr inf', "argument --lr: must be a number above 0, got 'inf'"),
        ('--lr 0', "argument --lr: must be a number above 0, got '0'"),
        ('--tp 3', '--heads 4 must be a multiple of --tp 3; try --tp 2 or 4'),
        ('--pp 8', '--layers 4 must be a multiple of --pp 8; try --pp 2 or 4'),
        ('--dp 3', '--micro-batches 2 must be a multiple of --dp 3; try --dp 1 or 2'),
        ('--heads 3', '--hidden-size 128 must be a multiple of --heads 3; try --heads 2 or 4'),
        ('--hidden-size 12', '--hidden-size 12 / --heads 4 must be even, for rotary embeddings'),
        ('--head lm', "argument --head: must be auto, logits or linear, got 'lm'"),
        ('--warmup 1', '--warmup must be a share of the steps below 1, got 1'),
        ('--name a/b', "--name must be the name of one folder, got 'a/b'"),
        ('--name ..', "--name must be the name of one folder, got '..'"),
        ('--name data', '--name must not be data, where runs keeps what was prepared'),
        ('--step 5', 'unrecognized arguments: --step 5'),
        ('--steps 5 --epochs 1', '--steps and --epochs say the same; give one of them'),
        ('--loss grpo', '--loss grpo needs --data FILE, the rollouts; docs/rollouts.md tells what it must hold'),
        (
            '--loss bnpo --data r',
            '--loss bnpo needs --init-weights FILE or --model, the policy that sampled the rollouts',
        ),
        ('--loss dpo', '--loss dpo needs --data FILE, the pairs; docs/pairs.md tells what it must hold'),
        (
            '--loss orpo --data p',
            '--loss orpo needs --init-weights FILE or --model, the policy to start from, which is the reference',
        ),
        (
            '--loss infonce',
            '--loss infonce needs --data FILE, the groups of texts; docs/embeddings.md tells what it must hold',
        ),
        (
            '--loss infonce --data g',
            '--loss infonce needs --init-weights FILE or --model, the language model that becomes an encoder',
        ),
        ('--pooling max', "argument --pooling: must be last, mean or first, got 'max'"),
        ('--pooling mean', '--pooling is for --loss infonce, got --loss cross-entropy'),
        ('--loss dpo --hard-negatives 2', '--hard-negatives is for --loss infonce, got --loss dpo'),
        ('--hard-negatives 0', "argument --hard-negatives: must be a whole number of at least 1, got '0'"),
        ('--loss infonce --beta 1', f'--beta is for --loss cross-entropy, {GRPO}, {DPO}, gkd, got --loss infonce'),
        ('--advantages none', f'--advantages is for --loss {GRPO}, got --loss cross-entropy'),
        ('--beta 0', f'--beta with --loss cross-entropy is of the divergence from {BESIDE}, and needs it'),
        ('--packed', f'--packed is for --loss {GRPO}, {DPO}, infonce, got --loss cross-entropy'),
        (
            '--loss grpo --eval-every 2',
            f'--eval-every is for --loss cross-entropy, {DPO}, gkd, infonce, got --loss grpo',
        ),
        ('--loss cpo --gamma 1', '--gamma is for --loss simpo, got --loss cpo'),
        ('--loss simpo --loss-type ipo', '--loss-type is for --loss dpo, got --loss simpo'),
        ('--loss grpo --held-out p', f'--held-out is for --loss {DPO}, infonce, got --loss grpo'),
        ('--loss-type dpo', "argument --loss-type: must be sigmoid, hinge, ipo or kto, got 'dpo'"),
        ('--clip-range -1', "argument --clip-range: must be a number of at least 0, got '-1'"),
        ('--advantages all', "argument --advantages: must be group, batch or none, got 'all'"),
        (
            '--loss gkd',
            f'--loss gkd needs {BESIDE}, or --data FILE with the best tokens of a teacher; docs/distillation.md tells'
            ' what it must hold',
        ),
        (
            '--loss gkd --data t',
            '--loss gkd without --teacher-weights needs either --init-weights FILE, or --tokenizer FILE with the'
            ' tokenizer.json of the teacher',
        ),
        (
            '--loss gkd --data t --tokenizer t --topk 2',
            '--topk is for --teacher-weights; a file of best tokens holds as many as it holds',
        ),
        (
            '--loss gkd --data t --tokenizer t --topk-tail bucket --temperature 2',
            '--topk-tail bucket must be at --temperature 1 without --teacher-weights, got 2: the other tokens of the'
            ' teacher cannot be tempered',
        ),
        ('--loss gkd --data t --tokenizer t --beta 1.5', '--beta must be at most 1 with --loss gkd, got 1.5'),
        ('--loss gkd --vocab-size 400', '--vocab-size is for --loss cross-entropy, got --loss gkd'),
        ('--loss dpo --teacher-weights t', '--teacher-weights is for --loss cross-entropy, gkd, got --loss dpo'),
        ('--temperature 2', '--temperature is for --loss gkd, infonce, got --loss cross-entropy'),
        ('--topk-tail none', "argument --topk-tail: must be renormalize or bucket, got 'none'"),
        ('--loss gkd --teacher-weights none.npz', f'none.npz does not exist (looked from {Path.cwd()})'),
        ('--init-weights none.npz', f'none.npz does not exist (looked from {Path.cwd()})'),
    ],
)
def test_a_wrong_option_is_told_and_ends_with_2(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        options.parse(argv.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f'error: {message}\n')


def test_defaults_suit_the_loss(policy_file):
    text = options.parse([])
    assert (text.steps, text.epochs, text.lr, text.vocab_size, text.layers) == (250, None, 2e-3, 8000, 4)
    given = ['--loss', 'grpo', '--data', 'r.jsonl', '--init-weights', str(policy_file)]
    rollouts = options.parse(given)
    assert (rollouts.steps, rollouts.epochs, rollouts.lr, rollouts.clip_range) == (None, 2, 5e-4, 0.2)
    assert options.steps_of(rollouts, 33) == 9  # 2 epochs of 33 rollouts, 8 a step
    assert options.steps_of(options.parse([*given, '--steps', '7']), 33) == 7
    for loss, beta in (('dpo', 0.1), ('simpo', 2.5), ('cpo', 0.1), ('orpo', 0.1)):
        pairs = options.parse([*given, '--loss', loss])
        assert (pairs.steps, pairs.epochs, pairs.lr, pairs.beta, pairs.packed) == (None, 1, 2e-4, beta, False)
    encoder = options.parse([*given, '--loss', 'infonce'])
    assert (encoder.steps, encoder.epochs, encoder.lr, encoder.eval_every) == (None, 2, 1e-3, 20)
    assert (encoder.temperature, encoder.pooling, encoder.hard_negatives) == (0.05, 'last', None)
    gkd = options.parse(['--loss', 'gkd', '--teacher-weights', str(policy_file)])
    assert (gkd.steps, gkd.lr, gkd.beta, gkd.temperature, gkd.topk) == (250, 2e-3, 0.5, 1, None)
    assert (gkd.layers, gkd.hidden_size) == (4, 128)  # those of the teacher are 2 and 32


def test_values_that_no_loss_of_pairs_takes_are_refused(policy_file, capsys):
    given = ['--data', 'p.jsonl', '--init-weights', str(policy_file)]
    for argv, message in (
        ('--loss dpo --beta 0', '--beta must be above 0 with --loss dpo, got 0'),
        ('--loss dpo --label-smoothing 0.6', '--label-smoothing must be at most 0.5, got 0.6'),
        (
            '--loss dpo --label-smoothing 0.1 --loss-type ipo',
            '--label-smoothing is for --loss-type sigmoid, got --loss-type ipo',
        ),
    ):
        with pytest.raises(SystemExit):
            options.parse([*given, *argv.split()])
        assert capsys.readouterr().err.endswith(f'error: {message}\n')
    assert options.parse([*given, '--loss', 'orpo', '--beta', '0']).beta == 0


def test_an_encoder_has_no_head_of_logits(policy_file, capsys):
    with pytest.raises(SystemExit):
        options.parse(['--loss=infonce', '--data=g', f'--init-weights={policy_file}', '--head=linear'])
    message = 'error: --head is for losses of tokens, got --head linear with --loss infonce\n'
    assert capsys.readouterr().err.endswith(message)


def test_sizes_that_are_not_those_of_the_weights_are_refused(policy_file, capsys):
    assert options.parse(['--init-weights', str(policy_file), '--layers', '2']).hidden_size == 32
    for option, message in (
        ('--layers=3', f'--layers must be that of {policy_file}, 2, got 3'),
        ('--vocab-size=500', '--vocab-size is for a new tokenizer, and --init-weights brings its own'),
    ):
        with pytest.raises(SystemExit):
            options.parse(['--init-weights', str(policy_file), option])
        assert capsys.readouterr().err.endswith(f'error: {message}\n')


def test_a_teacher_that_does_not_fit_the_student_or_the_layout_is_refused(policy_file, tmp_path, capsys):
    about = weights.read_about(policy_file)
    weights.save(tmp_path / 'thirds.npz', {}, replace(about, heads=3, layers=3))
    weights.save(tmp_path / 'other.npz', {}, replace(about, tokenizer='{}'))
    of = ['--loss=gkd', f'--teacher-weights={policy_file}']
    for argv, message in (
        ([*of, '--beta=2'], '--beta must be at most 1 for a divergence, got 2'),
        ([*of, '--topk-tail=bucket'], '--topk-tail bucket needs --topk N'),
        ([*of, '--tokenizer=t'], '--tokenizer is for a file of best tokens, and --teacher-weights brings its own'),
        ([*of, '--tp=4', '--pp=4'], f'{policy_file} has 2 layers, which must be a multiple of --pp, got --pp 4'),
        (
            ['--loss=gkd', f'--teacher-weights={tmp_path / "thirds.npz"}', '--tp=2'],
            f'{tmp_path / "thirds.npz"} has 3 heads, which must be a multiple of --tp, got --tp 2',
        ),
        (
            [*of, f'--init-weights={tmp_path / "other.npz"}'],
            f'{tmp_path / "other.npz"} must have the tokenizer of {policy_file}, and has another one',
        ),
        (
            [f'--teacher-weights={policy_file}', '--vocab-size=400'],
            '--vocab-size is for a new tokenizer, and --teacher-weights brings its own',
        ),
    ):
        with pytest.raises(SystemExit):
            options.parse(argv)
        assert capsys.readouterr().err.endswith(f'error: {message}\n')


def test_the_help_names_the_default_of_every_option(capsys):
    with pytest.raises(SystemExit):
        options.parse(['--help'])
    said = ' '.join(capsys.readouterr().out.split())
    for part in (
        '(250; of rollouts, pairs and embeddings as --epochs says)',
        '(2 of rollouts; 1 of pairs; 2 of embeddings)',
        '(0.002; of rollouts 0.0005; of pairs 0.0002; of embeddings 0.001)',
        '(1 of gkd; 0.05 of infonce)',
        'docs/embeddings.md',
        '(0 of rollouts; 0.1 of pairs, but 2.5 of simpo; 0.5 of gkd)',
        'docs/distillation.md',
        '(50; of pairs and embeddings 20)',
        'docs/pairs.md',
        'docs/rollouts.md',
    ):
        assert part in said
