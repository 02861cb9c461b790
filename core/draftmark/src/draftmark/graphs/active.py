"""Whether this thread records a graph or sends to a device that is late, and the hook by which both see launches.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

    from .recorder import Recorder


class LateDevice(Protocol):
    """A device that a CPU plays, behind its host, as a step meets it; `draftmark_contract.late_device` has one."""

    def owns(self, tensors: Iterable[Tensor]) -> None:
        """Say that these are in device memory."""

    def send(self, name: str, work: Callable[[], object]) -> None:
        """Send work of any kind, to run once the host waits."""

    def record_call(self, fn: Callable[..., object], args: Sequence[Any], mutates: Sequence[Tensor]) -> None:
        """Send a hand-launched kernel; see `record_call`."""

    def mark(self) -> int:
        """The present end of what was sent, for `wait`."""

    def wait(self, why: str, mark: int | None = None) -> None:
        """The host waits until the device has run everything, or what was sent before `mark`."""

    def on_time(self) -> AbstractContextManager[None]:
        """Wait for everything, and run what the block does as it comes."""


ACTIVE: ContextVar[Recorder | None] = ContextVar("draftmark_recorder", default=None)
LATE: ContextVar[LateDevice | None] = ContextVar("draftmark_late_device", default=None)
HOST_STORAGES: WeakSet[UntypedStorage] = WeakSet()
PINNED_STORAGES: WeakSet[UntypedStorage] = WeakSet()


def is_recording() -> bool:
    """Whether a `RecordedGraph` is being captured here. CUDA's is `torch.cuda.is_current_stream_capturing`."""
    return ACTIVE.get() is not None


def late_device() -> LateDevice | None:
    """The late device that this thread sends to, or None: then a CPU's operators run as they come."""
    return LATE.get()


def record_call(fn: Callable[..., object], *args: Any, mutates: Sequence[Tensor] = ()) -> None:
    """Call ``fn(*args)`` so that a recorded graph replays it as one kernel and a late device runs it late.

    For kernels that torch's dispatcher does not see: Triton launches (in its interpreter too) and C extensions::

        record_call(_launch, q, k, out, scale, mutates=(out,))

    Args:
        fn: the launch. What it returns is dropped; what it closes over is baked in, as a kernel argument is.
        args: any nest. Every tensor that `fn` touches must be here, not in a closure: capture undoes, and replay
            checks, only what it sees. Numbers are baked in.
        mutates: those of the tensors in `args` that `fn` writes.

    Raises:
        CaptureError: while recording, `mutates` names a tensor that is not in `args`, or `fn` wrote one that
            `mutates` does not name.
    """
    recorder, late = ACTIVE.get(), LATE.get()
    if recorder is not None:
        recorder.record_call(fn, args, mutates)
    elif late is not None:
        late.record_call(fn, args, mutates)
    else:
        fn(*args)


def mark_host(tensor: Tensor) -> None:
    """Declare that `tensor` stands for pageable host memory, though on a CPU all memory looks alike.

    An operator that touches its storage inside a recorded region raises CaptureError from then on, as a copy from it
    would on a device.
    """
    HOST_STORAGES.add(tensor.untyped_storage())


def mark_pinned(tensor: Tensor) -> None:
    """Declare that `tensor` stands for pinned host memory: a late device reads it when it gets to the copy."""
    PINNED_STORAGES.add(tensor.untyped_storage())
