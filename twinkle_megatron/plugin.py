"""Losses and metrics from a hub or a file, by their address."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from types import FunctionType, ModuleType
from typing import Any

from .groups import Groups
from .hub import fetch, switched_on
from .private_package import PrivatePackage
from .ranks import Ranks

TRUST = 'TWINKLE_TRUST_REMOTE_CODE'
_METHODS = {'loss': ('__call__',), 'metric': ('accumulate', 'calculate', 'reset')}
_HUB = re.compile(
    r'(?P<hub>ms|hf)://(?P<place>[^@:]*)(@(?P<revision>[^:]*))?(:(?P<file>[^:]*\.py))?(:(?P<name>[^:]*))?'
)
_FILE = re.compile(r'(?P<hub>file):(?P<place>.*\.py)(:(?P<name>[^:]*))?')
_FORMS = 'ms://group/name, hf://group/name (then @revision, :file.py, :Name, each if wanted), or file:path.py:Name'
_log = logging.getLogger('twinkle_megatron')


def is_address(name: Any) -> bool:
    """Whether `name` is meant as an address for `load_plugin`, well-formed or not, and not as the name of a class."""
    return isinstance(name, str) and (':' in name or '/' in name)


def load_plugin(
    address: str,
    kind: str,
    *,
    trust_remote_code: bool | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    groups: Groups | None = None,
) -> Any:
    """The class or the function that an address names, not called yet.

        load_plugin('ms://my_group/my_loss', 'loss', trust_remote_code=True)
        load_plugin('hf://my_group/my_repo@v1.0:metrics.py:Distinct', 'metric', trust_remote_code=True)
        load_plugin('file:my_loss.py:MyLoss', 'loss')

    Without `:file.py` it is plugin.py of the repository, else __init__.py, else its only Python file. Without `:Name`
    it is the one `Loss` (`Metric`) that the file makes public, else the one class with the methods of such, else, of a
    loss, the one function; of each, what the file defines goes before what it imports from its repository, in which
    files import each other with relative imports.

    Args:
        kind: 'loss' or 'metric'.
        trust_remote_code: whether code from a hub may be executed. None: if TWINKLE_TRUST_REMOTE_CODE is 1. A file
            needs no trust.
        revision: branch, tag or commit, the same as @revision. None: the main branch, whose commit is logged.
        cache_dir: where the snapshots are kept. None: the cache of the hub's own package.
        groups: the ranks that load it. None: all of `torch.distributed`, or this process alone.

    Collective: every rank of `groups` calls it. The first rank downloads, then the first rank of each other host, and
    an error on one rank is the same error on all. Errors: ValueError for an address that is malformed or leads
    nowhere, for code that is not trusted, cannot be executed or is not of the kind, and for ranks with different
    code; ConnectionError and ImportError as `twinkle_megatron.hub.fetch`.
    """
    ranks = Ranks(groups)
    wanted = ranks.together(partial(_parsed, address, kind, revision))
    ranks.check_alike('addresses', (wanted.text, wanted.revision))
    if wanted.hub == 'file':
        source = ranks.together(lambda: Path(wanted.place).expanduser().absolute())
        folder, file, commit = source.parent, source.name, None
    else:
        snapshot = ranks.fetched(lambda revision: fetch(wanted.hub, wanted.place, revision, cache_dir), wanted.revision)
        folder, commit = snapshot.folder, snapshot.commit
        ranks.together(partial(_check_trust, wanted, folder, commit, trust_remote_code))
        if wanted.revision is None and ranks.is_first:
            _tell_commit(wanted, commit)
        file = ranks.together(partial(_file, wanted, folder))
    label = str(folder) if commit is None else f'{wanted.hub}://{wanted.place}@{commit}'
    found, digest = ranks.together(partial(_loaded, wanted, kind, label, folder, file))
    ranks.check_alike('files', digest)
    return found


@dataclass(frozen=True)
class _Address:
    text: str
    hub: str
    place: str
    revision: str | None = None
    file: str | None = None
    name: str | None = None


def _parsed(address: Any, kind: str, revision: str | None) -> _Address:
    if kind not in _METHODS:
        raise ValueError(f"kind must be 'loss' or 'metric', got {kind!r}")
    match = isinstance(address, str) and (_HUB.fullmatch(address) or _FILE.fullmatch(address))
    if not match:
        raise ValueError(f'an address must be {_FORMS}; got {address!r}')
    found = _Address(text=address, **match.groupdict())
    if found.name is not None and not found.name.isidentifier():
        raise ValueError(f'what follows the last colon of an address must be the name of a class, got {address!r}')
    if found.hub == 'file':
        if revision is not None:
            raise ValueError(f'a file has no revision, got revision={revision!r} with {address!r}')
        return found
    if not re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', found.place, re.ASCII):
        raise ValueError(f'a repository must be group/name, got {found.place!r} in {address!r}')
    if revision is not None and found.revision not in (None, revision):
        raise ValueError(f'revision={revision!r} is not that of the address, {address!r}: give one of them')
    found = replace(found, revision=found.revision if revision is None else revision)
    if found.revision is not None and (
        not re.fullmatch(r'\w[\w./+-]*', found.revision, re.ASCII) or '..' in found.revision
    ):
        raise ValueError(f'a revision must be a branch, a tag or a commit, got {found.revision!r} for {address!r}')
    if found.file is not None and (found.file.startswith('/') or '..' in PurePosixPath(found.file).parts):
        raise ValueError(f'a file must lie in the repository, got {found.file!r} in {address!r}')
    return found


def _check_trust(wanted: _Address, folder: Path, commit: str | None, trust: bool | None) -> None:
    if trust not in (None, True, False):
        raise ValueError(f'trust_remote_code must be True, False or None, got {trust!r}')
    if switched_on(TRUST) if trust is None else trust:
        return
    pin = f', pinned to what you have read: {_pinned(wanted, commit)!r}' if commit else ''
    raise ValueError(
        f'{wanted.text} is code that would be executed here. It was downloaded and not executed: read it in {folder}. '
        f'If you trust it, pass trust_remote_code=True or set {TRUST}=1{pin}'
    )


def _pinned(wanted: _Address, commit: str) -> str:
    rest = ''.join(f':{part}' for part in (wanted.file, wanted.name) if part)
    return f'{wanted.hub}://{wanted.place}@{commit}{rest}'


_told: set[str] = set()


def _tell_commit(wanted: _Address, commit: str | None) -> None:
    if wanted.text in _told or commit is None:
        return
    _told.add(wanted.text)
    _log.warning(
        '%s names no revision: took commit %s. To get the same code the next time, too: %s',
        wanted.text,
        commit,
        _pinned(wanted, commit),
    )


def _file(wanted: _Address, folder: Path) -> str:
    there = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob('*.py')
        if not any(part.startswith('.') for part in path.relative_to(folder).parts)
    )
    if wanted.file is not None:
        file = str(PurePosixPath(wanted.file))
        if file not in there:
            raise ValueError(f'{wanted.text}: the repository has no file {file}; it has {", ".join(there) or "none"}')
        return file
    for usual in ('plugin.py', '__init__.py'):
        if usual in there:
            return usual
    if len(there) != 1:
        raise ValueError(
            f'{wanted.text}: the repository has neither plugin.py nor __init__.py and must hold one Python file, or '
            f'the address say which: {wanted.hub}://{wanted.place}:file.py; it has {", ".join(there) or "none"}'
        )
    return there[0]


_packages: dict[str, list[PrivatePackage]] = {}


def _loaded(wanted: _Address, kind: str, label: str, folder: Path, file: str) -> tuple[Any, str]:
    """What the address names, and the digest of the code that was read for it."""
    if not (folder / file).is_file():
        raise ValueError(f'{wanted.text}: there is no file {folder / file}')
    bare = wanted.hub == 'file' and file != '__init__.py'
    key = f'{label} {bare}'
    versions = _packages.setdefault(key, [])
    if not versions or versions[-1].folder != folder or not versions[-1].is_current:
        name = f'twinkle_plugin_{hashlib.sha256(key.encode()).hexdigest()[:12]}_{len(versions)}'
        versions.append(PrivatePackage(name, folder, bare))
    package = versions[-1]
    try:
        module = package.load(file)
    except (Exception, SystemExit) as error:
        lacks = error.name if isinstance(error, ModuleNotFoundError) else None
        beside = lacks and (folder / f'{lacks}.py').is_file()
        hint = f'; {lacks}.py lies beside it: write from . import {lacks}' if beside else ''
        raise ValueError(
            f'{wanted.text}: {folder / file} cannot be executed: {type(error).__name__}: {error}{hint}'
        ) from error
    return _chosen(wanted, kind, module, package.name), package.digest()


def _chosen(wanted: _Address, kind: str, module: ModuleType, package: str) -> Any:
    names = getattr(module, '__all__', [name for name in vars(module) if not name.startswith('_')])
    own = {name: value for name in names if _is_of(value := getattr(module, name, None), package)}
    if wanted.name is not None:
        if not hasattr(module, wanted.name):
            raise ValueError(
                f'{wanted.text}: {module.__file__} has no {wanted.name}; it has {", ".join(sorted(own)) or "nothing"}'
            )
        return _checked(wanted, kind, getattr(module, wanted.name))
    base = _base(kind)
    suits: tuple[Callable[[Any], bool], ...] = (
        lambda value: isinstance(value, type) and issubclass(value, base),
        lambda value: isinstance(value, type) and not _lacks(value, kind),
        lambda value: isinstance(value, FunctionType) and kind == 'loss',
    )
    # What the file itself defines goes before what it has from other files of the repository.
    places = {name: value for name, value in own.items() if value.__module__ == module.__name__}, own
    choices = (sorted(name for name in place if test(place[name])) for test in suits for place in places)
    found = next(filter(None, choices), [])
    if len(found) != 1:
        has = f'{", ".join(found)}: add the name to the address, as {wanted.text}:{found[0]}' if found else 'none'
        raise ValueError(
            f'{wanted.text}: {module.__file__} must hold one public {base.__name__}, or the address say which; it has '
            f'{has}'
        )
    return _checked(wanted, kind, own[found[0]])


def _is_of(value: Any, package: str) -> bool:
    """Whether a class or function was made in the package, not imported by it."""
    return isinstance(value, (type, FunctionType)) and value.__module__.split('.')[0] == package


def _base(kind: str) -> type:
    from .loss import Loss
    from .metric import Metric

    return Loss if kind == 'loss' else Metric


def _lacks(value: Any, kind: str) -> list[str]:
    """The methods of the kind that a class lacks, or has from the base only, which does not know what to do."""
    if not isinstance(value, type):
        return [method for method in _METHODS[kind] if not callable(getattr(value, method, None))]
    base, stub = _base(kind), _METHODS[kind][0]
    owner = {method: next((cls for cls in value.__mro__ if method in vars(cls)), None) for method in _METHODS[kind]}
    return [method for method, cls in owner.items() if cls is None or (cls is base and method == stub)]


def _checked(wanted: _Address, kind: str, value: Any) -> Any:
    lacks = _lacks(value, kind)
    if lacks:
        a_function = ': a function cannot be reset, so make it a subclass of Metric'
        raise ValueError(
            f'{wanted.text} must be a {kind}, but {getattr(value, "__qualname__", type(value).__name__)} has no '
            f'{", ".join(lacks)}' + (a_function if kind == 'metric' and isinstance(value, FunctionType) else '')
        )
    return value
