"""A folder of Python files as a package of its own, beside all that Python finds by itself."""

from __future__ import annotations

import hashlib
import importlib
import sys
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType
from typing import Any


class PrivatePackage(MetaPathFinder, InspectLoader):
    """Imports the files of a folder as modules of a package of its own, and remembers what it has read.

    Not through `sys.path`, and without compiled files: what is executed is what was read.

    Args:
        name: of the package, in `sys.modules`. Two packages of different names share nothing.
        folder: `name.a.b` is folder/a/b.py, or folder/a/b/__init__.py.
        bare: leave folder/__init__.py out: the package itself is empty.
    """

    def __init__(self, name: str, folder: Path, bare: bool) -> None:
        self.name, self.folder, self.bare = name, folder, bare
        self.read: dict[Path, bytes] = {}

    def load(self, file: str) -> ModuleType:
        """The module of a file, given by its path in the folder; executed the first time. Nothing of it is left behind
        where it fails."""
        parts = PurePosixPath(file).with_suffix('').parts
        if any('.' in part for part in parts):
            raise ValueError(f'folders and names of Python files must have no dot, got {file!r}')
        before, known = set(sys.modules), dict(self.read)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        try:
            return importlib.import_module('.'.join([self.name, *(parts if parts[-1] != '__init__' else parts[:-1])]))
        except BaseException:
            for module in set(sys.modules) - before:
                if module.split('.')[0] == self.name:
                    del sys.modules[module]
            self.read = known
            raise

    @property
    def is_current(self) -> bool:
        """Whether the files are what they were when they were read."""
        return all(path.is_file() and path.read_bytes() == content for path, content in self.read.items())

    def digest(self) -> str:
        """SHA-256 of the files that were read."""
        total = hashlib.sha256()
        for path in sorted(self.read):
            total.update(f'{path.relative_to(self.folder)}\0{hashlib.sha256(self.read[path]).hexdigest()}\n'.encode())
        return total.hexdigest()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        file, is_package = self._place(fullname)
        if file is None:
            return None
        folders = [str(file.parent)] if is_package else None
        return spec_from_file_location(fullname, file, loader=self, submodule_search_locations=folders)

    def is_package(self, fullname: str) -> bool:
        return self._place(fullname)[1]

    def get_source(self, fullname: str) -> str:
        return decode_source(self._content(fullname))

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._content(fullname), str(self._place(fullname)[0]), 'exec', dont_inherit=True)

    def _content(self, fullname: str) -> bytes:
        file, _ = self._place(fullname)
        assert file is not None
        if not file.is_file() or (self.bare and fullname == self.name):
            return b''  # a package without a file of its own
        return self.read.setdefault(file, file.read_bytes())

    def _place(self, fullname: str) -> tuple[Path | None, bool]:
        """The file of a module, and whether it is a package."""
        root, *parts = fullname.split('.')
        if root != self.name:
            return None, False
        place = self.folder.joinpath(*parts)
        package, module = place / '__init__.py', place.with_name(f'{place.name}.py')
        if not parts or package.is_file():
            return package, True
        if module.is_file():
            return module, False
        return (package, True) if place.is_dir() else (None, False)
