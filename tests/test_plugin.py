"""Losses and metrics from hubs and files: what is executed, from which revision, and what is said when it cannot be."""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from tests.plugin_hub import StandIn
from twinkle_megatron.groups import Groups
from twinkle_megatron.loss import Loss
from twinkle_megatron.metric import Metric
from twinkle_megatron.plugin import is_address, load_plugin

HUBS = ['hf', 'ms']
LOSS = """
from twinkle_megatron.loss import Loss

class Scaled(Loss):
    def __call__(self, inputs, outputs, **extra):
        return {{'loss': {factor} * outputs['logps'].sum(), 'num_tokens': 0}}
"""
ONE, TWO = LOSS.format(factor=1), LOSS.format(factor=2)
METRIC = """
from twinkle_megatron.metric import Metric

class Calls(Metric):
    def __init__(self, device_mesh=None, process_group=None):
        super().__init__(device_mesh, process_group)
        self.calls = 0
    def accumulate(self, inputs, outputs, **kwargs):
        self.calls += 1
    def calculate(self):
        return {'calls': self.calls}
    def reset(self):
        self.calls = 0
"""


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch):
    for name in ('TWINKLE_TRUST_REMOTE_CODE', 'HF_HUB_OFFLINE', 'TRANSFORMERS_OFFLINE', 'MODELSCOPE_DOMAIN'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)  # what the variable was at its import
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    monkeypatch.setenv('MODELSCOPE_HOME', str(tmp_path / 'modelscope'))


@pytest.fixture
def hub(monkeypatch):
    with StandIn() as stand_in:
        monkeypatch.setenv('HF_ENDPOINT', stand_in.url)
        monkeypatch.setenv('MODELSCOPE_ENDPOINT', stand_in.url)
        yield stand_in


@pytest.fixture
def load(tmp_path):
    """`load_plugin` of a trusted loss, with a cache of its own in a path with spaces."""

    def load(address, kind='loss', trust=True, **given):
        return load_plugin(address, kind, trust_remote_code=trust, cache_dir=tmp_path / 'a cache', **given)

    return load


def _value(loss):
    """Of the sum of the log-probs -1 and -2."""
    made = loss() if isinstance(loss, type) else loss
    result = made({}, {'logps': torch.tensor([-1.0, -2.0])})
    return (result['loss'] if isinstance(result, dict) else result).item()


# Trust


@pytest.mark.parametrize('scheme', HUBS)
def test_trusted_code_gives_the_class_itself(scheme, hub, load):
    hub.push('group/name', {'plugin.py': ONE})
    found = load(f'{scheme}://group/name')
    assert isinstance(found, type)
    assert issubclass(found, Loss)
    assert _value(found) == -3


@pytest.mark.parametrize('scheme', HUBS)
def test_untrusted_code_is_downloaded_and_not_executed(scheme, hub, load, tmp_path, monkeypatch):
    trace = tmp_path / 'executed'
    commit = hub.push('group/name', {'plugin.py': f'open({str(trace)!r}, "w")\n{ONE}'})
    for trust, variable in ((None, ''), (None, '0'), (False, '1')):
        monkeypatch.setenv('TWINKLE_TRUST_REMOTE_CODE', variable)
        with pytest.raises(ValueError, match='not executed') as caught:
            load(f'{scheme}://group/name:Scaled', trust=trust)
        message = str(caught.value)
        assert 'trust_remote_code=True' in message
        assert 'TWINKLE_TRUST_REMOTE_CODE=1' in message
        assert f"'{scheme}://group/name@{commit}:Scaled'" in message
        place = re.search(r'read it in (.*)\. If', message)
        assert place is not None
        assert (Path(place[1]) / 'plugin.py').read_text().endswith(ONE)
        assert not trace.exists()
    with pytest.raises(ValueError, match="trust_remote_code must be True, False or None, got 'no'"):
        load(f'{scheme}://group/name', trust='no')
    monkeypatch.setenv('TWINKLE_TRUST_REMOTE_CODE', '1')
    load(f'{scheme}://group/name:Scaled', trust=None)
    assert trace.exists()


def test_a_file_needs_no_trust(tmp_path):
    (tmp_path / 'mine.py').write_text(ONE)
    assert _value(load_plugin(f'file:{tmp_path}/mine.py', 'loss', trust_remote_code=False)) == -3


# Addresses


@pytest.mark.parametrize(
    ('address', 'says'),
    [
        ('hub://group/name', 'an address must be ms://group/name'),
        ('group/name', 'an address must be ms://group/name'),
        ('file:mine.txt', 'an address must be ms://group/name'),
        ('file:', 'an address must be ms://group/name'),
        ('ms://group/name:a.py:Name:more', 'an address must be ms://group/name'),
        ('ms://', "a repository must be group/name, got ''"),
        ('ms://name', "a repository must be group/name, got 'name'"),
        ('hf://a/b/c', "a repository must be group/name, got 'a/b/c'"),
        ('hf://../name', "a repository must be group/name, got '../name'"),
        ('ms://group/name@', "a revision must be a branch, a tag or a commit, got ''"),
        ('ms://group/name@../x', "a revision must be a branch, a tag or a commit, got '../x'"),
        ('hf://group/name:../other.py', "a file must lie in the repository, got '../other.py'"),
        ('hf://group/name:/etc/x.py', "a file must lie in the repository, got '/etc/x.py'"),
        ('hf://group/name:', 'the name of a class'),
        ('hf://group/name:no-name', 'the name of a class'),
        ('file:mine.py:no-name', 'the name of a class'),
    ],
)
def test_each_wrong_part_of_an_address_is_named(address, says, load):
    assert is_address(address)
    with pytest.raises(ValueError, match=re.escape(says)):
        load(address)


def test_names_of_classes_are_no_addresses():
    assert not any(map(is_address, ['GRPOLoss', 'grpo', '', None, 3, Loss]))


def test_arguments_that_contradict_each_other_are_named(load):
    with pytest.raises(ValueError, match=r"revision='v2' is not that of the address, 'ms://group/name@v1'"):
        load('ms://group/name@v1', revision='v2')
    with pytest.raises(ValueError, match=r"a file has no revision, got revision='v2'"):
        load('file:mine.py', revision='v2')
    with pytest.raises(ValueError, match=r"kind must be 'loss' or 'metric', got 'head'"):
        load('ms://group/name', kind='head')


@pytest.mark.parametrize('scheme', HUBS)
def test_an_address_that_leads_nowhere_says_at_which_part(scheme, hub, load):
    hub.push('group/name', {'plugin.py': ONE, 'more/other.py': TWO, '.hidden/x.py': ''})
    hub.push('group/empty', {'README.md': ''})
    hub.push('group/two', {'a.py': ONE, 'b.py': TWO})
    with pytest.raises(ValueError, match='no such repository'):
        load(f'{scheme}://group/nowhere')
    with pytest.raises(ValueError, match="no revision 'nowhere'"):
        load(f'{scheme}://group/name@nowhere')
    with pytest.raises(ValueError, match=r'no file nowhere\.py; it has more/other\.py, plugin\.py$'):
        load(f'{scheme}://group/name:nowhere.py')
    with pytest.raises(ValueError, match=r'plugin\.py has no Nothing; it has Scaled$'):
        load(f'{scheme}://group/name:Nothing')
    with pytest.raises(ValueError, match='it has none'):
        load(f'{scheme}://group/empty')
    with pytest.raises(ValueError, match=r'it has a\.py, b\.py'):
        load(f'{scheme}://group/two')
    assert _value(load(f'{scheme}://group/two:b.py')) == -6
    assert _value(load(f'{scheme}://group/name:more/other.py:Scaled')) == -6


@pytest.mark.parametrize(
    'files', [{'plugin.py': TWO, '__init__.py': '', 'a.py': ''}, {'__init__.py': TWO, 'a.py': ''}, {'only.py': TWO}]
)
def test_the_usual_files_need_no_name(files, hub, load):
    hub.push('group/name', files)
    assert _value(load('hf://group/name')) == -6


# What is chosen


def _written(folder, text, name='mine.py'):
    (folder / name).write_text(text)
    return f'file:{folder / name}'


def test_a_file_with_several_losses_needs_a_name(tmp_path):
    address = _written(tmp_path, f'{ONE}\nclass Other(Scaled):\n    pass\n')
    with pytest.raises(ValueError, match=r'Other, Scaled: add the name to the address, as .*mine\.py:Other'):
        load_plugin(address, 'loss')
    assert load_plugin(f'{address}:Other', 'loss').__name__ == 'Other'
    assert load_plugin(_written(tmp_path, f'{ONE}\nclass _Other(Scaled): pass\n', 'b.py'), 'loss').__name__ == 'Scaled'
    assert load_plugin(_written(tmp_path, f"{ONE}\nOther = 3\n__all__ = ['Scaled']", 'c.py'), 'loss') is not None


def test_what_is_chosen_is_the_loss_else_what_can_be_called_like_one_else_the_function(tmp_path):
    helpers = 'def helper(): pass\nfrom os.path import join\n'
    assert load_plugin(_written(tmp_path, helpers + ONE, 'a.py'), 'loss').__name__ == 'Scaled'
    free = 'class Free:\n    def __call__(self, inputs, outputs): return outputs["logps"].sum()\nclass Data: pass\n'
    assert _value(load_plugin(_written(tmp_path, helpers + free, 'b.py'), 'loss')) == -3
    function = 'from os.path import join\ndef _no(): pass\ndef f(inputs, outputs): return 4 * outputs["logps"].sum()\n'
    assert _value(load_plugin(_written(tmp_path, function, 'c.py'), 'loss')) == -12
    with pytest.raises(ValueError, match='f, helper: add the name'):
        load_plugin(_written(tmp_path, helpers + function, 'd.py'), 'loss')
    assert _value(load_plugin(_written(tmp_path, helpers + function, 'd.py') + ':f', 'loss')) == -12
    with pytest.raises(ValueError, match=r'must hold one public Loss.*it has none'):
        load_plugin(_written(tmp_path, 'import torch\n', 'e.py'), 'loss')


def test_what_a_file_defines_goes_before_what_it_imports_from_another(hub, load):
    more = 'class Other(Scaled):\n    pass\n'
    hub.push('group/name', {'plugin.py': f'from .base import Scaled\n{more}', 'base.py': TWO, '__init__.py': ''})
    assert load('hf://group/name').__name__ == 'Other'
    helper = 'def helper(): pass\n'
    hub.push('group/name', {'__init__.py': f'from .base import Scaled\n{helper}', 'base.py': TWO + more})
    assert load('hf://group/name').__name__ == 'Scaled'


def test_a_metric_is_a_class_that_can_be_reset(tmp_path):
    metric = load_plugin(_written(tmp_path, METRIC + ONE, 'a.py'), 'metric')
    assert issubclass(metric, Metric)
    made = metric()
    made.accumulate({}, {})
    assert made.calculate() == {'calls': 1}
    free = METRIC.replace('(Metric)', '').replace('super().__init__(device_mesh, process_group)', '')
    assert load_plugin(_written(tmp_path, free, 'b.py'), 'metric').__name__ == 'Calls'
    with pytest.raises(ValueError, match='f has no accumulate, calculate, reset: a function cannot be reset'):
        load_plugin(_written(tmp_path, 'def f(inputs, outputs): pass', 'c.py') + ':f', 'metric')
    with pytest.raises(ValueError, match=r'must be a metric, but Scaled has no accumulate, calculate, reset$'):
        load_plugin(_written(tmp_path, ONE, 'd.py') + ':Scaled', 'metric')
    stub = 'from twinkle_megatron.metric import Metric\nclass Stub(Metric): pass'
    with pytest.raises(ValueError, match=r'must be a metric, but Stub has no accumulate$'):
        load_plugin(_written(tmp_path, stub, 'e.py'), 'metric')
    stub = 'from twinkle_megatron.loss import Loss\nclass Stub(Loss): pass'
    with pytest.raises(ValueError, match=r'must be a loss, but Stub has no __call__$'):
        load_plugin(_written(tmp_path, stub, 'f.py'), 'loss')


# Files


def test_paths_may_hold_spaces_be_relative_or_start_at_home(tmp_path, monkeypatch):
    folder = tmp_path / 'my own losses'
    folder.mkdir()
    (folder / 'a loss.py').write_text(ONE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(folder))
    for path in (f'{folder}/a loss.py', 'my own losses/a loss.py', '~/a loss.py'):
        assert _value(load_plugin(f'file:{path}:Scaled', 'loss')) == -3
    with pytest.raises(ValueError, match=r'no file .*/my own losses/other\.py'):
        load_plugin('file:my own losses/other.py', 'loss')


def test_a_file_is_loaded_again_when_it_or_what_it_imports_has_changed(tmp_path):
    address = _written(tmp_path, 'from .factor import f\ndef g(inputs, outputs): return f * outputs["logps"].sum()\n')
    _written(tmp_path, 'f = 1', 'factor.py')
    first = load_plugin(address, 'loss')
    assert load_plugin(address, 'loss') is first
    _written(tmp_path, 'f = 2', 'factor.py')
    assert _value(load_plugin(address, 'loss')) == -6
    assert _value(first) == -3


def test_neighbours_of_a_file_are_executed_only_when_it_imports_them(tmp_path):
    _written(tmp_path, '1/0', '__init__.py')
    _written(tmp_path, '1/0', 'neighbour.py')
    assert _value(load_plugin(_written(tmp_path, ONE), 'loss')) == -3


@pytest.mark.parametrize(
    ('text', 'says'),
    [
        ('def f(:\n', r'SyntaxError: .*mine\.py, line 1'),
        ('import no_such_package\n', "ModuleNotFoundError: No module named 'no_such_package'"),
        ('from .nowhere import x\n', 'ModuleNotFoundError: .*nowhere'),
        ('1 / 0\n', 'ZeroDivisionError'),
        ('import factor\n', 'factor.py lies beside it: write from . import factor'),
        ('raise SystemExit(3)\n', 'SystemExit: 3'),
        ('\xe9 = "\x00"', 'cannot be executed'),
    ],
)
def test_code_that_cannot_be_executed_is_one_error_and_leaves_nothing_behind(text, says, tmp_path):
    address = _written(tmp_path, text)
    _written(tmp_path, '', 'factor.py')
    before = {name for name in sys.modules if name.startswith('twinkle_plugin')}
    with pytest.raises(ValueError, match=rf'mine\.py cannot be executed: .*{says}|{says}'):
        load_plugin(address, 'loss')
    assert {name for name in sys.modules if name.startswith('twinkle_plugin')} == before
    _written(tmp_path, ONE)
    assert _value(load_plugin(address, 'loss')) == -3


# Repositories


@pytest.mark.parametrize('scheme', HUBS)
def test_files_of_a_repository_import_each_other(scheme, hub, load, tmp_path):
    hub.push(
        'group/name',
        {
            '__init__.py': 'from .plugin import loss\n',
            'plugin.py': 'from .parts.sums import total\nfrom . import factor\n'
            'def loss(inputs, outputs): return factor.f() * total(outputs["logps"])\n',
            'parts/sums.py': 'def total(x): return x.sum()\n',
            'factor.py': 'import json, pathlib\n'
            'def f(): return json.loads(pathlib.Path(__file__).with_name("factor.json").read_text())\n',
            'factor.json': '5',
            'weights.bin': 'x',
        },
    )
    path, modules = list(sys.path), set(sys.modules)
    assert _value(load(f'{scheme}://group/name')) == -15
    assert sys.path == path
    new = set(sys.modules) - modules
    assert not {'plugin', 'parts', 'factor'} & new
    assert not [*tmp_path.rglob('__pycache__'), *tmp_path.rglob('weights.bin')]


@pytest.mark.parametrize('scheme', HUBS)
def test_two_revisions_do_not_mix(scheme, hub, load):
    def files(factor):
        text = 'from .factor import f\ndef loss(inputs, outputs): return f * outputs["logps"].sum()\n'
        return {'plugin.py': text, 'factor.py': f'f = {factor}\n'}

    first = hub.push('group/name', {**files(1), 'later_gone.py': ''}, 'v1')
    second = hub.push('group/name', files(2))
    hub.push('group/name', files(3), branch='feature/three')
    one, two = load(f'{scheme}://group/name@{first}'), load(f'{scheme}://group/name')
    assert [_value(loss) for loss in (one, two)] == [-3, -6]
    assert _value(load(f'{scheme}://group/name@v1')) == -3
    assert _value(load(f'{scheme}://group/name', revision='v1')) == -3
    assert _value(load(f'{scheme}://group/name', revision=second)) == -6
    assert _value(load(f'{scheme}://group/name@feature/three:loss')) == -9
    hub.push('group/name', files(4))
    assert _value(load(f'{scheme}://group/name')) == -12
    assert _value(load(f'{scheme}://group/name@{second}')) == -6
    assert [_value(loss) for loss in (one, two)] == [-3, -6]


@pytest.mark.parametrize('scheme', HUBS)
def test_the_commit_of_an_address_without_revision_is_logged_once(scheme, hub, load, caplog):
    commit = hub.push('logged/name', {'plugin.py': ONE}, 'v1')
    with caplog.at_level(logging.WARNING, 'twinkle_megatron'):
        load(f'{scheme}://logged/name@v1')
        assert not caplog.records
        load(f'{scheme}://logged/name:Scaled')
        load(f'{scheme}://logged/name:Scaled')
    (record,) = caplog.records
    assert record.name == 'twinkle_megatron'
    assert f'took commit {commit}' in record.getMessage()
    assert record.getMessage().endswith(f'{scheme}://logged/name@{commit}:Scaled')


# Networks


@pytest.mark.parametrize('scheme', HUBS)
def test_what_was_loaded_once_loads_without_a_network(scheme, hub, load, monkeypatch):
    commit = hub.push('group/name', {'plugin.py': ONE}, 'v1')
    addresses = [f'{scheme}://group/name', f'{scheme}://group/name@v1', f'{scheme}://group/name@{commit}']
    for address in addresses:
        load(address)
    hub.push('group/name', {'plugin.py': TWO})
    hub.asked.clear()
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    assert [_value(load(address)) for address in addresses] == [-3, -3, -3]
    assert not hub.asked
    with pytest.raises(ConnectionError, match='group/name@v2 is not in the cache, and HF_HUB_OFFLINE is set'):
        load(f'{scheme}://group/name@v2')
    monkeypatch.delenv('HF_HUB_OFFLINE')
    hub.close()
    assert [_value(load(address)) for address in addresses] == [-3, -3, -3]


@pytest.mark.parametrize(('scheme', 'name'), [('hf', 'the Hugging Face Hub'), ('ms', 'ModelScope')])
def test_without_network_and_cache_the_error_says_so(scheme, name, hub, load):
    hub.push('group/name', {'plugin.py': ONE})
    hub.close()
    with pytest.raises(ConnectionError, match=f'group/name is not in the cache, and {name} cannot be reached.*file:'):
        load(f'{scheme}://group/name')


@pytest.mark.parametrize(('scheme', 'package'), [('hf', 'huggingface_hub'), ('ms', 'modelscope')])
def test_a_missing_package_is_named_with_how_to_install_it(scheme, package, load, monkeypatch):
    real = importlib.import_module

    def without(name, *args):
        if name.startswith(package):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
        return real(name, *args)

    monkeypatch.setattr(importlib, 'import_module', without)
    with pytest.raises(ImportError, match=rf"package {package} .*pip install -e '\.\[hub\]'"):
        load(f'{scheme}://group/name')


def test_modelscope_may_leave_out_the_commit_of_a_branch(hub, load):
    hub.tells_commit = False
    hub.push('group/name', {'plugin.py': ONE, 'more.py': ''})
    commit = hub.push('group/name', {'plugin.py': TWO, 'more.py': ''})
    with pytest.raises(ValueError, match=commit):
        load('ms://group/name', trust=False)
    assert _value(load('ms://group/name')) == -6
    hub.push('other/name', {'merged.py': ''}, branch='side')
    hub.push('other/name', {'plugin.py': TWO})
    hub.merge('other/name', 'side')
    with pytest.raises(ValueError, match=r'merged\.py at commit .* is not that of this revision.* give a commit'):
        load('ms://other/name')
    hub.tells_commit = True
    assert _value(load('ms://other/name')) == -6


def test_a_file_that_was_changed_in_the_cache_of_modelscope_is_not_taken_for_the_hub_s(hub, load, tmp_path):
    hub.push('group/name', {'plugin.py': ONE})
    load('ms://group/name')
    (file,) = tmp_path.rglob('plugin.py')
    file.write_text(TWO)
    with pytest.raises(ValueError, match=r'plugin\.py at commit .* is not that of this revision; was it changed in'):
        load('ms://group/name')


def test_what_modelscope_itself_has_downloaded_serves_offline(hub, load, tmp_path, monkeypatch):
    from modelscope.hub.snapshot_download import snapshot_download

    hub.push('group/name', {'plugin.py': ONE})
    snapshot_download('group/name', cache_dir=tmp_path / 'a cache', endpoint=hub.url)
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    assert _value(load('ms://group/name')) == -3


# Ranks


def _on_ranks(address, kind, cache, groups=None, **given):
    found = load_plugin(address, kind, trust_remote_code=True, cache_dir=cache, groups=groups, **given)
    return found.__module__, _value(found)


@pytest.mark.parametrize('scheme', HUBS)
def test_one_rank_of_a_host_downloads(scheme, hub, tmp_path):
    hub.push('group/name', {'plugin.py': TWO})
    first, second = run_ranks(_on_ranks, 2, f'{scheme}://group/name', 'loss', tmp_path)
    assert first == second
    assert first[1] == -6
    assert hub.downloads('plugin.py') == 1
    assert sum('revision/main' in ask or 'Revision=master' in ask for ask in hub.asked) == 1


def _on_some_ranks(address, cache):
    """Ranks 0 and 1 load it, rank 2 is not part of the layout."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return None
    return _on_ranks(address, 'loss', cache, Groups(dp=group, dp_cp=group))


def _on_hosts(address, cache):
    """Each rank is on a host of its own, with a cache of its own."""
    socket.gethostname = lambda: f'host{dist.get_rank()}'
    return _on_ranks(address, 'loss', cache / str(dist.get_rank()))


def test_every_host_downloads_the_commit_that_the_first_rank_found(hub, tmp_path):
    hub.push('group/name', {'plugin.py': TWO})
    assert len({*run_ranks(_on_hosts, 2, 'ms://group/name', tmp_path)}) == 1
    assert hub.downloads('plugin.py') == 2
    assert sum('Revision=master' in ask for ask in hub.asked) == 1


def test_the_layout_may_be_a_part_of_the_world(tmp_path):
    address = _written(tmp_path, ONE)
    first, second, none = run_ranks(_on_some_ranks, 3, address, tmp_path)
    assert first == second
    assert none is None


def _errors_on_ranks(addresses, cache):
    """What each rank is told; RANK stands for its number. The last time rank 0 lacks the package of the hub."""
    told = []
    for address, trust in addresses:
        if address is addresses[-1][0] and dist.get_rank() == 0:
            sys.modules['huggingface_hub'] = None
        try:
            load_plugin(address.replace('RANK', str(dist.get_rank())), 'loss', trust_remote_code=trust, cache_dir=cache)
            told.append('no error')
        except Exception as error:
            told.append(f'{type(error).__name__}: {error}')
    return told


def test_an_error_on_one_rank_is_the_same_error_on_all(hub, tmp_path):
    hub.push('group/name', {'plugin.py': ONE})
    addresses = [
        ('hf://group/nowhere', True),
        ('hf://group/name', False),
        ('hf://group/name:Nothing', True),
        ('file:RANK.py', True),
        ('hf://group/name', True),
        ('hf://group/name:Scaled', True),
    ]
    first, second = run_ranks(_errors_on_ranks, 2, addresses, tmp_path / 'cache')
    assert first == second
    assert first[0].startswith('ValueError: on rank 0: hf://group/nowhere: there is no such repository')
    assert 'not executed' in first[1]
    assert 'has no Nothing' in first[2]
    assert 'the addresses of rank 1 differ from those of rank 0' in first[3]
    assert first[4] == 'no error'
    assert first[5].startswith('ImportError: on rank 0: the package huggingface_hub is needed')


def _in_own_folder(folder, file):
    os.chdir(folder / str(dist.get_rank()))
    return _on_ranks(f'file:{file}', 'loss', folder)


@pytest.mark.parametrize(
    ('file', 'says'),
    [
        ('broken.py', 'on rank 0: .*SyntaxError'),
        ('there.py', 'on rank 0: .*there is no file'),
        ('mine.py', 'the files of rank 1 differ from those of rank 0'),
    ],
)
def test_files_that_differ_between_ranks_are_an_error_on_all(file, says, tmp_path):
    for rank, text in enumerate((ONE, TWO)):
        (tmp_path / str(rank)).mkdir()
        _written(tmp_path / str(rank), text)
    (tmp_path / '0' / 'broken.py').write_text('def f(:\n')
    (tmp_path / '1' / 'broken.py').write_text(ONE)
    (tmp_path / '1' / 'there.py').write_text(ONE)
    outcomes = run_ranks(_in_own_folder, 2, tmp_path, file, collect_errors=True)
    assert [outcome.error for outcome in outcomes] == ['ValueError', 'ValueError']
    assert outcomes[0].message == outcomes[1].message
    assert re.search(says, outcomes[0].message)


# The page of the documentation


def test_the_example_of_the_documentation_works(tmp_path):
    page = (Path(__file__).parents[1] / 'docs' / 'plugins.md').read_text()
    address = _written(tmp_path, page.partition('```python\n')[2].partition('```')[0], 'my_plugin.py')
    logps = torch.tensor([-0.05, -1.0, -2.0, -9.0], requires_grad=True)
    inputs, outputs = {'labels': torch.tensor([1, 2, 3, -100])}, {'logps': logps}
    result = load_plugin(address, 'loss')(threshold=1.5)(inputs, outputs)
    assert (result['loss'].item(), result['num_tokens'].item()) == (2, 3)
    result['loss'].backward()
    assert logps.grad is not None
    assert logps.grad.tolist() == [0, 0, -1, 0]
    metric = load_plugin(address, 'metric')()
    metric.accumulate(inputs, outputs)
    assert metric.calculate() == {'learnt': '0.3333'}
