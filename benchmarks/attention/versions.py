"""Versions of `cuda_triton` beside each other: copies of its package, each a backend of its own in one process.

What a change of a kernel gives is less than two processes, or two machines, differ by. So versions take turns, as peers
do; a copy is imported under another name, which works because a package's modules import each other relatively. They
are for a GPU: where two copies have interpreted kernels on a CPU, no third compiles any in that process.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from draftmark.loaded import LoadedBackend

PACKAGE = "draftmark_cuda_triton"


def versions(told: list[str]) -> dict[str, LoadedBackend]:
    """Backends by name.

    Args:
        told: ``NAME=FOLDER`` each; the folder is a copy of the package's own, with `backend.py` in it.

    Raises:
        ValueError: what is told is no such pair, a name is told twice, or its folder is no copy of the package.
    """
    found: dict[str, LoadedBackend] = {}
    for one in told:
        name, _, folder = one.partition("=")
        where = Path(folder).resolve()
        if not name.isidentifier() or not folder or name in found:
            raise ValueError(f"version {one!r} is no NAME=FOLDER with a name of its own; write old=/path/of/{PACKAGE}")
        if not (where / "backend.py").is_file():
            raise ValueError(f"version {name!r} has no backend.py in {where}; name a copy of the folder {PACKAGE}")
        found[name] = LoadedBackend("cuda_triton", _package(f"{PACKAGE}__{name}", where).TritonPlugin())
    return found


def _package(alias: str, where: Path) -> Any:
    """A package under another name, imported once."""
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            alias, where / "__init__.py", submodule_search_locations=[str(where)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[alias] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[alias])
    return sys.modules[alias]
