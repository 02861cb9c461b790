"""Measures what this process keeps: live tensors, bytes of Python, of the heap and of the device, and open files."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import and_

import torch

from ..check import ContractViolation
from .native_memory import heap_bytes, open_files

WINDOWS = 3
"""Number of measurements. Memory that each call leaves grows in every one, and a cache or lazy import in one only."""
LIMIT = 32 * 1024
"""Bytes that thousands of calls may add after others have filled the bounded caches of Python and torch.

A plan of cuda_flashinfer adds up to 23 KiB, which do not grow with the number of plans.
"""
HEAP_LIMIT = 64 * 1024
"""Bytes of the C library's heap that the calls of one quarter may add; native code keeps blocks that are not traced."""


ALLOCATES_NOTHING = "draftmark.backend.AttentionBackend: a backend allocates nothing in these methods"
NO_BUFFERS = "declare buffers in buffers(); bound every cache, and key none by lengths"


def assert_keeps_no_memory(
    what: str,
    calls: int,
    device: str,
    call: Callable[[int], object],
    formula: str = ALLOCATES_NOTHING,
    remedy: str = NO_BUFFERS,
) -> None:
    """Run ``call(n)`` for n below `calls`; check that they leave no tensors or files, and at most `LIMIT` bytes.

    The first quarter of the calls fills caches. Each further quarter is measured, and the smallest growth counts.

    Args:
        what: subject of the message, such as ``"plan()"``.
        device: device of the backend; its allocations are measured too.
        formula, remedy: source of the rule, and the change that fixes a violation.

    Raises:
        ContractViolation: the process keeps memory of the calls in every quarter that is measured.
    """
    ends = [calls * quarter // (WINDOWS + 1) for quarter in range(WINDOWS + 2)]
    held: list[_Held] = []
    gc.collect()
    gc.freeze()  # Hides the objects that exist, so only those of the calls are counted; a process may hold millions.
    tracemalloc.start(1)
    try:
        for begin, end in pairwise(ends):
            for number in range(begin, end):
                call(number)
            held.append(_Held.now(device))
        most = tracemalloc.take_snapshot().statistics("lineno")[0].traceback[0]
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    grown = [later.traced - earlier.counted for earlier, later in pairwise(held)]
    allocated = [later.allocated - earlier.allocated for earlier, later in pairwise(held)]
    tensors = [later.tensors - earlier.tensors for earlier, later in pairwise(held)]
    heap = min(later.heap - earlier.heap for earlier, later in pairwise(held))
    files = min(later.files - earlier.files for earlier, later in pairwise(held))
    more = reduce(and_, tensors)
    if more or WINDOWS * min(grown) > LIMIT or min(allocated) > 0 or heap > HEAP_LIMIT or files > 0:
        names = [f"{count} tensors {shape}" for shape, count in more.most_common(3)]
        names += [f"{files} open files"] * (files > 0)
        bytes_ = f"{min(grown)} traced bytes, {heap} of the heap and {min(allocated)} of the device more"
        raise ContractViolation(
            f"{what} leaves memory in the process",
            batch=f"{WINDOWS} times {calls // (WINDOWS + 1)} calls after as many others, in other layouts",
            got=", ".join([*names, bytes_, f"most of the traced ones in {most.filename}:{most.lineno}"]),
            expected=f"at least once no tensor, no file, at most {LIMIT // WINDOWS} bytes and {HEAP_LIMIT} of the heap",
            formula=formula,
            bug="sglang#27664",
            remedy=remedy,
        )


@dataclass(frozen=True)
class _Held:
    """Memory that this process holds at one time.

    Attributes:
        tensors: live tensors and storages, by shape.
        allocated: bytes that are allocated on the device.
        traced: bytes that Python has traced, before the tensors were counted.
        counted: the same bytes with the count of the tensors, which stays in memory.
        heap: bytes of the C library's heap.
        files: open file descriptors.
    """

    tensors: Counter[str]
    allocated: int
    traced: int
    counted: int
    heap: int
    files: int

    @classmethod
    def now(cls, device: str) -> _Held:
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0]
        allocated = torch.cuda.memory_allocated() if torch.device(device).type == "cuda" else 0
        heap, files = heap_bytes(), open_files()
        return cls(live_tensors(), allocated, traced, tracemalloc.get_traced_memory()[0], heap, files)


def live_tensors() -> Counter[str]:
    """Return the tensors and storages that Python can reach: in modules, closures, caches and threads, by shape.

    Objects that `gc.freeze` hides are left out.
    """
    kinds = (torch.Tensor, torch.UntypedStorage)
    # type() and not isinstance: some objects of other libraries run code, or warn, when their class is read.
    found = (one for one in gc.get_objects() if issubclass(type(one), kinds))
    return Counter(f"{tuple(one.shape)} {one.dtype}" if isinstance(one, torch.Tensor) else "storage" for one in found)
