"""What is mutated: the source files of one backend, and what a copy of its package shares with the original."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from .mutation import Mutation, mutations


@dataclass(frozen=True)
class Target:
    """Some source files of one installed backend.

    Attributes:
        name: heads its part of the page; what ``--backend`` takes.
        backend: the backend's name.
        package: its package, as installed.
        alias: the name of a changed copy. A copy beside the original finds what it imports relatively.
        modules: the files that are mutated, without ending, relative to the package.
        shared: modules that a copy takes from the original as they are: they change something in the whole process,
            or are dear to import.
        renamed: subpackage of a copy → subpackage whose files it has, for a package that imports itself twice.
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
        """Where the package's files lie."""
        spec = importlib.util.find_spec(self.package)
        assert spec is not None and spec.origin is not None, f"{self.package} is not installed"
        return Path(spec.origin).parent

    def source(self, module: str) -> str:
        """The text of one of its files."""
        return (self.folder / f"{module}.py").read_text(encoding="utf-8")

    def mutations(self) -> list[Mutation]:
        """Every change, file by file."""
        return [one for module in self.modules for one in mutations(module, self.source(module))]


_TRITON = "draftmark_cuda_triton"
_INTERPRETER = (
    "flavours",
    "interpreter",
    "operands",
    "operations",
    "programs",
    "recipe",
    "recorder",
    "reductions",
    "shortcuts",
    "starting",
)
_KERNELS = (
    "compact",
    "convert",
    "extend",
    "kv_write",
    "merge",
    "reduce",
    "schedule",
    "split",
    "tail",
    "tile",
    "uniform",
)

TARGETS = {
    one.name: one
    for one in (
        Target(
            "reference",
            "reference",
            "draftmark.reference",
            "draftmark.mutated_reference",
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
                "tiling",
                "backend",
                "extend",
                "few_rows",
                "launch",
                "writing",
                "tree_ops",
            ),
            shared=("interpreter", "flavours"),
        ),
        Target(
            "cuda_triton.interpreter",
            "cuda_triton",
            _TRITON,
            f"mutated_{_TRITON}",
            _INTERPRETER,
            renamed=(("interpreted_kernels", "kernels"),),
        ),
        Target(
            "cuda_triton.kernels",
            "cuda_triton",
            _TRITON,
            f"mutated_{_TRITON}",
            tuple(f"kernels/{name}" for name in (*_KERNELS, "walk")),
            shared=("interpreter",),
            renamed=(("interpreted_kernels", "kernels"),),
        ),
    )
}
