"""Extension of vLLM's worker for tensor parallelism: shared memory, pinning and profiling of each rank.

vLLM forks its ranks where it can, and a forked rank inherits the mapped memory. A rank that is started as a new process
reads the handles from a file.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from .cores import pin
from .memory import HANDLES, Mapped, register


class Rank:
    """Methods that vLLM mixes into its worker, for `collective_rpc`. No name is one of the worker's own."""

    rank: int

    def take_core(self, cores: list[int], rest: list[int]) -> None:
        """Pin this rank's first thread to the core of its rank number, and its other threads to the rest."""
        pin(cores[self.rank], rest)

    def watch_begin(self, kind: str) -> None:
        """Start a profiler of the module `profile`, selected by its class name."""
        from .profile import KINDS

        self._watch = next(one for one in KINDS if one.__name__ == kind)()
        self._watch.begin()

    def watch_end(self) -> None:
        """Stop the profiler."""
        self._watch.end()

    def watch_said(self, steps: int) -> dict[str, Any]:
        """Return the profiler's measurements over this number of steps."""
        return self._watch.said(steps)


if HANDLES in os.environ:
    register(Mapped(pickle.loads(Path(os.environ[HANDLES]).read_bytes())))
