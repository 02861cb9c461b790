"""A changed copy of an installed package, imported under another name beside the original. No file is written."""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata as md
import linecache
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from draftmark.loaded import LoadedBackend
from draftmark.registry import available
from draftmark.version import ENTRY_POINT_GROUP

from .targets import Target

Change = Callable[[str, ast.Module], ast.Module | None]
"""Takes a module's name as in `Target.modules` and its tree; returns a changed tree, or None to leave it alone."""


def load_copy(target: Target, change: Change) -> LoadedBackend:
    """The backend of a changed copy, loaded as its entry point says. Once a process: judge each copy in a fork.

    Raises:
        BackendLoadError: the copy cannot be imported, or is no backend.
    """
    value = next(row.module for row in available() if row.name == target.backend)
    assert value.startswith(target.package), f"{target.backend} is registered as {value}, not in {target.package}"
    for name in target.shared:
        sys.modules[f"{target.alias}.{name}"] = importlib.import_module(f"{target.package}.{name}")
    run_changed(target, change)
    entry = md.EntryPoint(target.backend, value.replace(target.package, target.alias, 1), ENTRY_POINT_GROUP)
    return LoadedBackend.from_entry_point(entry)


def run_changed(target: Target, change: Change) -> None:
    """From here on this process imports the modules of `target.alias` changed. Those that it has already stay."""
    sys.meta_path.insert(0, _Copies(target, change))


class _Copies(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the copy, and runs the original's source, changed."""

    def __init__(self, target: Target, change: Change) -> None:
        self._target, self._change, self._folder = target, change, target.folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for what lies in the copy, None for everything else."""
        file = self._file(fullname)
        if file is None:
            return None
        package = file.name == "__init__.py"
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=str(file), is_package=package)
        spec.has_location = True
        if package:
            spec.submodule_search_locations = [str(file.parent)]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Run the source, changed or as it is."""
        file = self._file(module.__name__)
        assert file is not None
        source, name = file.read_text(encoding="utf-8"), str(file)
        tree = self._change(file.relative_to(self._folder).with_suffix("").as_posix(), ast.parse(source))
        if tree is not None:
            # Triton and tracebacks ask for the text of a function by its file's name.
            source, name = ast.unparse(tree), f"<changed {module.__name__}>"
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), module.__dict__)

    def _file(self, fullname: str) -> Path | None:
        head, _, rest = fullname.removeprefix(self._target.alias).partition(".")
        if head or not fullname.startswith(self._target.alias):
            return None
        first, dot, last = rest.partition(".")
        place = self._folder / f"{dict(self._target.renamed).get(first, first)}{dot}{last}".replace(".", "/")
        return next(
            (file for file in (place / "__init__.py", place.with_name(f"{place.name}.py")) if file.is_file()), None
        )
