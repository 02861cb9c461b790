"""Graphs on the CPU: a test tool that follows the rules of device graphs without a device.

A `RecordedGraph` records the operators that torch dispatches, with their tensors. A replay runs them again on the same
storages. As in a CUDA graph, Python numbers and slices keep the values of the capture. If the caller allocates a tensor
again, a replay still uses the old one.

A recorded graph is not faster than eager mode, and it is not a proof. It does not detect:

* device mismatches: on a CPU `.to(q.device)` and a forgotten ``device=`` have no effect (`mark_host` marks a buffer as
  host memory, so that its use is an error);
* memory reads outside torch: `data_ptr()` with ctypes, a `numpy` view made before capture, `frombuffer`;
* `x[i] = 5.` when ``x[i]`` is a single element: CUDA copies the number from the host, which a capture refuses (if
  ``x[i]`` is a row, CUDA fills it with a kernel);
* kernels that torch does not dispatch (pybind extensions), unless they use `record_call`;
* a static tensor that the caller dropped but a closure or an autograd graph still references;
* memory reuse: a device may reuse the memory of a freed intermediate tensor, a recorded graph never does;
* streams and races (`draftmark_contract.late_device` detects races with the host), launch limits, and effects of the
  step on Python objects, which capture cannot undo.

Random operators use torch's default generator. Each replay advances it, as in a CUDA graph; capture restores its state.
The random numbers differ from a device's random numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from draftmark import CaptureError, GraphError
from draftmark.graphs.active import is_recording, late_device
from draftmark.runtime import KeyedGraphState

from .ledger import poison
from .recorder import Recorder


class RecordedGraph:
    """Recording of a step on the CPU. The capture restores all tensors that existed before, and the random state.

    Attributes:
        outputs: return value of the step, poisoned until the first replay (NaN; 0x7A bytes in integers; True in bool).
            Each replay overwrites it in place.
        pool_bytes: bytes of every tensor that the step allocated; they live as long as the graph, and then become
            poison.

    Raises:
        CaptureError: the step contains an operation that a graph cannot contain; the message names the operator and
            the remedy. Also raised if the step catches this error, and for a capture inside a capture.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        if is_recording():
            raise CaptureError("a graph cannot be captured inside another capture; capture them one after the other")
        with _on_time():
            recorder = Recorder()
            try:
                with recorder.watching():
                    self.outputs = step()
            finally:  # A capture that failed leaves no contents either.
                poison(recorder.ledger.inside())
        self.pool_bytes = recorder.ledger.pool_bytes
        self._tape = recorder.tape
        self._touched = recorder.ledger.storages()
        self._watches = recorder.ledger.watches()
        # A device reuses the memory of a dropped graph, so no later graph may read it.
        weakref.finalize(self, _reuse, recorder.ledger.inside()).atexit = False

    def __len__(self) -> int:
        """Return the number of recorded calls; views and allocations do not count."""
        return len(self._tape)

    def replay(self) -> None:
        """Run the recorded calls again on the same storages; a late device runs them after its earlier work.

        Raises:
            GraphError: a tensor of the graph was freed or re-allocated after capture, or a capture is active.
        """
        if is_recording():
            raise GraphError("a graph cannot be replayed inside a capture; call its step there instead")
        for outside, own in self._watches:
            outside.check(own)
        late = late_device()
        if late is None:
            self._run()
        else:
            late.owns(self._touched)
            late.send("a replay", self._run)

    def _run(self) -> None:
        # A static tensor made in inference mode can be written only in inference mode; other tensors in either mode.
        with torch.inference_mode():
            self._tape.run()


def _reuse(tensors: list[torch.Tensor]) -> None:
    """Poison the memory of a dropped graph. An active capture does not record this."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        poison(tensors)


def _on_time() -> AbstractContextManager[None]:
    """Wait until a simulated late device has done its work, because a capture runs its step immediately."""
    late = late_device()
    return nullcontext() if late is None else late.on_time()


class RecordedGraphState(KeyedGraphState):
    """`GraphState` with recorded graphs; needs no device."""

    def _record(self, step: Callable[[], Any]) -> RecordedGraph:
        return RecordedGraph(step)
