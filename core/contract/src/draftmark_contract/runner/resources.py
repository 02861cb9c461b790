"""Recognises errors that the machine causes in an item, such as no memory left, and returns memory of the device."""

from __future__ import annotations

import errno
import gc
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from .stopped import MemoryRanOut, RunStopped

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TORCH_CPU = re.compile(r"DefaultCPUAllocator: .*?you tried to allocate (\d+) bytes", re.DOTALL)
"""Error of torch's CPU allocator, which is a plain RuntimeError."""

_DEVICE = re.compile(
    r"\b(?:CUDA|HIP|NPU)\b[^\n]*\bout of memory\b"  # torch's allocators, its calls of the driver, and Triton
    r"|\bCUDA_ERROR_OUT_OF_MEMORY\b|\bcudaErrorMemoryAllocation\b|\bCUresult 2\b|\bhipErrorOutOfMemory\b"
    r"|\bcode(?: is|:)? ?207001\b|\bEL0004\b",  # CANN: ACL_ERROR_RT_MEMORY_ALLOCATION
    re.IGNORECASE,
)
"""Errors of a device without memory, also if other processes hold it. Most are no `torch.OutOfMemoryError`."""

_SIZE = r"([\d.]+) ?(bytes|[KMGT]iB)"
_REQUEST = re.compile(rf"Tried to allocate {_SIZE}", re.IGNORECASE)
_CAPACITY = re.compile(rf"total capacity of {_SIZE}|{_SIZE} total capacity")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

_LOADER = re.compile(r"failed to map segment from shared object|cannot map zero-fill pages|Cannot allocate memory")
"""Errors of the dynamic loader, which become an ImportError, or an OSError without a number."""

KEPT_BYTES = 2**30
"""Freed device memory that a process keeps for its next item."""


def release_memory(device: str) -> None:
    """Return memory that an item has freed to the device, because the other workers share it."""
    import torch

    module: Any = getattr(torch, device.partition(":")[0], None)
    if not hasattr(module, "empty_cache") or not hasattr(module, "memory_reserved"):
        return
    # An error of earlier work can surface here. The next item meets it again.
    with suppress(RuntimeError):
        if module.memory_reserved() > KEPT_BYTES:
            gc.collect()
            module.empty_cache()


def exhausted(error: BaseException, item: str) -> RunStopped | None:
    """Return why the machine, not the backend, caused the error of an item; None if the backend caused it.

    A request for more memory than the machine has is an error of the backend.
    """
    # Start with the innermost cause, which has the operating system's message.
    for one in reversed(list(_chain(error))):
        if isinstance(one, OSError) and one.errno in _DISK:
            where = one.filename or "unnamed"
            return RunStopped(f"in {item} a file cannot be written ({one.strerror}: {where}); free space there")
        if _out_of_memory(one):
            remedy = "use fewer --workers, or a machine with more memory"
            return MemoryRanOut(f"in {item} memory ran out ({_first_line(one)}); {remedy}")
    return None


def _out_of_memory(error: BaseException) -> bool:
    if found := _TORCH_CPU.search(str(error)):
        return int(found[1]) <= _memory()
    by_words = isinstance(error, RuntimeError) and _DEVICE.search(str(error)) is not None
    if by_words or type(error).__name__ == "OutOfMemoryError":
        return not _larger_than_the_device(str(error))
    if isinstance(error, (ImportError, OSError)) and _LOADER.search(str(error)):
        return True
    lacking = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return lacking or isinstance(error, MemoryError)


def _larger_than_the_device(message: str) -> bool:
    """Return True if a message of torch's allocator names a request of more bytes than the device has."""
    request, capacity = _REQUEST.search(message), _CAPACITY.search(message)
    return request is not None and capacity is not None and _bytes_of(request) > _bytes_of(capacity)


def _bytes_of(found: re.Match[str]) -> float:
    count, unit = (one for one in found.groups() if one is not None)
    return float(count) * _UNITS[unit]


def _memory() -> int:
    """Return the bytes of this machine's memory; 0 if the system does not report them."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of that cause, and so on."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
