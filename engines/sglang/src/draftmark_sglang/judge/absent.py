"""Packages that SGLang imports and that need a device: where they are not installed, each name of theirs is a stub.

An import of it works; a call says that it is not there. No draftmark code and nothing that is judged runs in them.
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
    """A name of a package that is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} is not installed here, and on a CPU nothing calls it")

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")


class AbsentPackages(MetaPathFinder, Loader):
    """The last of Python's finders: it is asked for what no other has found."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A module of one of the packages."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def exec_module(self, module: ModuleType) -> None:
        """Every name but Python's own is there."""
        module.__getattr__ = names_of(module.__name__)  # type: ignore[method-assign]


def names_of(module: str) -> Callable[[str], Absent]:
    """A module's `__getattr__`."""

    def get(name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module}.{name}")

    return get


def stand_in(packages: Sequence[str] = PACKAGES) -> None:
    """Let these packages be imported; installed ones are as they were."""
    sys.meta_path.append(AbsentPackages(packages))
