"""Reads what this process holds outside Python: bytes of the C library's heap, and open files."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

_FILES = Path("/proc/self/fd")


class _Heap(ctypes.Structure):
    """glibc's ``struct mallinfo2``; see mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_bytes() -> int:
    """Return the bytes that malloc has given out and free has not taken back; 0 without glibc 2.33 or newer.

    Python's small objects are not part of it, because Python maps their memory itself.
    """
    read = _reader()
    if read is None:
        return 0
    heap = read()
    return int(heap.uordblks + heap.hblkhd)


def open_files() -> int:
    """Return the number of open file descriptors; 0 on systems without /proc."""
    return len(os.listdir(_FILES)) if _FILES.is_dir() else 0


@cache
def _reader() -> Callable[[], _Heap] | None:
    read = getattr(ctypes.CDLL(None), "mallinfo2", None) if os.name == "posix" else None
    if read is not None:
        read.restype = _Heap
    return read
