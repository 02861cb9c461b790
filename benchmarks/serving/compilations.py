"""Compilations of a server, counted by Triton's listener, new libraries and its log; times of builders and steps."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .hook.sitecustomize import BUILDS, FILE, STEPS
from .measures import percentile

HOOK = Path(__file__).parent / "hook"
"""Folder that PYTHONPATH of a server begins with."""
MONITOR = re.compile(r"during inference: ([\w.<>-]+)")
"""Line of vLLM's monitor of compilations, and the name of the kernel."""
OURS = "compiles while a request waits"
"""Words of draftmark's own warning about a compilation after the start."""
NAMES = 12
"""Largest number of kernel names in a row."""


@dataclass(frozen=True)
class Mark:
    """State of a server's files at one time: their sizes in bytes, and the libraries."""

    events: int = 0
    log: int = 0
    builds: int = 0
    steps: int = 0
    libraries: frozenset[Path] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Watch:
    """Files of a server that show compilations, and the times in which vLLM builds the metadata of steps.

    Attributes:
        events: file that the hook writes.
        log: output of the server.
        caches: folder of all its caches.
    """

    events: Path
    log: Path
    caches: Path

    @property
    def builds(self) -> Path:
        """File of the builders' times, in the folder of the file of events."""
        return self.events.with_name("builds.jsonl")

    @property
    def steps(self) -> Path:
        """File of the times of SGLang's steps, in the folder of the file of events."""
        return self.events.with_name("steps.jsonl")

    @property
    def environment(self) -> dict[str, str]:
        """Variables that name the files of events, of the builders' times and of the steps, for the server."""
        return {FILE: str(self.events), BUILDS: str(self.builds), STEPS: str(self.steps)}

    def mark(self) -> Mark:
        """Return the current state."""
        libraries = frozenset(self.caches.rglob("*.so"))
        return Mark(*map(_size, (self.events, self.log, self.builds, self.steps)), libraries)

    def since(self, mark: Mark) -> dict[str, Any]:
        """Count the compilations after a mark.

        Returns:
            ``compiled`` and ``compile_s``: Triton kernels and their time. ``loaded``: kernels from Triton's cache.
            ``libraries``: new shared libraries, such as launchers and FlashInfer's modules. ``monitor``: lines of
            vLLM's monitor. ``warned``: draftmark's warnings. ``kernels``: names of the compiled kernels, and how often.
            ``builds``, only of vLLM: number of builds and p50 and p99 of their microseconds, by the kind of step:
            "decode", "prompt", or "mixed" with both.
        """
        lines = _lines(self.events, mark.events)
        compiled, log = _compiled(lines), _after(self.log, mark.log)
        names = Counter(line["kernel"] for line in compiled) or Counter(MONITOR.findall(log))
        return {
            "compiled": len(compiled),
            "compile_s": round(sum(line["ms"] for line in compiled) / 1000, 2),
            "loaded": len(lines) - len(compiled),
            "libraries": len(frozenset(self.caches.rglob("*.so")) - mark.libraries),
            "monitor": len(MONITOR.findall(log)),
            "warned": log.count(OURS),
            "kernels": [f"{name} x{count}" for name, count in names.most_common(NAMES)],
            **self._build_times(mark),
        }

    def compilations(self, mark: Mark) -> list[dict[str, Any]]:
        """Return the compilations after a mark: ``kernel``, ``ms``, and ``at``, the Unix time of the end."""
        return _compiled(_lines(self.events, mark.events))

    def steps_since(self, mark: Mark) -> list[dict[str, Any]]:
        """Return SGLang's steps after a mark, as `hook.sitecustomize.time_steps` wrote them; empty for vLLM."""
        return _lines(self.steps, mark.steps)

    def _build_times(self, mark: Mark) -> dict[str, Any]:
        times: dict[str, list[float]] = {}
        for line in _after(self.builds, mark.builds).splitlines():
            for kind, us in json.loads(line):
                times.setdefault(kind, []).append(us)
        found = {kind: [len(us), percentile(us, 0.5), percentile(us, 0.99)] for kind, us in sorted(times.items())}
        return {"builds": found} if found else {}


def _lines(path: Path, start: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _after(path, start).splitlines() if line.endswith("}")]


def _compiled(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if not line["loaded"]]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _after(path: Path, start: int) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
