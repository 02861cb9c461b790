"""One kernel to compile, as plain data: it has a key, and another process can compile it. No torch."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import DependenciesFinder

from .assembler import ASSEMBLER

FORMAT = 2
"""Version of the keys and of the files of an entry."""
LINE_INFO = "TRITON_DISABLE_LINE_INFO"
"""Environment variable that changes debug sections only, so it is not part of a key."""


def _hash_callees_first() -> None:
    """Make the digest of a kernel's source independent of the functions that were hashed before it.

    Triton 3.6 collects the constants of a called function before it computes them, so the digest has them only if the
    function was hashed earlier. A second start then compiles kernels again that the first one stored.
    """
    update = DependenciesFinder._update_hash

    def update_after_callee(finder: DependenciesFinder, function: Any) -> None:
        function.cache_key  # noqa: B018  # the property computes the digest and the constants
        update(finder, function)

    DependenciesFinder._update_hash = update_after_callee


_hash_callees_first()


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
    backend = make_backend(target)
    variables = {name: value for name, value in get_cache_invalidating_env_vars().items() if name != LINE_INFO}
    return {
        "Triton": triton.__version__,
        "source": source.hash(),
        "assembler": f"{target.arch} {ASSEMBLER.version(target.arch)}",
        "options": backend.parse_options(dict(options)).hash(),
        "environment": repr(sorted(variables.items())),
    }
