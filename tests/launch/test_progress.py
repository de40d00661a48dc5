"""What a run leaves behind."""

import json
from argparse import Namespace

import numpy as np

from launch.figures.distillation_progress import DistillationRecorder
from launch.figures.policy_progress import PolicyRecorder
from launch.figures.preference_progress import PreferenceRecorder
from launch.figures.progress import Clock, TextRecorder

TRAIN = {'loss': 5.5, 'accuracy': 0.25, 'grad_norm': 0.5, 'lr': 1e-3, 'total_tokens': 100.0, 'elapsed_seconds': 2.0}
PNG = b'\x89PNG\r\n\x1a\n'


def record(args, active):
    recorder = TextRecorder(args, unigram_nats=6.0, active=active)
    recorder.held_out(0, {'loss': 9.0, 'accuracy': 0.0})
    for step in (1, 2):
        recorder.step()
        recorder.train(step, TRAIN)
    recorder.held_out(2, {'loss': 4.0, 'accuracy': 0.5})
    recorder.finish()


def test_figures_are_json_lines_and_the_curve_is_a_picture(tmp_path, capsys):
    args = Namespace(run=tmp_path / 'run', steps=2, save_weights=None, start=0)
    record(args, active=True)
    lines = [json.loads(line) for line in (args.run / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines] == [0, 1, 2, 2]
    assert [line.get('held_out_loss_nats') for line in lines] == [9.0, None, None, 4.0]
    assert lines[1] | {'tokens_per_second': 0} == {
        'step': 1,
        'train_loss_nats': 5.5,
        'token_accuracy': 0.25,
        'grad_norm': 0.5,
        'learning_rate': 1e-3,
        'tokens': 100,
        'tokens_per_second': 0,
        'seconds': 2.0,
    }
    assert (args.run / 'loss.png').read_bytes().startswith(PNG)
    shown = capsys.readouterr()
    assert shown.err == ''  # no progress bar where nobody watches
    assert '9.000 nats per token before, 4.000 after' in shown.out
    assert str(args.run / 'loss.png') in shown.out
    assert str(args.run / 'metrics.jsonl') in shown.out


def test_figures_of_an_earlier_run_are_replaced(tmp_path):
    args = Namespace(run=tmp_path, steps=2, save_weights=None, start=0)
    record(args, active=True)
    record(args, active=True)
    assert len((tmp_path / 'metrics.jsonl').read_text().splitlines()) == 4


def test_a_run_that_goes_on_keeps_the_figures_up_to_its_start(tmp_path):
    record(Namespace(run=tmp_path, steps=2, save_weights=None, start=0), active=True)
    file = tmp_path / 'metrics.jsonl'
    whole = file.read_text()
    file.write_text(whole + '{"step": 3, "train_lo')  # the process ended while it wrote
    recorder = TextRecorder(Namespace(run=tmp_path, steps=2, save_weights=None, start=1), unigram_nats=6.0, active=True)
    assert [json.loads(line)['step'] for line in file.read_text().splitlines()] == [0, 1]
    recorder.held_out(0, {'loss': 9.0, 'accuracy': 0.0})  # is there already
    recorder.train(2, TRAIN)
    recorder.held_out(2, {'loss': 4.0, 'accuracy': 0.5})
    recorder.finish()
    steps, kinds = zip(*((line['step'], 'train_loss_nats' in line) for line in map(json.loads, file.open())))
    assert (steps, kinds) == ((0, 1, 2, 2), (False, True, True, False))


def test_other_processes_write_and_show_nothing(tmp_path, capsys):
    record(Namespace(run=tmp_path / 'run', steps=2, save_weights=None, start=0), active=False)
    assert not (tmp_path / 'run').exists()
    assert capsys.readouterr() == ('', '')


def test_rollouts_show_reward_kl_clip_ratio_and_entropy(tmp_path, capsys):
    args = Namespace(run=tmp_path, steps=2, save_weights=tmp_path / 'w.npz', start=0)
    recorder = PolicyRecorder(args, active=True)
    policy = {'train/approx_kl': 0.125, 'train/clip_ratio': 0.25, 'train/entropy': 2.5, 'train/odd_reward': 3.0}
    for step in (1, 2):
        recorder.step()
        recorder.train(step, TRAIN | policy | {'mean_reward': 0.5, 'reward_std': 0.1})
    recorder.finish()
    shown = capsys.readouterr().out
    assert 'step 2  reward 0.500  loss  5.5000  KL 0.1250  clipped 25.0%  entropy 2.500' in shown
    assert str(tmp_path / 'policy.png') in shown
    assert str(tmp_path / 'w.npz') in shown
    assert (tmp_path / 'policy.png').read_bytes().startswith(PNG)
    lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert lines[1]['odd_reward'] == 3
    assert {'reward', 'approx_kl', 'clip_ratio', 'entropy'} <= set(lines[0])


def test_pairs_show_margin_accuracy_and_log_probs_and_end_with_a_table(tmp_path, capsys):
    args = Namespace(run=tmp_path, steps=2, save_weights=None, start=0)
    recorder = PreferenceRecorder(args, 0.5, active=True)
    before, after = np.array([[-4.0, -5], [-8, -6]]), np.array([[-3.0, -6], [-8, -7]])
    recorder.start(before)
    logps = {'chosen_logps': -5.5, 'rejected_logps': -6.5}
    measured = {'margin': 0.75, 'accuracy': 1.0}
    recorder.step()
    recorder.train(1, TRAIN | logps)
    recorder.step()
    recorder.train(2, TRAIN | logps | measured)
    recorder.held_out(2, {'loss': 0.5} | logps | measured)
    recorder.finish(before, after)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == (
        'step 0  held out        margin   0.000  accuracy   0.0%  log-prob -6.00 of chosen, -5.50 of rejected'
    )
    assert shown[1].startswith('step 1  loss  5.5000  log-prob -5.50 of chosen, -6.50 of rejected  grad norm')
    assert shown[2].startswith('step 2  loss  5.5000  margin   0.750  accuracy 100.0%  log-prob')
    assert 'of 2 held-out pairs: mean ± 1.96 standard errors' in shown
    assert any(line.split()[-6:] == ['0.750', '±', '0.490', '+0.750', '±', '0.490'] for line in shown)
    lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines] == [0, 1, 2, 2]
    assert 'margin' not in lines[1]
    assert lines[3]['held_out_margin'] == 0.75
    rows = [json.loads(line) for line in (tmp_path / 'held_out.jsonl').read_text().splitlines()]
    assert rows[0] == {'ref_chosen_logp': -4, 'ref_rejected_logp': -5, 'chosen_logp': -3, 'rejected_logp': -6}
    assert (tmp_path / 'preference.png').read_bytes().startswith(PNG)


def test_distillation_shows_divergence_and_loss_and_ends_with_both(tmp_path, capsys):
    for loss, teacher in (('gkd', 4.5), ('cross-entropy', 4.5), ('gkd', None)):
        args = Namespace(run=tmp_path / loss, steps=1, save_weights=None, start=0, loss=loss)
        recorder = DistillationRecorder(args, teacher, active=True)
        values = TRAIN | {'loss': 0.5, 'cross_entropy': 6.5}
        recorder.held_out(0, values)
        recorder.step()
        recorder.train(1, values)
        recorder.held_out(1, values | {'loss': 0.25, 'cross_entropy': 6.0})
        recorder.finish()
        shown = capsys.readouterr().out
        assert ('teacher  held-out loss 4.500 nats per token' in shown) is (teacher is not None)
        assert 'step 0  held-out divergence 0.5000 nats per token, loss 6.500, accuracy 25.0%' in shown
        assert ('step 1  divergence  0.5000  loss  6.500' in shown) is (loss == 'gkd')
        assert 'divergence     0.5000 nats per held-out token before, 0.2500 after' in shown
        assert '6.500 nats per token before, 6.000 after' + '; that of the teacher is 4.500' * (teacher == 4.5) in shown
        lines = [json.loads(line) for line in (args.run / 'metrics.jsonl').read_text().splitlines()]
        assert [line.get('held_out_divergence_nats') for line in lines] == [0.5, None, 0.25]
        assert lines[1].get('divergence_nats') == (0.5 if loss == 'gkd' else None)
        assert lines[1]['train_loss_nats'] == 6.5
        assert (args.run / 'distillation.png').read_bytes().startswith(PNG)


def test_the_clock_of_a_run_goes_on():
    clock, later = Clock(), Clock()
    later.load_state_dict({'seconds': 100.0})
    assert 100 <= later.seconds < 200
    assert clock.state_dict()['seconds'] < 100
    later.start()
    assert later.seconds < 100
