"""Loads copies of the `cuda_triton` package as separate backends of one process, to compare versions.

A kernel change is often smaller than the difference between two processes or machines, so versions alternate in the
turns. A copy is imported under another name; that works because the package's modules use relative imports. Versions
are for a GPU: after two copies have interpreted kernels on a CPU, a third cannot compile any in that process.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from draftmark.loaded import LoadedBackend

PACKAGE = "draftmark_cuda_triton"


def versions(pairs: list[str]) -> dict[str, LoadedBackend]:
    """Return the backends by name.

    Args:
        pairs: ``NAME=FOLDER`` each; the folder is a copy of the package, with `backend.py` in it.

    Raises:
        ValueError: a text without NAME=FOLDER, a name that occurs twice, or a folder without a copy of the package.
    """
    found: dict[str, LoadedBackend] = {}
    for one in pairs:
        name, _, folder = one.partition("=")
        where = Path(folder).resolve()
        if not name.isidentifier() or not folder or name in found:
            raise ValueError(f"version {one!r} is not NAME=FOLDER with a new name; write old=/path/of/{PACKAGE}")
        if not (where / "backend.py").is_file():
            raise ValueError(f"version {name!r} has no backend.py in {where}; name a copy of the folder {PACKAGE}")
        found[name] = LoadedBackend("cuda_triton", _package(f"{PACKAGE}__{name}", where).TritonPlugin())
    return found


def _package(alias: str, where: Path) -> Any:
    """Import a package once under another name."""
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            alias, where / "__init__.py", submodule_search_locations=[str(where)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[alias] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[alias])
    return sys.modules[alias]
