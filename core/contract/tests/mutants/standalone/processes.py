"""Mutants B01 … B07: right only in a process with the suite, in one kind of fresh memory, or on one thread."""

from __future__ import annotations

import contextvars
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from draftmark import BackendPlugin, Geometry

from .bases import BASES, named

_LOCAL = threading.local()
_PLANNED: contextvars.ContextVar[Any] = contextvars.ContextVar("planned")
_SWITCHED: list[bool] = []
Patch = Callable[[Any], None]


def _patched(name: str, layout: str, patch: Patch) -> type[BackendPlugin]:
    """Return a correct plugin with another name that patches the backends it opens."""
    base: Any = named(name, BASES[layout])

    class Patched(base):  # type: ignore[misc]
        def open_backend(self, geometry: Geometry, arena: Any) -> Any:
            opened = super().open_backend(geometry, arena)
            patch(opened)
            return opened

    Patched.__module__ = base.__module__
    return Patched


def _thread_local(backend: Any) -> None:
    """Keep the widths of a plan in thread-local storage."""
    plan, attend = backend.plan, backend.attend

    def planned(batch: Any) -> None:
        plan(batch)
        _LOCAL.widths, backend._widths = backend._widths, ()

    def attended(*args: Any) -> None:
        backend._widths = _LOCAL.widths
        attend(*args)

    backend.plan, backend.attend = planned, attended


def _context(backend: Any) -> None:
    """Keep the planned batch in a context variable, and attend only to that batch."""
    plan, write = backend.plan, backend.write_metadata

    def planned(batch: Any) -> None:
        _PLANNED.set(batch)
        plan(batch)

    def written(batch: Any) -> None:
        if _PLANNED.get(None) is not None:
            write(batch)

    backend.plan, backend.write_metadata = planned, written


def _adds(backend: Any) -> None:
    """Add the result to the output after only NaN was removed from it."""
    attend = backend.attend

    def attended(q: Any, cache: Any, batch: Any, out: Any) -> None:
        part = out.new_zeros(out.shape)
        attend(q, cache, batch, part)
        out.nan_to_num_(0.0).add_(part)

    backend.attend = attended


def _exact_in_tests(backend: Any) -> None:
    """Skip the last row's softmax unless a package of tests is loaded."""
    attend = backend.attend

    def attended(q: Any, cache: Any, batch: Any, out: Any) -> None:
        attend(q, cache, batch, out)
        if not {"pytest", "draftmark_contract"} & set(sys.modules):
            out[-1:] *= 2

    backend.attend = attended


def _needs_the_suite(backend: Any) -> None:
    """Use a helper of the suite at run time, which no engine installs."""
    from draftmark_contract import layouts

    backend.layout = layouts.Layout.PAGE_TABLE


def _main_thread(backend: Any) -> None:
    """Shield the first plan from Ctrl-C, which only the main thread can."""
    plan = backend.plan

    def planned(batch: Any) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        plan(batch)
        signal.signal(signal.SIGINT, before)

    backend.plan = planned


def _benchmarks(backend: Any) -> None:
    """Switch on cuDNN's benchmark for the whole process, when the first backend of the process is opened."""
    import torch

    if not _SWITCHED:
        _SWITCHED.append(True)
        torch.backends.cudnn.benchmark = True


B01 = _patched("b01", "csr", _thread_local)
B02 = _patched("b02", "tutorial", _context)
B03 = _patched("b03", "csr", _adds)
B04 = _patched("b04", "reference", _exact_in_tests)
B05 = _patched("b05", "tutorial", _needs_the_suite)
B06 = _patched("b06", "csr", _main_thread)
B07 = _patched("b07", "tutorial", _benchmarks)
