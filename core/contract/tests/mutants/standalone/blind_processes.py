"""Mutants OC4, OC5, OJ5 and OJ6, by an author who had not read the checks: what depends on the process."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

from draftmark import BufferSpec, Geometry, Requirements

from .bases import BASES, named


class OJ5(named("oj5", BASES["csr"])):  # type: ignore[misc]
    """Lists its buffers in the order of a set of their names, which the hash seed of the process decides."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        specs = {one.name: one for one in super().buffers(geometry)}
        return [specs[name] for name in set(specs)]


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


class OJ6(named("oj6", BASES["csr"])):  # type: ignore[misc]
    """Declares scratch for each processor that this process may use."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        shape = (processors(), geometry.attention.head_dim)
        return [*super().buffers(geometry), BufferSpec("scratch", shape, "float32", "processors × head_dim")]

    def contract_notes(self) -> object:
        def usage(geometry: Geometry, batch: Any) -> dict[str, int]:
            return {"scratch": 4 * processors() * geometry.attention.head_dim}

        return SimpleNamespace(**{**vars(super().contract_notes()), "usage": usage})


class OC4(named("oc4", BASES["csr"])):  # type: ignore[misc]
    """Reads the version counter of K, which tensors of inference mode do not have."""

    def open_backend(self, geometry: Geometry, arena: Any) -> Any:
        backend = super().open_backend(geometry, arena)
        right = backend.attend

        def attend(q: Any, cache: Any, batch: Any, out: Any) -> None:
            backend.version = cache.k._version
            right(q, cache, batch, out)

        backend.attend = attend
        return backend


class OC5(named("oc5", BASES["tutorial"])):  # type: ignore[misc]
    """Loses half of the last row if torch has several threads, as a reduction with a race does."""

    def open_backend(self, geometry: Geometry, arena: Any) -> Any:
        import torch

        backend = super().open_backend(geometry, arena)
        right = backend.attend

        def attend(q: Any, cache: Any, batch: Any, out: Any) -> None:
            right(q, cache, batch, out)
            if torch.get_num_threads() > 1:
                out[-1:] *= 0.5

        backend.attend = attend
        return backend


class OJ7(named("oj7", BASES["tutorial"])):  # type: ignore[misc]
    """Requires unique slots on every thread but the main one."""

    def requirements(self, geometry: Geometry) -> Requirements:
        return Requirements(unique_slots=threading.current_thread() is not threading.main_thread())
