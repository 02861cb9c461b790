"""Tests of the thread that compiles kernels while an engine loads its model."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from draftmark import Geometry
from draftmark_engines.early import EarlyKernels
from draftmark_testing.geometries import make_geometry


class Backend:
    """Stand-in for a loaded backend: `warm` notes the geometries, and fails with `fails`."""

    def __init__(self, fails: bool = False) -> None:
        self.info, self.fails = SimpleNamespace(name="stand-in"), fails
        self.warmed: SimpleQueue[tuple[Geometry, ...]] = SimpleQueue()

    def warm(self, geometries: tuple[Geometry, ...]) -> None:
        """Note a call."""
        self.warmed.put(geometries)
        if self.fails:
            raise RuntimeError("no compiler")


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> EarlyKernels:
    """Return a new `EarlyKernels`, in a process in which kernels are compiled before their first use."""
    monkeypatch.delenv("DRAFTMARK_PREPARE", raising=False)
    return EarlyKernels()


ONE, OTHER = make_geometry(), make_geometry(page_size=32)


def test_equal_geometries_are_compiled_once(early: EarlyKernels) -> None:
    """Every layer calls `begin`. Each group of geometries is compiled once, in the order of the first calls."""
    backend: Any = Backend()
    for group in ((ONE,), (ONE,), (OTHER,), (ONE,)):
        early.begin(backend, group, "cuda")
    assert [backend.warmed.get(timeout=10) for _ in range(2)] == [(ONE,), (OTHER,)]
    assert backend.warmed.empty()


def test_failure_does_not_end_the_thread(early: EarlyKernels) -> None:
    """After a failure the next geometries are still compiled; the start reports the error."""
    backend: Any = Backend(fails=True)
    early.begin(backend, (ONE,), "cuda")
    early.begin(backend, (OTHER,), "cuda")
    assert [backend.warmed.get(timeout=10) for _ in range(2)] == [(ONE,), (OTHER,)]


@pytest.mark.parametrize(("device", "prepares"), [("cpu", "1"), ("cuda", "0")])
def test_nothing_is_compiled_without_need(
    early: EarlyKernels, monkeypatch: pytest.MonkeyPatch, device: str, prepares: str
) -> None:
    """A CPU has no compiled kernels, and DRAFTMARK_PREPARE=0 leaves them to their launches."""
    monkeypatch.setenv("DRAFTMARK_PREPARE", prepares)
    backend: Any = Backend()
    early.begin(backend, (ONE,), device)
    assert early._thread is None and backend.warmed.empty()
