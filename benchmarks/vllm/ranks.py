"""What a rank of tensor parallelism does beside vLLM's worker: it maps the memory of its fleet, stands on a core of its
own while it is asked, and watches itself.

vLLM forks its ranks where it can, and a fork knows the memory. One that it starts anew finds the handles in a file.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from .cores import pin
from .memory import HANDLES, Mapped, register


class Rank:
    """What vLLM mixes into its worker, for `collective_rpc`; its names are none of a worker's own."""

    rank: int

    def take_core(self, cores: list[int], rest: list[int]) -> None:
        """Stand on the core of one's own number; one's other threads on the rest."""
        pin(cores[self.rank], rest)

    def watch_begin(self, kind: str) -> None:
        """Begin a watch of `profile`, by its name."""
        from .profile import KINDS

        self._watch = next(one for one in KINDS if one.__name__ == kind)()
        self._watch.begin()

    def watch_end(self) -> None:
        """End it."""
        self._watch.end()

    def watch_said(self, steps: int) -> dict[str, Any]:
        """What it has seen, of as many steps."""
        return self._watch.said(steps)


if HANDLES in os.environ:
    register(Mapped(pickle.loads(Path(os.environ[HANDLES]).read_bytes())))
