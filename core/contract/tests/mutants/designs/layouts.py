"""Layouts of mutants, reasons why the others have no such defect, and factories of mutants in one layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftmark.plugin import BackendPlugin

from ..mutant import ONLY, Mutant

CSR, REFERENCE = ("csr",), ("reference",)
IN_PLACE = "it reads the batch's table and mask in place"
SIZED_BY_CORE = "it reads the batch's page table and mask in place, and the core sizes those"
NO_INDPTR = "no indptr"
NO_FP8 = "the reference serves no quantised KV"
NO_SUCH_PART = "the other layout has no such part"
ONE_DESIGN = "one design is enough"
ONLY_TRITON = "a cache of cuda_triton's host code"
QUANTISED: dict[str, Any] = {"layouts": CSR, "absent": NO_FP8}
READS_NO_TABLE: dict[str, Any] = {"layouts": REFERENCE, "absent": "attend does not read the batch's page table"}
TREES: dict[str, Any] = {"layouts": REFERENCE, "absent": "tree operations do not depend on the layout"}


def of_tutorial(name: str, what: str, source: str, plugin: type[BackendPlugin], usage: Any = None) -> Mutant:
    """Return a mutant that is a subclass of the tutorial's plugin."""
    return Mutant(name, what, source, plugin=plugin, usage=usage, layouts=("tutorial",), absent=ONLY)


def in_layouts(
    name: str, what: str, layouts: tuple[str, ...], patch: Callable[[Any], None], source: str = ""
) -> Mutant:
    """Return a mutant of these layouts only."""
    return Mutant(name, what, source, patch=patch, layouts=layouts, absent=ONE_DESIGN)


def on_reference(
    name: str, what: str, patch: Callable[[Any], None] | None = None, source: str = "", hooks: Any = None
) -> Mutant:
    """Return a mutant of the reference's layout only."""
    return Mutant(name, what, source, hooks, patch, layouts=REFERENCE, absent=ONE_DESIGN)
