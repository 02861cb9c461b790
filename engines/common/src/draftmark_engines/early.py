"""Compilation of kernels while the engine still loads and compiles its model, so that a first start waits less."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from queue import SimpleQueue
from threading import Lock, Thread

from draftmark import Geometry, LoadedBackend, prepares_kernels

logger = logging.getLogger(__package__)

Work = tuple[LoadedBackend, tuple[Geometry, ...]]


class EarlyKernels:
    """Compiles missing kernels in a thread of this process, one group of geometries after another.

    Opening a backend compiles the kernels that are still missing, and waits for a kernel that the thread is compiling.
    No other code waits for the thread. A kernel that it cannot compile raises its error when the backend opens.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, tuple[Geometry, ...]]] = set()
        self._waiting: SimpleQueue[Work] = SimpleQueue()
        self._thread: Thread | None = None
        self._lock = Lock()

    def begin(self, backend: LoadedBackend, geometries: Iterable[Geometry], device: str) -> None:
        """Queue the kernels of these geometries for compilation. Geometries of a CPU, and known ones, are skipped.

        Args:
            device: type of the device, such as "cuda".
        """
        made = tuple(geometries)
        key = backend.info.name, made
        if device == "cpu" or not prepares_kernels():
            return
        with self._lock:
            if key in self._seen:
                return
            self._seen.add(key)
            self._waiting.put((backend, made))
            if self._thread is None:
                # A daemon, because it never ends.
                self._thread = Thread(target=self._run, name="draftmark-early-kernels", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            backend, geometries = self._waiting.get()
            try:
                backend.warm(geometries)
            except Exception as error:  # opening the backend meets the same error, and reports it
                logger.debug("kernels of %s are not compiled early: %s", backend.info.name, error)


EARLY_KERNELS = EarlyKernels()
"""The process's only instance. Attention layers queue geometries; metadata builders open the backends later."""
