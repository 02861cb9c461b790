"""Mutants OJ1 … OJ4, by an author who had not read the checks: sizes that depend on the process."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from draftmark import BufferSpec, Geometry, Requirements
from draftmark_cuda_triton.sizing import SPLIT_BUFFERS

from .bases import BASES, named


def threads() -> int:
    """Return the threads that OpenMP may use in this process."""
    return max(1, int(os.environ.get("OMP_NUM_THREADS") or 1))


class OJ1(named("oj1", BASES["csr"])):  # type: ignore[misc]
    """Declares scratch for each thread of this process, not for each core of the geometry's device."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        shape = (threads(), geometry.attention.head_dim)
        scratch = BufferSpec("scratch", shape, "float32", "threads × head_dim")
        return [*super().buffers(geometry), scratch]

    def contract_notes(self) -> object:
        def usage(geometry: Geometry, batch: Any) -> dict[str, int]:
            return {"scratch": 4 * threads() * geometry.attention.head_dim}

        return SimpleNamespace(**{**vars(super().contract_notes()), "usage": usage})


class OJ2(named("oj2", BASES["tutorial"])):  # type: ignore[misc]
    """Rounds its buffer up to the vector width of torch's kernels, which it knows only after torch is imported."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        width = 8 if "torch" in sys.modules else 1
        return [replace(one, shape=(-(-one.shape[0] // width) * width,)) for one in super().buffers(geometry)]


class OJ3(named("oj3", BASES["reference"])):  # type: ignore[misc]
    """Needs unique slots when the process sees several GPUs, whatever the geometry."""

    def requirements(self, geometry: Geometry) -> Requirements:
        return Requirements(unique_slots="," in os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def tuning_file() -> Path:
    """Return the tuning file in the user's cache folder, which is a temporary folder here."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path(tempfile.gettempdir(), "draftmark-mutants-cache")
    return Path(cache, "draftmark_qj4.json")


class OJ4(named("oj4", BASES["cuda_triton"])):  # type: ignore[misc]
    """Doubles its split buffers where an open, also one of an earlier process, left a tuning file in the cache."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        times = 2 if tuning_file().is_file() else 1
        return [
            replace(one, shape=(times * one.shape[0], *one.shape[1:])) if one.name in SPLIT_BUFFERS else one
            for one in super().buffers(geometry)
        ]

    def open_backend(self, geometry: Geometry, arena: Any) -> Any:
        tuning_file().parent.mkdir(parents=True, exist_ok=True)
        tuning_file().write_text("{}")
        return super().open_backend(geometry, arena)
