"""Fixtures for the tests of every distribution."""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collections, which scan the growing list of tests and take a third of the time.

    Then freeze the modules and the list: a full garbage collection, which some tests make, would scan them again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # The interpreter's end collects the frozen objects, or extension modules report them as leaks.
        atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], AbstractContextManager[Path]]:
    """Return a function that locks and yields a folder, by name, shared by all workers of a test run."""
    run = tmp_path_factory.getbasetemp()
    run = run.parent if "PYTEST_XDIST_WORKER" in os.environ else run

    @contextmanager
    def entered(name: str) -> Iterator[Path]:
        folder = run / name
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder

    return entered


@pytest.fixture(autouse=True)
def few_compilations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile only launched kernels in a test on a device. A test launches few of its geometry's kernels."""
    if request.node.get_closest_marker("device") and "DRAFTMARK_PREPARE" not in os.environ:
        monkeypatch.setenv("DRAFTMARK_PREPARE", "0")


@pytest.fixture
def opening_order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Record a backend's calls in order: (prepare, geometries), (allocate or bind, geometry), (capture, key)."""
    from draftmark import LoadedBackend
    from draftmark_reference.graphs.recorded import RecordedGraphState

    events: list[tuple[str, Any]] = []
    for owner, names in ((LoadedBackend, ("prepare", "allocate", "bind")), (RecordedGraphState, ("capture",))):
        for name in names:
            real = getattr(owner, name)

            def noted(self: Any, first: Any, *rest: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
                events.append((_name, list(first) if _name == "prepare" else first))
                return _real(self, first, *rest, **options)

            monkeypatch.setattr(owner, name, noted)
    return events
