"""State of this thread: the graph recorder and the simulated device that runs later than the host, if active.

`record_call` passes a kernel launch to the active one.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage


class Recorder(Protocol):
    """Recorder of a step's calls, such as `draftmark_reference.graphs`'s."""

    def record_call(self, fn: Callable[..., object], args: Sequence[Any], mutates: Sequence[Tensor]) -> None:
        """Run and record a kernel that torch does not dispatch; see the function `record_call`."""


class LateDevice(Protocol):
    """A device simulated on the CPU that runs work later than the host, as in `draftmark_contract.late_device`."""

    def owns(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors as device memory."""

    def send(self, name: str, work: Callable[[], object]) -> None:
        """Enqueue work, to run when the host waits."""

    def record_call(self, fn: Callable[..., object], args: Sequence[Any], mutates: Sequence[Tensor]) -> None:
        """Enqueue a kernel that torch does not dispatch; see the function `record_call`."""

    def mark(self) -> int:
        """Return the current end of the queue, for `wait`."""

    def wait(self, why: str, mark: int | None = None) -> None:
        """Block the host until all work is done, or all work before `mark`."""

    def on_time(self) -> AbstractContextManager[None]:
        """Wait for all work, then run the work of the ``with`` block immediately."""


ACTIVE: ContextVar[Recorder | None] = ContextVar("draftmark_recorder", default=None)
LATE: ContextVar[LateDevice | None] = ContextVar("draftmark_late_device", default=None)
PINNED_STORAGES: WeakSet[UntypedStorage] = WeakSet()


def is_recording() -> bool:
    """Return True while this thread records a graph on the CPU; for CUDA see `is_current_stream_capturing`."""
    return ACTIVE.get() is not None


def late_device() -> LateDevice | None:
    """Return the simulated late device that this thread tests with, or None if CPU operators run immediately."""
    return LATE.get()


def record_call(fn: Callable[..., object], *args: Any, mutates: Sequence[Tensor] = ()) -> None:
    """Call ``fn(*args)``. A recorded graph records the call as one kernel; a late device enqueues it.

    For kernels that torch's dispatcher does not see, i.e. Triton launches (also interpreted) and C extensions::

        record_call(_launch, q, k, out, scale, mutates=(out,))

    Args:
        fn: the launch. Its return value is dropped. A graph keeps the values of its closure, like kernel arguments.
        args: arguments of any nesting. Every tensor that `fn` uses must be here, not in a closure, because capture
            restores and replay checks only these tensors. A graph keeps the values of numbers.
        mutates: the tensors in `args` that `fn` writes.

    Raises:
        CaptureError: while recording, `mutates` contains a tensor that is not in `args`, or `fn` wrote a tensor that
            `mutates` does not contain.
    """
    recorder, late = ACTIVE.get(), LATE.get()
    if recorder is not None:
        recorder.record_call(fn, args, mutates)
    elif late is not None:
        late.record_call(fn, args, mutates)
    else:
        fn(*args)


def mark_pinned(tensor: Tensor) -> None:
    """Mark a CPU tensor as pinned host memory: a late device reads it when it runs the copy, not earlier."""
    PINNED_STORAGES.add(tensor.untyped_storage())
