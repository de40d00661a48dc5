"""Training from a Hugging Face checkpoint, through its own tokenizer, and back to one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks

pytest.importorskip('transformers', reason='the extra hf is not installed')

import transformers

from launch import distillation, embedding, options, policy, preference, prepare, train, weights
from launch.datasets import data
from launch.datasets.documents import Turn
from launch.datasets.lines import DataError
from launch.datasets.texts import Texts
from tests import tiny_checkpoint as tiny
from tests.launch.tiny_policy import TEXT, as_groups, as_pairs
from tests.plugin_hub import StandIn
from twinkle_megatron.megatron import hf_config
from twinkle_megatron.megatron.huggingface import load_chunks
from twinkle_megatron.survive import StopSignals

ROOT = Path(__file__).parents[2]
TALK = [{'role': 'user', 'content': 'one two'}, {'role': 'assistant', 'content': 'three four'}]


@pytest.fixture(scope='module', autouse=True)
def _mbridge():
    """Imported where ranks are forked from, so that each need not; not while tests are collected, as that is slow."""
    import mbridge.models  # noqa: F401


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """Of Qwen3's form, tied, with a tokenizer and a chat template."""
    folder = tiny.write(tmp_path_factory.mktemp('hf') / 'model', 'qwen3', tie_word_embeddings=True)
    tiny.write_tokenizer(folder, TEXT)
    return folder


def in_ranks(args, module):
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    module.train(args, StopSignals())


def lines(path, text):
    path.write_text(text if isinstance(text, str) else '\n'.join(map(json.dumps, text)))
    return f'--data={path}'


def trained(folder, tmp_path, module, *argv):
    """Trains as the script does, and gives the figures."""
    out = tmp_path / 'out'
    argv = [f'--model={folder}', f'--save-model={out}', f'--runs={tmp_path / "runs"}', '--name=run', *argv]
    sizes = ['--micro-batch-size=2', '--micro-batches=2', '--log-every=1', '--lr=5e-3', '--steps=3']
    args = options.parse([*argv, *sizes])
    args.dataset, _ = prepare.prepare(args)
    again = options.parse([*argv, *sizes, f'--dataset={args.dataset}'])  # what each process does
    assert again.init_weights == folder
    run_ranks(in_ranks, args.tp * args.pp * args.dp, again, module, timeout=90)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in folder.iterdir())
    before, after = tiny.log_probs(folder, tiny.tokens()), tiny.log_probs(out, tiny.tokens())
    assert (before - after).abs().max() > 1e-3
    return [json.loads(line) for line in (tmp_path / 'runs/run/metrics.jsonl').read_text().splitlines()]


def nats(folder, samples):
    """Mean cross entropy of samples, as `transformers` gives it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids, labels = (torch.from_numpy(x).long() for x in (samples.inputs, samples.labels))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.double()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_text_is_trained_on_through_the_tokenizer_of_the_checkpoint(checkpoint, tmp_path):
    words = TEXT.split()
    text = [{'text': ' '.join(words[i : i + 5])} for i in range(20)] + [{'messages': TALK}]
    found = trained(checkpoint, tmp_path, train, lines(tmp_path / 't.jsonl', text), '--tp=2', '--pp=2')
    held_out = [line['held_out_loss_nats'] for line in found if 'held_out_loss_nats' in line]
    dataset = data.load(next((tmp_path / 'runs/data').iterdir()))
    assert held_out[0] == pytest.approx(nats(checkpoint, dataset.held_out), abs=1e-4)
    assert held_out[-1] == pytest.approx(nats(tmp_path / 'out', dataset.held_out), abs=1e-4)
    assert held_out[-1] < held_out[0]
    assert dataset.vocab_size == tiny.VOCAB


def test_pairs_are_trained_on(checkpoint, tmp_path):
    file = lines(tmp_path / 'p.jsonl', as_pairs(range(24)))
    found = trained(checkpoint, tmp_path, preference, file, '--loss=dpo', '--tp=2')
    margins = [line['margin'] for line in found if 'margin' in line]
    assert margins[0] == pytest.approx(0, abs=1e-5)  # it begins at the reference
    assert margins[-1] > 0.01


def test_rollouts_are_trained_on_from_ratios_of_1(checkpoint, tmp_path):
    ids = tiny.tokens(8, 7)
    ids[:, :3] = ids[:1, :3].where(torch.arange(8)[:, None] < 4, ids[4:5, :3])  # two prompts
    old = tiny.log_probs(checkpoint, ids)[:, 2:]
    text = [
        {'prompt': row[:3].tolist(), 'completion': row[3:].tolist(), 'old_logps': logps.tolist(), 'reward': i % 3}
        for i, (row, logps) in enumerate(zip(ids, old))
    ]
    text = [{'temperature': 1.0, 'num_generations': 4}, *text]
    found = trained(checkpoint, tmp_path, policy, lines(tmp_path / 'r.jsonl', text), '--loss=grpo', '--pp=2')
    assert found[0]['approx_kl'] == pytest.approx(0, abs=1e-9)
    assert found[-1]['approx_kl'] > 1e-3


def test_groups_of_texts_are_trained_on(checkpoint, tmp_path):
    file = lines(tmp_path / 'g.jsonl', as_groups(range(24)))
    trained(checkpoint, tmp_path, embedding, file, '--loss=infonce', '--packed')


def test_a_student_that_is_its_teacher_has_nothing_to_learn_at_first(checkpoint, tmp_path):
    text = lines(tmp_path / 't.jsonl', [{'text': f'{TEXT[i:]} {i}'} for i in range(20)])
    teacher = f'--teacher-weights={checkpoint}'
    found = trained(checkpoint, tmp_path, distillation, text, '--loss=gkd', teacher, '--tp=2', '--weight-decay=0.5')
    assert found[0]['held_out_divergence_nats'] == pytest.approx(0, abs=1e-6)


def test_a_teacher_may_be_of_another_architecture_with_a_larger_vocabulary_but_the_same_tokens(
    checkpoint, tmp_path, capsys
):
    teacher = tiny.write(tmp_path / 'teacher', 'qwen2', vocab_size=tiny.VOCAB + 7)
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        shutil.copy(checkpoint / name, teacher / name)
    of = ['--loss=gkd', f'--teacher-weights={teacher}']
    text = lines(tmp_path / 't.jsonl', [{'text': f'{TEXT[i:]} {i}'} for i in range(20)])
    found = trained(checkpoint, tmp_path, distillation, text, *of, '--pp=2')
    assert found[0]['held_out_divergence_nats'] > 0.01
    tiny.write_tokenizer(teacher, TEXT[::-1])
    message = f'{checkpoint} must have the tokens of {teacher}, and has others'
    assert message in told(capsys, f'--model={checkpoint}', *of)


# The tokenizer.


def texts_of(folder):
    return Texts(weights.read_about(folder))


def test_ids_are_those_of_the_tokenizer_and_the_end_comes_once(checkpoint):
    theirs, ours = transformers.AutoTokenizer.from_pretrained(checkpoint), texts_of(checkpoint)
    ids, trained_on = ours.document((Turn('one two'),))
    assert ids == [*theirs('one two').input_ids, theirs.eos_token_id]
    assert trained_on == [False, *[True] * (len(ids) - 1)]
    assert ours.document((Turn('one two<|im_end|>'),))[0] == ids
    written = '<|im_start|>user\none<|im_end|>'
    assert ours.ids(written) == theirs(written).input_ids
    assert ours.begin([]) == [theirs.eos_token_id]


@pytest.mark.parametrize('turns', [2, 4, 5])
def test_conversations_are_written_by_the_chat_template_and_answers_are_trained_on(checkpoint, turns):
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    roles = ('user', 'assistant', 'user', 'assistant', 'user')
    document = tuple(Turn(f'one {i} two', role) for i, role in zip(range(turns), roles))
    ids, trained_on = texts_of(checkpoint).document(document)
    messages = [{'role': turn.role, 'content': turn.text} for turn in document]
    assert ids == theirs.apply_chat_template(messages, tokenize=True, return_dict=True)['input_ids']
    answers = theirs.decode([token for token, trained in zip(ids, trained_on) if trained])
    assert answers == ''.join(f'one {i} two<|im_end|>\n' for i in (1, 3) if i < turns)


DROPS = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] if loop.last else m['content'][:3] }};{% endfor %}"
    '{% if add_generation_prompt %}assistant:{% endif %}'
)


def test_an_earlier_answer_that_the_template_shortens_is_not_trained_on(tmp_path):
    folder = tiny.write(tmp_path / 'model')
    theirs = tiny.write_tokenizer(
        folder, TEXT, DROPS.replace("m['content'] if", "m['content'] if m['role'] == 'user' or")
    )
    document = tuple(Turn(f'{i} two', role) for i, role in enumerate(('user', 'assistant', 'user', 'assistant')))
    ids, trained_on = texts_of(folder).document(document)
    assert theirs.decode(ids) == 'user:0 two;assistant:1 t;user:2 two;assistant:3 two;'
    assert theirs.decode([token for token, trained in zip(ids, trained_on) if trained]) == '3 two;'


def test_without_a_chat_template_a_prompt_goes_before_its_response_and_a_conversation_is_refused(tmp_path):
    folder = tiny.write(tmp_path / 'model')
    theirs = tiny.write_tokenizer(folder, TEXT, chat=None)
    ids, trained_on = texts_of(folder).document((Turn('one', 'user'), Turn(' two', 'assistant')))
    prompt, response = theirs('one').input_ids, theirs(' two').input_ids
    assert ids == [*prompt, *response, theirs.eos_token_id]
    assert trained_on == [False] * len(prompt) + [True] * (len(response) + 1)
    with pytest.raises(DataError, match='has no chat template to write it with'):
        texts_of(folder).document(tuple(Turn('one', role) for role in ('system', 'user', 'assistant')))


# Wrong calls, and the hub.


def told(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        options.parse([*map(str, argv)])
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_wrong_option_is_told(checkpoint, policy_file, tmp_path, capsys):
    own = (f'--model={checkpoint}',)
    for argv, message in (
        ((*own, '--tp=4'), 'num_key_value_heads 2 of the checkpoint must be a multiple of tp 4; try 2'),
        ((*own, '--pp=8'), 'num_hidden_layers 4 of the checkpoint must be a multiple of pp 8; try 4'),
        ((*own, '--hidden-size=64'), f'--hidden-size must be that of {checkpoint}, 32, got 64'),
        ((*own, '--vocab-size=400'), '--vocab-size is for a new tokenizer, and --model brings its own'),
        ((*own, f'--init-weights={policy_file}'), '--model and --init-weights say the same; give one of them'),
        ((*own, '--save-weights=w.npz'), '--save-weights is for the built-in GPT; --save-model FOLDER writes'),
        ((*own, f'--save-model={checkpoint}'), 'must be another folder than that of the checkpoint that was loaded'),
        ((*own, f'--save-model={tmp_path.parent}'), 'holds files already; remove it, or name another folder'),
        ((*own, '--revision=main'), f"a folder has no revision, got 'main' for {checkpoint}"),
        ((*own, f'--teacher-weights={policy_file}'), f'{checkpoint} must have the tokenizer of {policy_file}'),
        ((f'--teacher-weights={checkpoint}',), 'is a Hugging Face checkpoint, and teaches one: give --model'),
        (('--save-model=out',), '--save-model is for --model, which is not given'),
        ((f'--init-weights={checkpoint}',), f'a Hugging Face checkpoint is --model {checkpoint}'),
        (('--model=./none',), './none does not exist'),
        ((f'--model={tmp_path}',), f'{tmp_path} has no config.json, so it is no Hugging Face checkpoint'),
    ):
        assert message in told(capsys, *argv)


def test_a_tokenizer_that_is_not_there_or_of_another_model_is_told(tmp_path, capsys):
    folder = tiny.write(tmp_path / 'model')
    assert f'{folder} has no tokenizer (tokenizer.json, ' in told(capsys, f'--model={folder}')
    tiny.write_tokenizer(folder, TEXT, vocab_size=310)
    assert 'has ids up to 309, and the model a vocabulary of 301' in told(capsys, f'--model={folder}')
    (folder / 'tokenizer.json').write_text('{}')
    assert f'the tokenizer in {folder} cannot be read' in told(capsys, f'--model={folder}')


def test_a_missing_package_is_told_with_the_command_that_installs_it(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(hf_config, 'find_spec', lambda name: None if name == 'mbridge' else True)
    message = "need mbridge, not installed here: pip install -e '.[hf]' in a checkout of"
    assert message in told(capsys, f'--model={checkpoint}')


def test_a_repository_is_downloaded_once_and_then_taken_from_the_cache(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path))
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path))
    with StandIn() as hub:
        monkeypatch.setenv('HF_ENDPOINT', hub.url)
        files = {path.name: path.read_bytes() for path in checkpoint.iterdir()} | {'code.py': 'x'}
        commit = hub.push('group/tiny', files, 'v1')
        args = options.parse(['--model=group/tiny', '--revision=v1'])
        assert args.init_weights.name == commit
        assert {path.name for path in args.init_weights.iterdir()} == {path.name for path in checkpoint.iterdir()}
        assert hub.downloads('model.safetensors') == 1
        asked = len(hub.asked)
        again = options.parse(['--model=group/tiny', '--revision=v1', '--dataset=d'])
        assert again.init_weights == args.init_weights
        assert len(hub.asked) == asked
        assert f'nor is there a folder group/none here, in {Path.cwd()}' in told(capsys, '--model=group/none')
        found = run_ranks(load_from_hub, 2, 'group/tiny', tmp_path / 'other', timeout=60)
        assert found == [commit] * 2
        assert hub.downloads('model.safetensors') == 2


def load_from_hub(name, cache):
    parallel_state.initialize_model_parallel(2)
    return load_chunks(name, revision='v1', cache_dir=cache).commit


@pytest.mark.long
def test_the_script_trains_from_a_repository_and_saves(checkpoint, tmp_path, monkeypatch):
    text = lines(tmp_path / 't.jsonl', [{'text': f'{TEXT[i:]} {i}'} for i in range(20)])
    options_of_run = ['--save-model=out', '--steps=2', '--tp=2', '--pp=2', '--seq-length=64', '--save-dtype=bfloat16']
    with StandIn() as hub:
        commit = hub.push('group/tiny', {path.name: path.read_bytes() for path in checkpoint.iterdir()})
        monkeypatch.setenv('HF_ENDPOINT', hub.url)
        monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path / 'cache'))
        run = subprocess.run(
            [ROOT / 'launch/local.sh', '--model=group/tiny', text, *options_of_run],
            cwd=tmp_path,
            env={**os.environ, 'PYTHON': sys.executable},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert run.returncode == 0, run.stderr
        assert hub.downloads('model.safetensors') == 1
    assert 'Warning' not in run.stderr
    assert f'tokenizer of {tmp_path}/cache/models--group--tiny/snapshots/{commit}' in run.stderr
    assert all(tensor.dtype == torch.bfloat16 for tensor in tiny.tensors(tmp_path / 'out').values())
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out').dtype == torch.bfloat16
