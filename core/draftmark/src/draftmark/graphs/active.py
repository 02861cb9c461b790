"""Whether this thread is recording a graph, and the hook by which hand-launched kernels get recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

    from .recorder import Recorder

ACTIVE: ContextVar[Recorder | None] = ContextVar("draftmark_recorder", default=None)
HOST_STORAGES: WeakSet[UntypedStorage] = WeakSet()


def is_recording() -> bool:
    """Whether a `RecordedGraph` is being captured here. CUDA's is `torch.cuda.is_current_stream_capturing`."""
    return ACTIVE.get() is not None


def record_call(fn: Callable[..., object], *args: Any, mutates: Sequence[Tensor] = ()) -> None:
    """Call ``fn(*args)`` so that a recorded graph replays it as one kernel; plainly where none is being recorded.

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
    recorder = ACTIVE.get()
    if recorder is None:
        fn(*args)
    else:
        recorder.record_call(fn, args, mutates)


def mark_host(tensor: Tensor) -> None:
    """Declare that `tensor` stands for pageable host memory, though on a CPU all memory looks alike.

    An operator that touches its storage inside a recorded region raises CaptureError from then on, as a copy from it
    would on a device.
    """
    HOST_STORAGES.add(tensor.untyped_storage())
