"""Graphs on the CPU: a correctness tool that breaks by a device graph's rules, on a laptop.

A `RecordedGraph` records the operators that torch dispatches, with their tensors, and a replay runs them again on the
same storages. So a number that Python baked in stays baked in, a tensor that was re-allocated is not seen, and a slice
captured for another batch size stays that slice, just as in a CUDA graph.

Not faster than eager, and not a proof. Beyond its sight:

* device identity: on a CPU `.to(q.device)` and a forgotten ``device=`` cost nothing (`mark_host` helps for buffers);
* memory read behind torch's back: `data_ptr()` with ctypes, a `numpy` view made before capture, `frombuffer`;
* `x[i] = 5.` where ``x[i]`` is a single element: CUDA copies the number from the host, where it would fill a row;
* kernels that torch does not dispatch (pybind extensions) unless they go through `record_call`;
* a dropped static tensor that something else still holds, such as a closure or an autograd graph;
* the pool: a device may reuse a freed intermediate's memory inside a graph and between graphs, here each one stays;
* streams and races (`draftmark_contract.late_device` sees the host's), launch limits, and effects of the step on
  Python objects, which capture cannot undo.

Random operators draw from torch's default generator and advance it on each replay, as a CUDA graph does; capture itself
leaves the generator as it was. Their numbers differ from a device's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..errors import CaptureError, GraphError
from .active import is_recording, late_device
from .keyed import KeyedGraphState
from .recorder import Recorder


class RecordedGraph:
    """One recorded step. Making it has no effect: tensors that existed before are as they were, random state too.

    Attributes:
        outputs: what the step returned, poisoned until the first replay (NaN; 0x7A bytes in integers; True in bool).
            Each replay overwrites it in place.
        pool_bytes: bytes of every tensor that the step made; they live as long as the graph.

    Raises:
        CaptureError: the step does what no graph may; the sentence names the operator and the remedy. Also when the
            step itself caught the error, and for a capture inside a capture.
    """

    def __init__(self, step: Callable[[], Any]) -> None:
        if is_recording():
            raise CaptureError("a graph cannot be captured inside another's capture; capture them one after the other")
        with _on_time():
            recorder = Recorder()
            with recorder.watching():
                self.outputs = step()
            recorder.ledger.poison()
        self.pool_bytes = recorder.ledger.pool_bytes
        self._tape = recorder.tape
        self._touched = recorder.ledger.storages()
        self._watches = recorder.ledger.watches()

    def __len__(self) -> int:
        """Number of recorded calls; views and allocations are none."""
        return len(self._tape)

    def replay(self) -> None:
        """Run the recorded calls again on the same storages; behind what was sent before, where a late device is.

        Raises:
            GraphError: a tensor that the graph uses was freed or re-allocated since, or a capture is under way.
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
        # Static tensors may have been made in inference mode, and then may be written in no other; the reverse may.
        with torch.inference_mode():
            self._tape.run()


def _on_time() -> AbstractContextManager[None]:
    """A capture runs its step for real, so a late device is waited for first."""
    late = late_device()
    return nullcontext() if late is None else late.on_time()


class RecordedGraphState(KeyedGraphState):
    """`GraphState` made of recorded graphs; needs no device."""

    def _record(self, step: Callable[[], Any]) -> RecordedGraph:
        return RecordedGraph(step)
