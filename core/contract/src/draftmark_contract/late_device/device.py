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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

from torch import Tensor

from draftmark.errors import GraphError
from draftmark.graphs.active import LATE
from draftmark_reference.graphs.operators import map_tensors

from .calls import LateCalls
from .operators import LateOperators
from .residency import Place, Residency
from .task_queue import TaskQueue


class LateDevice:
    """Queues this thread's device work until the host waits. It is a context manager; leaving it waits for the queue.

    Attributes:
        waits: reasons for which the host waited, in order: a call's name, or "a fence".
        places: kind of memory of each tensor.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.places = Residency()
        self._queue = TaskQueue()
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

    def owns(self, tensors: Iterable[Tensor]) -> None:
        """Mark these tensors as device memory, except tensors already declared as host memory."""
        for tensor in tensors:
            self.places.on_device(tensor)

    def mark(self) -> int:
        """Return a mark of the queue's current end, to pass to `wait`."""
        return self._queue.sent

    def wait(self, why: str, mark: int | None = None) -> None:
        """Make the host wait until the device has run all queued work, or the work queued before `mark`."""
        self.waits.append(why)
        self._queue.run(self._queue.sent if mark is None else mark)

    def advance(self, mark: int) -> None:
        """Run all queued work before `mark`, as a device does by itself, without recording a wait by the host."""
        self._queue.run(mark)

    @contextmanager
    def on_time(self) -> Iterator[None]:
        """Wait for all queued work. Inside the block, run device work at once instead of queueing it."""
        self._queue.run(self._queue.sent)
        token = LATE.set(None)
        try:
            yield
        finally:
            LATE.reset(token)

    def send(self, name: str, work: Callable[[], object], pinned: Sequence[Tensor] = ()) -> None:
        """Queue a piece of work. `pinned`: aliases of its pinned tensors, which torch keeps alive for it."""
        self._queue.send(name, work, pinned)

    def record_call(self, fn: Callable[..., object], args: Sequence[Any], mutates: Sequence[Tensor]) -> None:
        """Queue a kernel that is launched without torch's dispatcher; see `draftmark.graphs.record_call`."""
        self.owns(mutates)
        args, pinned = self.operands(list(args))
        self._queue.send(f"record_call({getattr(fn, '__name__', repr(fn))})", partial(fn, *args), pinned, borrows=True)

    def operands(self, tree: Any) -> tuple[Any, list[Tensor]]:
        """Return arguments for queued work: device and pinned memory as is, and copies of other host memory.

        Returns:
            `tree` with each tensor replaced by the one that the queued work reads, and the pinned tensors among them.
        """
        pinned: list[Tensor] = []

        def own(tensor: Tensor) -> Tensor:
            place, alias = self.places.of(tensor), tensor.detach()
            if place is Place.PINNED:
                pinned.append(alias)
            return alias if place in (Place.PINNED, Place.DEVICE) else alias.clone()

        return map_tensors(own, tree), pinned
