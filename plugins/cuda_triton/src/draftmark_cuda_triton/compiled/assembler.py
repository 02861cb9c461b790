"""The assembler (ptxas) of draftmark's kernels: the one that the user names, else Triton's own. No torch.

In a process in which it compiles, torch names a ptxas of its own in TRITON_PTXAS_PATH. The next process starts without
this variable and would not find the kernels that the first one stored, so a path inside torch's package is ignored.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import RLock

from triton.backends.nvidia.compiler import get_ptxas

VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
"""Environment variables that name another assembler."""


class Assembler:
    """Selects the assembler of this process. torch and Triton read and change the process's environment."""

    def __init__(self) -> None:
        self._lock = RLock()

    def version(self, arch: int) -> str:
        """Return what the assembler for an architecture prints about its version."""
        with self.selected():
            return _version_of(get_ptxas(arch).path)

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Compile in this context with the assembler of `version`."""
        with self._lock:
            removed = {name: os.environ.pop(name) for name in torchs_variables()}
            try:
                yield
            finally:
                os.environ.update(removed)


ASSEMBLER = Assembler()


def torchs_variables() -> list[str]:
    """Return the variables that torch has set in this process."""
    return [name for name in VARIABLES if _is_inside_torch(os.environ.get(name))]


@cache
def _version_of(path: str) -> str:
    return subprocess.check_output([path, "--version"], text=True)


@cache
def _is_inside_torch(path: str | None) -> bool:
    found = path and importlib.util.find_spec("torch")
    places = (found.submodule_search_locations or ()) if found else ()
    return any(Path(str(path)).resolve().is_relative_to(Path(place).resolve()) for place in places)
