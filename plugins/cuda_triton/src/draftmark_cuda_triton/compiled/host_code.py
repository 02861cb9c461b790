"""Cache of the host code that Triton compiles with a C compiler, in draftmark's own folder.

Triton 3.6 compiles one launcher for each signature of a kernel, and every Triton compiles the functions that load
kernels. They go below TRITON_CACHE_DIR. torch changes that variable while a process runs, so a second start compiles
them again.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import RLock
from typing import Any

from triton import knobs
from triton.runtime.cache import CacheManager, FileCacheManager


class StoredHostCode(CacheManager):  # type: ignore[misc]  # mypy reads no code of Triton
    """Triton's cache manager for one key of host code.

    Args:
        folder: folder of all keys.
        key: Triton's key of the source and the platform.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder / key

    def get_file(self, filename: str) -> str | None:
        """Return the path of a stored file, or None."""
        path = self._folder / filename
        return str(path) if path.is_file() else None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Store a file by an atomic rename, and return its path."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / filename
        temporary = path.with_name(f".{filename}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        temporary.write_bytes(data if isinstance(data, bytes) else str(data).encode())
        temporary.replace(path)
        return str(path)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return None, because host code has no groups."""
        return None

    def put_group(self, filename: str, group: dict[str, str]) -> None:
        """Do nothing, because host code has no groups."""


class HostCode:
    """Directs the host code that Triton compiles in this process to a folder."""

    def __init__(self) -> None:
        self._folder: ContextVar[Path | None] = ContextVar("draftmark_host_code_folder", default=None)
        self._lock = RLock()

    @contextmanager
    def stored_in(self, folder: Path) -> Iterator[None]:
        """Store the host code that Triton compiles in this context and thread below `folder`."""
        with self._lock:
            previous = knobs.cache.manager_class
            others = previous or FileCacheManager

            def manager(key: str, **flags: bool) -> CacheManager:
                # Other threads compile their own kernels meanwhile, into their own folder.
                own = self._folder.get()
                return others(key, **flags) if own is None or any(flags.values()) else StoredHostCode(own, key)

            token = self._folder.set(folder)
            knobs.cache.manager_class = manager
            try:
                yield
            finally:
                knobs.cache.manager_class = previous
                self._folder.reset(token)


HOST_CODE = HostCode()
