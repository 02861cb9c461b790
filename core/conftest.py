"""Fixtures of core's tests. Helpers without a fixture are in `draftmark_testing`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import draftmark
from draftmark import Geometry
from draftmark.arena import Arena
from draftmark.backend import AttentionBackend
from draftmark_reference.backend import ReferenceBackend
from draftmark_testing import geometries, processes
from draftmark_testing.distributions import Distributions
from draftmark_testing.processes import CommandOutcome, Process, Terminal
from draftmark_tools.cli import main

settings.register_profile(
    "draftmark", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("draftmark")


@pytest.fixture(scope="session")
def make_geometry() -> Callable[..., Geometry]:
    """Return `draftmark_testing.geometries.make_geometry`."""
    return geometries.make_geometry


@pytest.fixture(scope="session")
def reference() -> draftmark.LoadedBackend:
    """Return the reference backend, loaded through its entry point."""
    return draftmark.load("reference")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: for tiny tensors on a busy machine a second thread is five times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., Process]:
    """Return `draftmark_testing.processes.run_python`."""
    return processes.run_python


@pytest.fixture(name="draftmark")
def _draftmark(capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandOutcome]:
    """Return a function that runs a command line in this process."""

    def run(*argv: object) -> CommandOutcome:
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return CommandOutcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Terminal]:
    """Return a function (stream, columns) that replaces stdout or stderr by a terminal."""

    def make(stream: str, columns: int) -> Terminal:
        made = Terminal()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, stream, made)
        return made

    return make


@pytest.fixture
def broken_torch(tmp_path: Path) -> Path:
    """Return a folder with a module `torch` that raises on import."""
    folder = tmp_path / "broken-torch"
    folder.mkdir()
    (folder / "torch.py").write_text("raise RuntimeError('libascend_hal.so: cannot open shared object file')\n")
    return folder


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Return a function that installs a temporary distribution; see `Distributions.write`."""
    written = Distributions(tmp_path)

    def make(backend: str, **how: object) -> Path:
        site = written.write(backend, **how)
        monkeypatch.syspath_prepend(str(site))
        return site

    yield make
    for module in written.modules:
        sys.modules.pop(module, None)


@pytest.fixture(scope="session")
def open_reference(reference: draftmark.LoadedBackend) -> Callable[[Geometry], tuple[AttentionBackend, Arena]]:
    """Return a function (geometry) that allocates a guarded, poisoned arena and binds the reference backend to it.

    The function returns the backend and the arena.
    """

    def opened(geometry: Geometry) -> tuple[AttentionBackend, Arena]:
        arena = Arena.allocate(reference.buffers(geometry), "cpu", guard=True)
        return ReferenceBackend(geometry, arena), arena

    return opened
