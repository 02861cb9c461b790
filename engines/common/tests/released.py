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
