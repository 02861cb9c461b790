"""Files of an engine's package in several releases, read without importing them: of the installed one and of wheels."""

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
"""The text of a file of the package, by its path."""


@dataclass(frozen=True)
class Releases:
    """The releases of one engine that can be read here.

    Attributes:
        supported: the engine's range, with the distributions that bring it.
        package: what they install. variable: of the environment, which names a folder of wheels.
    """

    supported: SupportedVersions
    package: str
    variable: str

    def installed(self) -> dict[str, Read]:
        """The installed release by its name; none where there is none."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            return {}
        root = Path(spec.submodule_search_locations[0])
        return {f"installed {self.supported.installed()[1]}": lambda path: (root / path).read_text(encoding="utf-8")}

    def wheels(self) -> dict[str, Read]:
        """Each wheel of the folder by its version."""
        folder = os.environ.get(self.variable)
        names = [f"{one.replace('-', '_')}-*.whl" for one in self.supported.distributions] if folder else []
        found = sorted(wheel for name in names for wheel in Path(folder or "").glob(name))
        return {wheel.name.split("-")[1]: self._of_wheel(wheel) for wheel in found}

    def each(self) -> pytest.MarkDecorator:
        """Of a test with an argument `read`: it runs on every release."""
        sources = self.installed() | self.wheels()
        values = [*sources.values()] or [pytest.param(None, marks=self._none())]
        return pytest.mark.parametrize("read", values, ids=[*sources] or None)

    def each_wheel(self) -> pytest.MarkDecorator:
        """Of a test with an argument `version`: it runs on the version of every wheel."""
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
    """A function, class or method of a module by the names that lead to it."""
    found: ast.AST = ast.parse(source)
    for name in names:
        inside = (one for one in ast.walk(found) if isinstance(one, ast.FunctionDef | ast.ClassDef))
        found = next(one for one in inside if one.name == name)
    assert isinstance(found, ast.FunctionDef | ast.ClassDef), "a module is no definition; give a name"
    return found


def arguments(function: ast.AST) -> list[str]:
    """Names of what a function takes by position, but for self and cls."""
    assert isinstance(function, ast.FunctionDef)
    return [one.arg for one in function.args.args if one.arg not in ("self", "cls")]


@dataclass(frozen=True)
class Imported:
    """A name that a file of ours takes from an engine: ``from module import name``."""

    file: str
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}: {self.module}.{self.name}"


def imported(folder: Path, package: str) -> list[Imported]:
    """Every name that the files of a folder take from a package, wherever they import it, but under ``try``."""
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
    """Whether a module of the package binds a name, or has a submodule of it."""
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
    """Names that a module's statements bind, also under ``if`` and ``try``."""
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
