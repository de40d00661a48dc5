"""Snapshots of repositories on the Hugging Face Hub and on ModelScope, in the cache of the hub's own package."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

PATTERNS = ('*.py', '*.json', '*.jsonl', '*.txt', '*.csv', '*.yaml', '*.yml', '*.toml', '*.md')
"""Which files of a plug-in's repository are fetched: code and small data, never weights."""

_log = logging.getLogger('twinkle_megatron')


@dataclass(frozen=True)
class Snapshot:
    """The files of a repository in `folder`, as they were at `commit`; None where that is not known: files that
    ModelScope's own command line left there, found without a network."""

    folder: Path
    commit: str | None


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a whole commit hash, which always names the same files."""
    return revision is not None and re.fullmatch('[0-9a-f]{40}', revision) is not None


def switched_on(variable: str) -> bool:
    """Whether an environment variable says yes."""
    return os.environ.get(variable, '').strip().lower() in ('1', 'on', 'yes', 'true')


def fetch(
    hub: str,
    repository: str,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    patterns: Sequence[str] = PATTERNS,
    offline: bool | None = None,
) -> Snapshot:
    """The snapshot of a repository, from 'hf' or 'ms', downloaded unless it is there.

    A commit that was fetched before is taken without a look at the network. A branch or a tag (None: the main branch)
    is looked up, unless HF_HUB_OFFLINE=1; where the hub cannot be reached, what it was the last time is taken.

    Args:
        cache_dir: None: that of the hub's package (`HF_HUB_CACHE`, `MODELSCOPE_CACHE`).
        patterns: of the files that are wanted.
        offline: takes what is in the cache, as HF_HUB_OFFLINE=1 does; None: if that says so. Both are for the Hugging
            Face Hub only.

    Errors: ImportError without the hub's package; ValueError where there is no such repository or revision, or no
    right to read it; ConnectionError where the hub cannot be reached and the snapshot is not in the cache.
    """
    if cache_dir is not None:
        cache_dir = Path(cache_dir).expanduser().absolute()
    if hub == 'ms':
        return _from_modelscope(repository, revision, cache_dir)
    return _from_hugging_face(repository, revision, cache_dir, patterns, _offline() if offline is None else offline)


def _from_hugging_face(
    repository: str, revision: str | None, cache_dir: Path | None, patterns: Sequence[str], offline: bool
) -> Snapshot:
    hub, errors = _module('huggingface_hub', 'huggingface_hub'), _module('huggingface_hub.errors', 'huggingface_hub')
    what = f'hf://{repository}' + (f'@{revision}' if revision else '')
    download = partial(
        hub.snapshot_download,
        repository,
        revision=revision,
        cache_dir=cache_dir,
        allow_patterns=list(patterns),
        endpoint=os.environ.get('HF_ENDPOINT') or None,
    )
    try:
        folder = download(local_files_only=offline)
    except errors.RevisionNotFoundError as error:
        raise ValueError(f'{what}: the repository has no revision {revision or "main"!r}') from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(f'{what}: {_NO_REPOSITORY}; for a private one log in: hf auth login, or HF_TOKEN') from error
    except errors.LocalEntryNotFoundError as error:
        if offline:
            raise _not_in_cache(what) from error
        raise _unreachable(what, 'the Hugging Face Hub', error.__cause__ or error) from error
    except Exception as error:
        raise _unreachable(what, 'the Hugging Face Hub', error) from error
    return Snapshot(Path(folder), Path(folder).name)


def _from_modelscope(repository: str, revision: str | None, cache_dir: Path | None) -> Snapshot:
    hub = _module('modelscope_hub', 'modelscope')
    what = f'ms://{repository}' + (f'@{revision}' if revision else '')
    home = Path(cache_dir or hub.HubConfig().cache_dir) / 'models' / repository.replace('/', '--')
    known = _noted(home, revision or 'master')
    if known is not None and (is_commit(revision) or _offline()):
        return Snapshot(home / 'snapshots' / known, known)
    try:
        if _offline():
            raise _not_in_cache(what)
        return _download_from_modelscope(what, home, repository, revision or 'master', known)
    except ValueError:
        raise
    except Exception as error:  # the package has errors of its own, and those of requests
        if known is None:
            return _left_by_modelscope(what, repository, revision or 'master', cache_dir, error)
        _log.warning(
            '%s: ModelScope cannot be reached (%s: %s): took commit %s from the cache',
            what,
            type(error).__name__,
            error,
            known,
        )
        return Snapshot(home / 'snapshots' / known, known)


def _download_from_modelscope(what: str, home: Path, repository: str, revision: str, known: str | None) -> Snapshot:
    """Looks up the commit first: ModelScope's own cache goes by the name of the branch, and keeps files that the branch
    has lost since."""
    download = _module('modelscope.hub.snapshot_download', 'modelscope').snapshot_download
    found = _found_on_modelscope(what, repository, revision)
    folder = home / 'snapshots' / found.commit
    if found.commit != known:
        download(
            repository,
            revision=found.commit,
            local_dir=str(folder),
            allow_file_pattern=list(PATTERNS),
            endpoint=found.endpoint,
        )
    found.check(what, folder)
    for name in (found.commit, revision):
        _note(home, name, found.commit)
    return Snapshot(folder, found.commit)


@dataclass(frozen=True)
class _Listing:
    """What a revision is on ModelScope: its commit, and the SHA-256 of each file that is fetched."""

    endpoint: str
    commit: str
    digests: Mapping[str, str]

    def check(self, what: str, folder: Path) -> None:
        """ValueError unless these are the files in `folder`."""
        for path, digest in self.digests.items():
            file = folder / path
            if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                raise ValueError(
                    f'{what}: {path} at commit {self.commit} is not that of this revision; was it changed in {folder}? '
                    'Remove that folder, or give a commit: @ and its hash'
                )


def _found_on_modelscope(what: str, repository: str, revision: str) -> _Listing:
    hub, requests = _module('modelscope_hub', 'modelscope'), _module('requests', 'modelscope')
    try:
        endpoint = hub.HubApi(hub.HubConfig()).resolve_endpoint_for_read(repository)
    except hub.NotExistError as error:
        raise ValueError(f'{what}: {_NO_REPOSITORY}; {_LOG_IN}') from error
    token = hub.HubConfig().token
    reply = requests.get(
        f'{endpoint}/api/v1/models/{repository}/repo/files',
        params={'Revision': revision, 'Recursive': 'True'},
        headers={'Authorization': f'Bearer {token}'} if token else {},
        timeout=(10, 60),
    )
    if 400 <= reply.status_code < 500:
        raise ValueError(
            f'{what}: ModelScope has no such repository or no revision {revision!r} of it ({reply.status_code}); '
            f'{_LOG_IN}'
        )
    reply.raise_for_status()
    data = reply.json()['Data']
    files = [file for file in data['Files'] if file.get('Type') != 'tree']
    newest = max(files, key=lambda file: file.get('CommittedDate') or 0, default={})
    told = (data.get('LatestCommitter') or {}).get('Id'), newest.get('Revision')
    commit = revision if is_commit(revision) else next((told for told in told if is_commit(told)), None)
    if commit is None:
        raise ValueError(f'{what}: ModelScope does not say which commit {revision!r} is; give one: @ and its hash')
    wanted = [file for file in files if Path(file['Path']).suffix in {pattern[1:] for pattern in PATTERNS}]
    return _Listing(endpoint, commit, {file['Path']: file['Sha256'] for file in wanted if file.get('Sha256')})


def _left_by_modelscope(
    what: str, repository: str, revision: str, cache_dir: Path | None, error: Exception
) -> Snapshot:
    """What `modelscope download` left in its cache, where the hub cannot be reached."""
    download = _module('modelscope.hub.snapshot_download', 'modelscope').snapshot_download
    try:
        folder = Path(download(repository, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception:
        raise error if _offline() else _unreachable(what, 'ModelScope', error) from error
    return Snapshot(folder, folder.name if is_commit(folder.name) else None)


def _noted(home: Path, revision: str) -> str | None:
    """The commit that a revision was the last time, if its snapshot is there."""
    note = home / 'refs' / quote(revision, safe='')
    commit = note.read_text() if note.is_file() else None
    return commit if commit and (home / 'snapshots' / commit).is_dir() else None


def _note(home: Path, revision: str, commit: str) -> None:
    """Called when the snapshot is whole; other ranks may do so at the same time."""
    note = home / 'refs' / quote(revision, safe='')
    note.parent.mkdir(parents=True, exist_ok=True)
    draft = note.with_name(f'{note.name}.{uuid.uuid4().hex}')
    draft.write_text(commit)
    draft.replace(note)


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the package {package} is needed to fetch from a hub: pip install -e '.[hub]' in a checkout of "
            f'twinkle-megatron ({error})'
        ) from error


def _offline() -> bool:
    return switched_on('HF_HUB_OFFLINE') or switched_on('TRANSFORMERS_OFFLINE')


def _not_in_cache(what: str) -> ConnectionError:
    return ConnectionError(f'{what} is not in the cache, and HF_HUB_OFFLINE is set; unset it, or fetch it once before')


def _unreachable(what: str, hub: str, error: BaseException) -> ConnectionError:
    return ConnectionError(
        f'{what} is not in the cache, and {hub} cannot be reached ({type(error).__name__}: {error}); where this '
        'machine has no network, fetch it on one that shares its cache, or copy its files here and give the path (of a '
        'model: its folder; of a plug-in: file:PATH.py)'
    )


_NO_REPOSITORY = 'there is no such repository, or no right to read it'
_LOG_IN = 'for a private one log in: modelscope login, or MODELSCOPE_API_TOKEN'
