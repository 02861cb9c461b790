"""What is not there: importing it works, calling it says so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


class Absent:
    """A name of a package that this stand-in does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} is a stand-in for tests on a CPU, and nothing it stands for is there")

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")


class AbsentModules(MetaPathFinder, Loader):
    """Imports every module of a package that is not there as one whose names are `Absent`."""

    def __init__(self, package: str) -> None:
        self._prefix = package + "."

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(self._prefix) else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = names_of(module.__name__)  # type: ignore[method-assign]


def names_of(module: str) -> Callable[[str], Absent]:
    """A module's `__getattr__`."""

    def get(name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module}.{name}")

    return get


def stand_in_for(package: str) -> Callable[[str], Absent]:
    """Let every other module of `package` be imported, and return the package's own `__getattr__`."""
    sys.meta_path.append(AbsentModules(package))
    return names_of(package)
