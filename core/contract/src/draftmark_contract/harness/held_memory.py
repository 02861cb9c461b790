"""Measures the memory that this process keeps: live tensors, Python's traced bytes, and the device's allocations."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..check import ContractViolation

LIMIT = 32 * 1024
"""Bytes that thousands of calls may add after others have filled the bounded caches of Python and torch.

A plan of cuda_flashinfer adds up to 23 KiB, which do not grow with the number of plans.
"""


def assert_keeps_no_memory(what: str, calls: int, device: str, call: Callable[[int], object]) -> None:
    """Run ``call(n)`` for n below `calls`, and check that the last two thirds add no tensor and at most `LIMIT` bytes.

    Args:
        what: subject of the message, such as ``"plan()"``.
        device: device of the backend; its allocations are measured too.

    Raises:
        ContractViolation: the process keeps memory of the last two thirds of the calls.
    """
    tracemalloc.start(1)
    try:
        for number in range(calls // 3):
            call(number)
        # The first count of tensors stays in memory until the end, so both measurements of bytes include it.
        tensors, third = live_tensors(), _Bytes.now(device)
        for number in range(calls // 3, calls):
            call(number)
        end, more = _Bytes.now(device), live_tensors() - tensors
        most = tracemalloc.take_snapshot().statistics("lineno")[0].traceback[0]
    finally:
        tracemalloc.stop()
    grown = end.traced - third.traced
    if more or grown > LIMIT or end.allocated > third.allocated:
        names = [f"{count} tensors {shape}" for shape, count in more.most_common(3)]
        bytes_ = f"{grown} traced bytes and {end.allocated - third.allocated} bytes of the device more"
        raise ContractViolation(
            f"{what} leaves memory in the process",
            batch=f"{calls - calls // 3} calls after {calls // 3} others, with other lengths and layouts",
            got=", ".join([*names, bytes_, f"most of the traced ones in {most.filename}:{most.lineno}"]),
            expected=f"no tensor, and at most {LIMIT} bytes after all calls together",
            formula="draftmark.backend.AttentionBackend: a backend allocates nothing in these methods",
            bug="sglang#27664",
            remedy="declare buffers in buffers(); bound every cache, and key none by lengths",
        )


@dataclass(frozen=True)
class _Bytes:
    """Bytes that this process holds: those that Python has traced, and those allocated on the device."""

    traced: int
    allocated: int

    @classmethod
    def now(cls, device: str) -> _Bytes:
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0]
        cuda = torch.device(device).type == "cuda"
        return cls(traced, torch.cuda.memory_allocated() if cuda else 0)


def live_tensors() -> Counter[str]:
    """Return all tensors and storages that Python can reach: in modules, closures, caches and threads, by shape."""
    gc.collect()
    kinds = (torch.Tensor, torch.UntypedStorage)
    # type() and not isinstance: some objects of other libraries run code, or warn, when their class is read.
    found = (one for one in gc.get_objects() if issubclass(type(one), kinds))
    return Counter(f"{tuple(one.shape)} {one.dtype}" if isinstance(one, torch.Tensor) else "storage" for one in found)
