"""One kernel to compile, as plain data: it has a key, and another process can compile it. No torch."""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.language.core import constexpr
from triton.runtime.jit import DependenciesFinder

from .assembler import ASSEMBLER

FORMAT = 3
"""Version of the keys and of the files of an entry."""
LINE_INFO = "TRITON_DISABLE_LINE_INFO"
"""Environment variable that changes debug sections only, so it is not part of a key."""


class _Dependencies(DependenciesFinder):  # type: ignore[misc]  # Triton has no types
    """Hashes a kernel's source with all functions that it calls, to the same digest in every process.

    Triton 3.6 orders constants of one name by the addresses of their modules. Also, it collects the constants of a
    called function before it hashes that function, so the digest has them only if the function was hashed earlier.
    """

    def _update_hash(self, func: Any) -> None:
        digest, constants = source_digest(func)
        self.used_global_vals.update(constants)
        self.hasher.update(f"{digest}{getattr(func, 'noinline', False)}".encode())


_DIGESTS: dict[int, tuple[Any, str, dict[Any, Any]]] = {}
"""Functions and their results of `source_digest`, by `id`, because the hash of a function is Triton's digest."""


def source_digest(function: Any) -> tuple[str, dict[Any, Any]]:
    """Return the digest of a function and of all that it calls, and the global variables that they read.

    Functions hashed earlier, by this process or another, do not change the digest.
    """
    function = getattr(function, "__func__", function)
    if id(function) not in _DIGESTS:
        _DIGESTS[id(function)] = function, f"recursion: {function.__name__}", {}
        nonlocals = inspect.getclosurevars(function.fn).nonlocals
        finder = _Dependencies(function.__name__, function.__globals__, nonlocals, function.src)
        finder.visit(function.parse())
        used = ((name, value) for (name, _), (value, _) in finder.used_global_vals.items())
        constants = sorted((name, repr(value)) for name, value in used if isinstance(value, constexpr))
        text = f"{finder.ret} {function.starting_line_number} {constants}"
        _DIGESTS[id(function)] = function, hashlib.sha256(text.encode()).hexdigest(), finder.used_global_vals
    return _DIGESTS[id(function)][1:]


@dataclass(frozen=True, eq=False)
class KernelSource:
    """Holds everything that determines a kernel's machine code, except the compiler.

    Attributes:
        module, name: module and name of the function of `triton.jit` or `gluon.jit`.
        language: Triton's class of sources, `ASTSource` or `GluonASTSource`.
        signature, constants, attributes: types, compile-time constants and alignments of the arguments, from Triton.
        backend, arch, warp_size: fields of `GPUTarget`.
        options: compiler options.
        parts: digests of what determines the machine code, by name; see `key_parts`.
    """

    module: str
    name: str
    language: type[ASTSource]
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    backend: str
    arch: int
    warp_size: int
    options: dict[str, Any]
    parts: dict[str, str]

    @classmethod
    def of(cls, source: ASTSource, target: GPUTarget, options: Mapping[str, Any]) -> KernelSource:
        """Return the plain data of the arguments of `triton.compile`."""
        function = source.fn
        return cls(
            function.module, function.__name__, type(source), dict(source.signature), dict(source.constants),
            dict(source.attrs), target.backend, target.arch, target.warp_size, dict(options),
            key_parts(source, target, options),
        )  # fmt: skip

    @property
    def key(self) -> str:
        """Hexadecimal digest of `parts`. Equal keys have equal machine code."""
        return hashlib.sha256(repr((FORMAT, *sorted(self.parts.items()))).encode()).hexdigest()

    @property
    def target(self) -> GPUTarget:
        """Triton's target of the kernel."""
        return GPUTarget(self.backend, self.arch, self.warp_size)

    def triton_source(self) -> ASTSource:
        """Import the kernel's function and return its source for `triton.compile`."""
        function = getattr(importlib.import_module(self.module), self.name)
        return self.language(function, self.signature, self.constants, self.attributes)


@dataclass(frozen=True)
class Compiled:
    """Result of one compilation.

    Attributes:
        key: key of the kernel.
        name: name of the kernel.
        seconds: time that compilation took.
        error: one line of the error; empty on success.
    """

    key: str
    name: str
    seconds: float
    error: str = ""


def libdevice_path() -> str:
    """Return the path of Triton's own libdevice, the library of mathematical functions that kernels link."""
    return str(Path(nvidia.__file__).parent / "lib" / "libdevice.10.bc")


def key_parts(source: ASTSource, target: GPUTarget, options: Mapping[str, Any]) -> dict[str, str]:
    """Return what determines a kernel's machine code.

    The source includes every function that the kernel calls, the assembler includes the architecture, and the
    environment holds the variables that change the compiler.

    Triton's own key also contains the digest of its libraries, which differ between Python versions. This one contains
    Triton's version instead, so that one wheel of machine code serves all of them.
    """
    backend, hashed = make_backend(target), copy.copy(source)
    hashed.fn = SimpleNamespace(cache_key=source_digest(source.fn)[0])
    variables = {name: value for name, value in get_cache_invalidating_env_vars().items() if name != LINE_INFO}
    return {
        "Triton": triton.__version__,
        "source": hashed.hash(),
        "assembler": f"{target.arch} {ASSEMBLER.version(target.arch)}",
        "options": backend.parse_options(dict(options)).hash(),
        "environment": repr(sorted(variables.items())),
    }
