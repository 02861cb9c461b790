"""Reads an engine's source files from its installed release and from wheels, without importing them."""

from __future__ import annotations

import ast
import importlib.util
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftmark_engines import SupportedVersions

Read = Callable[[str], str]
"""Function that returns the text of a package's file, by its path in the package."""


@dataclass(frozen=True)
class Releases:
    """Finds the releases of one engine on this machine: the installed release, and wheels in a folder.

    Attributes:
        supported: the engine's supported range, with the distributions that provide it.
        package: name of the installed package.
        variable: environment variable with the folder of wheels.
    """

    supported: SupportedVersions
    package: str
    variable: str

    def installed(self) -> dict[str, Read]:
        """Return a reader of the installed release by its name; an empty dict if none is installed."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            return {}
        root = Path(spec.submodule_search_locations[0])
        return {f"installed {self.supported.installed()[1]}": lambda path: (root / path).read_text(encoding="utf-8")}

    def wheels(self) -> dict[str, Read]:
        """Return a reader of each wheel in the folder, by version."""
        folder = os.environ.get(self.variable)
        names = [f"{one.replace('-', '_')}-*.whl" for one in self.supported.distributions] if folder else []
        found = sorted(wheel for name in names for wheel in Path(folder or "").glob(name))
        return {wheel.name.split("-")[1]: self._of_wheel(wheel) for wheel in found}

    def each(self) -> pytest.MarkDecorator:
        """Return a pytest mark that runs a test once for each release. The test's argument `read` reads its files."""
        sources = self.installed() | self.wheels()
        values = [*sources.values()] or [pytest.param(None, marks=self._none())]
        return pytest.mark.parametrize("read", values, ids=[*sources] or None)

    def each_wheel(self) -> pytest.MarkDecorator:
        """Return a pytest mark that runs a test once for each wheel. The argument `version` is the wheel's version."""
        return pytest.mark.parametrize("version", [*self.wheels()] or [pytest.param("", marks=self._none())])

    def _of_wheel(self, wheel: Path) -> Read:
        def read(path: str) -> str:
            with zipfile.ZipFile(wheel) as opened:
                return opened.read(f"{self.package}/{path}").decode()

        return read

    def _none(self) -> pytest.MarkDecorator:
        engine = self.supported.engine
        return pytest.mark.skip(f"no {engine} is installed, and {self.variable} names no folder of wheels")


def defined(source: str, *names: str) -> ast.FunctionDef | ast.ClassDef:
    """Return a function, class or method of a module. `names` is the path to it, e.g. class and method."""
    found: ast.AST = ast.parse(source)
    for name in names:
        inside = (one for one in ast.walk(found) if isinstance(one, ast.FunctionDef | ast.ClassDef))
        found = next(one for one in inside if one.name == name)
    assert isinstance(found, ast.FunctionDef | ast.ClassDef), "give the name of a function or class"
    return found


def arguments(function: ast.AST) -> list[str]:
    """Return the names of a function's positional parameters, except self and cls."""
    assert isinstance(function, ast.FunctionDef)
    return [one.arg for one in function.args.args if one.arg not in ("self", "cls")]


@dataclass(frozen=True)
class Imported:
    """Describes one name that a file of the adapter imports from an engine: ``from module import name``."""

    file: str
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}: {self.module}.{self.name}"


def imported(folder: Path, package: str) -> list[Imported]:
    """Return every name that a folder's files import from a package, at any depth, except inside ``try``."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tried = {inner for one in ast.walk(tree) if isinstance(one, ast.Try) for inner in ast.walk(one)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package and node not in tried:
                file = str(path.relative_to(folder))
                found += [Imported(file, node.module or "", one.name) for one in node.names]
    return found


def offered(read: Read, module: str, name: str) -> bool:
    """Return whether a module of the package binds a name, or has a submodule with that name."""
    path = "/".join(module.split(".")[1:])
    if _first(read, f"{path}/{name}.py", f"{path}/{name}/__init__.py") is not None:
        return True
    source = _first(read, f"{path}.py", f"{path}/__init__.py")
    return source is not None and name in _bound(ast.parse(source).body)


def _first(read: Read, *paths: str) -> str | None:
    for path in paths:
        try:
            return read(path.lstrip("/"))
        except (KeyError, FileNotFoundError):
            continue
    return None


def _bound(body: list[ast.stmt]) -> set[str]:
    """Return names that a module's statements bind, also inside ``if`` and ``try``."""
    found: set[str] = set()
    for one in body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(one.name)
        elif isinstance(one, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in one.names}
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            found |= {inner.id for each in targets for inner in ast.walk(each) if isinstance(inner, ast.Name)}
        else:
            for part in ("body", "orelse", "finalbody"):
                found |= _bound(getattr(one, part, []))
            for handler in getattr(one, "handlers", []):
                found |= _bound(handler.body)
    return found
