"""Stubs for packages that SGLang imports and that need a device. Only packages that are not installed get stubs.

Importing a name from a stub works; calling it raises NotImplementedError. No judged code runs in a stub.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

PACKAGES = (
    *("sgl_kernel", "flashinfer", "torchvision", "torchaudio", "soundfile", "cutlass", "helion"),
    *("torch_npu", "sgl_kernel_npu", "custom_ops", "vllm"),
)


class Absent:
    """Name in a package that is not installed. A call raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        """Raise `NotImplementedError`."""
        raise NotImplementedError(f"{self._name} is not installed, and code that runs on a CPU must not call it")

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")


class AbsentPackages(MetaPathFinder, Loader):
    """Import finder at the end of `sys.meta_path`, so it is used only for modules that no other finder has found."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a module spec for a name in one of the packages, and None otherwise."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module a stub for every name except Python's own double-underscore names."""
        module.__getattr__ = names_of(module.__name__)  # type: ignore[method-assign]


def names_of(module: str) -> Callable[[str], Absent]:
    """Return a stub module's `__getattr__`."""

    def get(name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module}.{name}")

    return get


def stand_in(packages: Sequence[str] = PACKAGES) -> None:
    """Install stubs for these packages; installed packages are unchanged."""
    sys.meta_path.append(AbsentPackages(packages))
