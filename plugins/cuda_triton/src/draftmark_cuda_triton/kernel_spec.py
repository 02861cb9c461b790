"""One compiled specialization of a kernel, as Triton's own binder derives it from a call. No GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import create_function_from_signature

from .launch.launcher import KernelCall

WARP_THREADS = 32


@dataclass(frozen=True)
class KernelSpec:
    """Describes one compiled specialization of a Triton or Gluon kernel.

    Attributes:
        kernel: the function of `triton.jit` or `gluon.jit`.
        target: GPU for which it is compiled.
        signature: (parameter, Triton type) of every parameter, in order; "constexpr" for constants.
        constexprs: (path, value) of every constant; a path is the parameter's index in a tuple.
        attrs: (path, attributes) of each parameter with known alignment, as `ASTSource` takes them.
        options: compiler options as given to `triton.compile`, the defaults of this Triton included.
    """

    kernel: Any
    target: GPUTarget
    signature: tuple[tuple[str, Any], ...]
    constexprs: tuple[tuple[Any, Any], ...]
    attrs: tuple[tuple[Any, Any], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """Full name of the kernel: module and function."""
        return f"{self.kernel.__module__}.{self.kernel.__name__}"

    def source(self) -> ASTSource:
        """Return the input of `triton.compile`, an `ASTSource` or a `GluonASTSource`."""
        attrs = {path: [list(one) for one in found] for path, found in self.attrs}
        given = self.kernel, dict(self.signature), dict(self.constexprs), attrs
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            return GluonASTSource(*given)
        return ASTSource(*given)

    def compile(self) -> CompiledKernel:
        """Compile the kernel, or read it from Triton's cache folder. No GPU is needed."""
        return triton.compile(self.source(), target=self.target, options=dict(self.options))


def spec_of(call: KernelCall, arch: int) -> KernelSpec:
    """Return the specialization that Triton launches for a call of `launch_kernel` on a GPU of this architecture."""
    kernel, args, constants = call
    backend, binder = _binder(kernel, arch)
    # Triton's `JITFunction.run` adds the same constants before it binds the arguments.
    for name, value in (("debug", kernel.debug or knobs.runtime.debug), *_compilation_knobs()):
        constants = {name: value} | constants
    bound, specialization, options = binder(*args, **constants)
    options, signature, constexprs, attrs = kernel._pack_args(backend, constants, bound, specialization, options)
    return KernelSpec(
        kernel, GPUTarget("cuda", arch, WARP_THREADS), tuple(signature.items()), tuple(constexprs.items()),
        tuple((path, tuple(map(tuple, found))) for path, found in attrs.items()), tuple(options.__dict__.items()),
    )  # fmt: skip


def _compilation_knobs() -> Iterator[tuple[str, Any]]:
    """Return the compiler options that Triton reads from its environment, as far as this Triton has them."""
    for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):
        if hasattr(knobs.compilation, name):
            yield name, getattr(knobs.compilation, name)


@cache
def _binder(kernel: Any, arch: int) -> tuple[Any, Any]:
    """Return Triton's backend for an architecture, and the function that specializes a kernel's arguments."""
    backend = make_backend(GPUTarget("cuda", arch, WARP_THREADS))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)
