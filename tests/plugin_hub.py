"""A stand-in for both hubs on loopback: what their packages ask for when they fetch a snapshot, and no more.

    with StandIn() as hub:
        commit = hub.push('group/name', {'plugin.py': '...'})       # a new commit on the main branch
        HF_ENDPOINT = MODELSCOPE_ENDPOINT = hub.url

`hub.asked` holds what was asked for, as 'GET /path?query'.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class _Commit:
    hash: str
    files: dict[str, bytes]
    changed: dict[str, str]
    """The commit that last changed each file."""
    number: int


@dataclass
class _Repository:
    commits: dict[str, _Commit] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def at(self, revision: str) -> _Commit | None:
        return self.commits.get(self.names.get(revision, revision))


class StandIn:
    """Both hubs. `tells_commit` False: ModelScope leaves out which commit a branch is, as it does for some."""

    def __init__(self) -> None:
        self.tells_commit = True
        self.asked: list[str] = []
        self.repositories: dict[str, _Repository] = {}
        self.connections: list[socket.socket] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def setup(self) -> None:
                super().setup()
                hub.connections.append(self.connection)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self._server.daemon_threads = True
        self.url = f'http://127.0.0.1:{self._server.server_address[1]}'

    def __enter__(self) -> StandIn:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """From now on the hubs cannot be reached."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:  # those that were kept alive
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def push(self, repository: str, files: Mapping[str, str | bytes], *tags: str, branch: str | None = None) -> str:
        """The hash of a new commit that holds these files and no others."""
        there = self.repositories.setdefault(repository, _Repository())
        content = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
        parent = there.at('main')
        commit = hashlib.sha1(f'{repository} {len(there.commits)} {sorted(content.items())}'.encode()).hexdigest()
        same = {p for p in content if parent is not None and parent.files.get(p) == content[p]}
        changed = {p: parent.changed[p] if parent is not None and p in same else commit for p in content}
        there.commits[commit] = _Commit(commit, content, changed, len(there.commits))
        for name in (*tags, *(('main', 'master') if branch is None else (branch,))):
            there.names[name] = commit
        return commit

    def merge(self, repository: str, branch: str) -> None:
        """The main branch becomes a commit with the files of both, which changes none of them."""
        there = self.repositories[repository]
        ours, theirs = there.commits[there.names['main']], there.commits[there.names[branch]]
        commit = hashlib.sha1(f'{ours.hash} {theirs.hash}'.encode()).hexdigest()
        files, changed = theirs.files | ours.files, theirs.changed | ours.changed
        there.commits[commit] = _Commit(commit, files, changed, len(there.commits))
        there.names['main'] = there.names['master'] = commit

    def downloads(self, file: str) -> int:
        """How often the content of a file was sent."""
        return sum(ask.startswith('GET ') and ask.endswith((f'/{file}', f'FilePath={file}')) for ask in self.asked)

    def answer(self, ask: BaseHTTPRequestHandler) -> None:
        self.asked.append(f'{ask.command} {ask.path}')
        url = urlsplit(ask.path)
        parts = [unquote(part) for part in url.path.strip('/').split('/')]
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if parts[:3] == ['api', 'v1', 'models']:
            self._as_modelscope(ask, '/'.join(parts[3:5]), parts[5:], query)
        elif parts[:2] == ['api', 'models']:
            self._as_hugging_face(ask, '/'.join(parts[2:4]), parts[4:])
        elif parts[2:3] == ['resolve']:
            self._as_hugging_face(ask, '/'.join(parts[:2]), parts[2:])
        else:
            _send(ask, 404, {'Message': 'no such page'})

    def _as_hugging_face(self, ask: BaseHTTPRequestHandler, name: str, parts: list[str]) -> None:
        repository = self.repositories.get(name)
        if repository is None:
            return _send(ask, 404, {'error': 'Repository not found'}, {'X-Error-Code': 'RepoNotFound'})
        commit = repository.at(parts[1])
        if commit is None:
            return _send(ask, 404, {'error': f'Invalid rev id: {parts[1]}'}, {'X-Error-Code': 'RevisionNotFound'})
        if parts[0] == 'revision':
            files = [{'rfilename': path} for path in commit.files]
            return _send(ask, 200, {'id': name, 'modelId': name, 'sha': commit.hash, 'siblings': files})
        if parts[0] == 'tree':
            files = [
                {'type': 'file', 'path': path, 'size': len(content), 'oid': hashlib.sha1(content).hexdigest()}
                for path, content in commit.files.items()
            ]
            return _send(ask, 200, files)
        content = commit.files['/'.join(parts[2:])]
        known = {'X-Repo-Commit': commit.hash, 'ETag': f'"{hashlib.sha1(content).hexdigest()}"'}
        return _send(ask, 200, content, known)

    def _as_modelscope(self, ask: BaseHTTPRequestHandler, name: str, parts: list[str], query: dict[str, str]) -> None:
        repository = self.repositories.get(name)
        commit = None if repository is None else repository.at(query.get('Revision', 'master'))
        if repository is None or commit is None:
            return _send(ask, 404, {'Code': 10010205001, 'Message': 'record not found', 'Success': False})
        if parts == ['repo']:
            return _send(ask, 200, commit.files[query['FilePath']])
        files = [
            {
                'Name': path.rpartition('/')[2],
                'Path': path,
                'Type': 'blob',
                'Size': len(content),
                'Sha256': hashlib.sha256(content).hexdigest(),
                'Revision': commit.changed[path],
                'CommittedDate': 1700000000 + repository.commits[commit.changed[path]].number,
            }
            for path, content in commit.files.items()
        ]
        latest = {'Id': commit.hash if self.tells_commit else '', 'ShortId': commit.hash[:8]}
        return _send(ask, 200, {'Code': 200, 'Success': True, 'Data': {'Files': files, 'LatestCommitter': latest}})


def _send(ask: BaseHTTPRequestHandler, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    ask.send_response(status)
    kind = 'application/octet-stream' if isinstance(body, bytes) else 'application/json'
    for key, value in {'Content-Type': kind, 'Content-Length': str(len(content)), **(headers or {})}.items():
        ask.send_header(key, value)
    ask.end_headers()
    if ask.command != 'HEAD':
        ask.wfile.write(content)
