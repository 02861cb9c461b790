"""Imports a changed copy of an installed package, in memory, under another name than the original."""

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
"""Receives a module's name as in `Target.modules` and its tree; returns a changed tree, or None for no change."""


def load_copy(target: Target, change: Change) -> LoadedBackend:
    """Load the backend of a changed copy through its entry point. Works once per process, so fork for each copy.

    Raises:
        BackendLoadError: the copy cannot be imported, or is not a backend.
    """
    value = next(row.module for row in available() if row.name == target.backend)
    if target.alias == target.package:  # a package that the backend imports by its own name
        run_changed(target, change)
        return LoadedBackend.from_entry_point(md.EntryPoint(target.backend, value, ENTRY_POINT_GROUP))
    assert value.startswith(target.package), f"{target.backend} is registered as {value}, not in {target.package}"
    for name in target.shared:
        sys.modules[f"{target.alias}.{name}"] = importlib.import_module(f"{target.package}.{name}")
    run_changed(target, change)
    entry = md.EntryPoint(target.backend, value.replace(target.package, target.alias, 1), ENTRY_POINT_GROUP)
    return LoadedBackend.from_entry_point(entry)


def run_changed(target: Target, change: Change) -> None:
    """Make this process import changed modules of `target.alias` from now on. Imported modules stay as they are."""
    sys.meta_path.insert(0, _Copies(target, change))


class _Copies(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that finds the copy's modules and runs the original's source with changes."""

    def __init__(self, target: Target, change: Change) -> None:
        self._target, self._change, self._folder = target, change, target.folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for modules of the copy, and None for all other modules."""
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
        """Run the module's source, with its change if there is one."""
        file = self._file(module.__name__)
        assert file is not None
        source, name = file.read_text(encoding="utf-8"), str(file)
        tree = self._change(file.relative_to(self._folder).with_suffix("").as_posix(), ast.parse(source))
        if tree is not None:
            # Triton and tracebacks look up a function's source by file name, so `linecache` gets the changed text.
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
