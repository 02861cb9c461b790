"""Simulation of a late device on the CPU: queued work runs only when the host waits for it.

Inside a `LateDevice`, an operator that touches device memory is queued instead of run. Its result holds poison until it
has run. The host continues at once. If the host rewrites pinned memory before the device has read it, the device reads
the new contents (vllm#25279, sglang#28034). So three bugs give wrong results on a laptop every time instead of rarely
on a device: a staging buffer that is rewritten too early, a missing event, and memory freed before its copy has run.

Memory belongs to one of these kinds:

* *Device memory*: tensors passed to `owns`, created with ``device=``, or written by a queued operator. Operators on it
  are queued. The host waits for its values and for sizes that depend on them: ``item()``, ``tolist()``, ``nonzero()``.
* *Pinned memory* (`mark_pinned`, which `Arena` calls): the host reads and writes it at once. Kernels, and copies with
  ``non_blocking=True``, read it when they run. A blocking copy waits for the device.
* *Other host memory*: a kernel reads it when it is queued. A copy with ``non_blocking=True`` reads it when it runs, as
  from pinned memory, unless `mark_host` declares it as pageable.
* Memory from before the context began: its first use decides its kind.

`draftmark.transfer.fence` returns this device's event. `draftmark.devices.synchronize` waits for all queued work.
A launch by `record_call` and a replay of a `RecordedGraph` are queued as one piece of work.

Not detected: memory accessed without torch (numpy views, `data_ptr`); arguments of a launch that are no tensors, which
the simulation reads when the launch runs; a second stream; and ``x[i] = 5.`` for one element, for which CUDA waits.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

from draftmark.errors import GraphError
from draftmark.graphs.active import LATE

from .calls import LateCalls
from .operators import LateOperators
from .work import DeviceWork


class LateDevice(DeviceWork):
    """Queue of this thread's device work until the host waits. A context manager; leaving it waits for the queue."""

    def __init__(self) -> None:
        super().__init__()
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        if LATE.get() is not None:
            raise GraphError("a LateDevice is already active in this thread; leave it before entering another one")
        self._modes.callback(LATE.reset, LATE.set(self))
        self._modes.enter_context(LateOperators(self))
        self._modes.enter_context(LateCalls(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._modes:
            if kind is None:
                self._queue.run(self._queue.sent)
            self._queue.drop()
