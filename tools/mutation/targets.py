"""Targets: the source files of a backend to mutate, and the modules that a copy shares with the original."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from .mutation import Mutation, mutations


@dataclass(frozen=True)
class Target:
    """Names the source files of one installed backend that are mutated together.

    Attributes:
        name: heading of the target on the page; value of ``--backend``.
        backend: the backend's name.
        package: the backend's package, as installed.
        alias: package name of a changed copy. A copy next to the original resolves its relative imports.
        modules: paths of the mutated files, relative to the package, without ending.
        shared: modules that a copy takes unchanged from the original: they change state of the whole process, or are
            slow to import.
        renamed: subpackage of a copy → subpackage that has its files, for a package that imports itself twice.
    """

    name: str
    backend: str
    package: str
    alias: str
    modules: tuple[str, ...]
    shared: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        """Folder of the package's files."""
        spec = importlib.util.find_spec(self.package)
        assert spec is not None and spec.origin is not None, f"{self.package} is not installed"
        return Path(spec.origin).parent

    def source(self, module: str) -> str:
        """Return the text of one module."""
        return (self.folder / f"{module}.py").read_text(encoding="utf-8")

    def mutations(self) -> list[Mutation]:
        """Return every change of every module."""
        return [one for module in self.modules for one in mutations(module, self.source(module))]


_TRITON = "draftmark_cuda_triton"
_INTERPRETER = (
    "operands",
    "operations",
    "patches",
    "programs",
    "recipe",
    "recorder",
    "reductions",
    "shortcuts",
)
_KERNELS = (
    "combine",
    "compact_kv",
    "convert",
    "decode_verify",
    "kv_write",
    "mainloop",
    "mask",
    "prefill",
    "prefill_schedule",
    "reduce",
    "softmax",
    "split_kv",
    "tile",
    "tile_schedule",
    "tree_tail",
)

TARGETS = {
    one.name: one
    for one in (
        Target(
            "reference",
            "reference",
            "draftmark_reference",
            "mutated_draftmark_reference",
            ("__init__", "contract", "sizing", "backend", "attention"),
        ),
        Target(
            "cuda_triton",
            "cuda_triton",
            _TRITON,
            f"mutated_{_TRITON}",
            (
                "__init__",
                "contract",
                "support",
                "sizing",
                "heuristics/common",
                "heuristics/interpreted",
                "heuristics/select",
                "heuristics/sm80",
                "heuristics/sm90",
                "heuristics/split_kv",
                "heuristics/upcast",
                "backend",
                "prefill",
                "decode_verify",
                "launch/operands",
                "launch/attention",
                "launch/combine",
                "launch/launcher",
                "launch/metadata",
                "kv_write",
                "tree_ops",
            ),
            shared=("kernel_variants",),
        ),
        Target(
            "cuda_triton.interpreter",
            "cuda_triton",
            "draftmark_triton_interpreter",
            "draftmark_triton_interpreter",
            _INTERPRETER,
        ),
        Target(
            "cuda_triton.kernels",
            "cuda_triton",
            _TRITON,
            f"mutated_{_TRITON}",
            ("kernel_variants", *(f"kernels/{name}" for name in (*_KERNELS, "verify_tree"))),
            renamed=(("interpreted_kernels", "kernels"),),
        ),
    )
}
