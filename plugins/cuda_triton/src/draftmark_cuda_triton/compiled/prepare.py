"""Preparation of a geometry's kernels: find them in the store, compile the missing ones in parallel, load them."""

from __future__ import annotations

import time

import torch

from draftmark import Geometry, Progress, StateGeometry, WarmedKernels, prepares_kernels

from ..kernel_list import calls_of
from ..kernel_spec import KernelSpec
from ..launch.launcher import LAUNCHER, KernelCall
from ..switches import is_tested_triton, logger
from .folder import kernel_store
from .loading import COUNTS, finish_loading
from .pool import compile_all
from .source import KernelSource
from .store import Store

SLOWEST = ("attend_prefill", "attend", "")
"""Beginnings of kernel names, those that take longest to compile first."""


def prepare(geometry: Geometry, device: torch.device, trees: bool = False) -> None:
    """Load every kernel of a geometry onto a GPU, compiling those that the store lacks in parallel.

    A kernel that cannot be prepared is logged; it compiles when it is first launched.

    Args:
        device: device of the backend. Nothing happens for a CPU, where kernels are interpreted.
        trees: include the tree operations.
    """
    if device.type != "cuda" or not prepares_kernels():
        return
    with torch.cuda.device(device):
        _prepare(geometry, trees)


def prepare_state(geometry: StateGeometry, device: torch.device) -> None:
    """Load every kernel of layers with recurrent state; as `prepare`."""
    from ..state.kernel_list import state_calls_of

    if device.type != "cuda" or not prepares_kernels():
        return
    with torch.cuda.device(device):
        if is_tested_triton():
            _load(geometry.device.arch, state_calls_of(geometry))


def _prepare(geometry: Geometry, trees: bool) -> None:
    if is_tested_triton():
        _load(geometry.device.arch, calls_of(geometry, trees=trees))


def _load(arch: int, calls: dict[KernelSpec, KernelCall]) -> None:
    found = store_kernels(list(calls))
    logger.info(
        "%d kernels (%.1f MiB) for sm_%d: %d compiled now, %d from an installed wheel, others from %s",
        found.kernels, found.num_bytes / 2**20, arch, found.compiled, found.shipped, found.folder,
    )  # fmt: skip
    for error in finish_loading([LAUNCHER.find_compiled(*call) for call in calls.values()]):
        # A kernel that is listed but never launched must not end a start.
        logger.warning("a kernel of the geometry was not loaded: %s: %s", type(error).__name__, error)
    COUNTS.prepared = True


def store_kernels(specs: list[KernelSpec], progress: Progress | None = None) -> WarmedKernels:
    """Compile the kernels that the store lacks, in parallel. No GPU is needed."""
    store = kernel_store()
    made = (KernelSource.of(spec.source(), spec.target, dict(spec.options)) for spec in specs)
    sources = {one.key: one for one in made}
    missing, compiled = _missing(store, sources), 0
    if missing:
        with store.compiling():
            # Another rank may have compiled them while this one waited.
            compiled = _compile(store, _missing(store, sources), progress or _log)
    entries = [entry for entry in map(store.find, sources.values()) if entry is not None]
    return WarmedKernels(
        len(entries), compiled, sum(one.shipped for one in entries), sum(one.num_bytes for one in entries),
        str(store.root), len(sources) - len(entries),
    )  # fmt: skip


def _missing(store: Store, sources: dict[str, KernelSource]) -> list[KernelSource]:
    """Return the kernels that the store lacks, those that take longest to compile first."""
    found = [one for one in sources.values() if store.find(one) is None]
    return sorted(found, key=lambda one: next(n for n, name in enumerate(SLOWEST) if one.name.startswith(name)))


def _compile(store: Store, missing: list[KernelSource], progress: Progress) -> int:
    """Compile kernels into the store, and return the number that succeeded."""
    if not missing:
        return 0
    start = time.perf_counter()
    logger.info("compiling %d kernels for sm_%d into %s", len(missing), missing[0].arch, store.root)
    results = compile_all(missing, store, progress)
    for one in results:
        if one.error:
            logger.warning("kernel %s was not compiled ahead of time: %s", one.name, one.error)
    failed = sum(bool(one.error) for one in results)
    logger.info("compiled %d kernels in %.1f s", len(results) - failed, time.perf_counter() - start)
    return len(results) - failed


def _log(done: int, count: int, kernel: str) -> None:
    logger.info("%d of %d kernels compiled: %s", done, count, kernel)
