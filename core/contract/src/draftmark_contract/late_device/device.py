"""A device that is late, on the CPU: what is sent to it runs only when the host waits for it.

Inside a `LateDevice` an operator that touches device memory is sent, not run, and what it returns is poison until it
has run. The host goes on at once: what it writes to pinned memory before the device has read it is what the device
reads (vllm#25279, sglang#28034). So a staging buffer that is rewritten too early, a forgotten event, or memory given
away while a copy from it is under way gives wrong results on a laptop, every time, instead of seldom on a device.

Whose memory it is, and what follows:

* *device*: tensors that `owns` named, that were made with ``device=``, or that a sent operator wrote. What touches them
  is sent. For their values, or a size that depends on them, the host waits: ``item()``, ``tolist()``, ``nonzero()``.
* *pinned* (`mark_pinned`, which `Arena` calls): the host reads and writes it at once. A copy with
  ``non_blocking=True``, and a kernel, read it when they run; a blocking copy waits for the device.
* *other host memory*: a kernel takes its values when it is sent. A copy with ``non_blocking=True`` reads it late, as
  from pinned memory, unless `mark_host` says that it is pageable.
* Memory that was there before anybody watched is taken for what it is used as.

`draftmark.transfer.fence` is the event of such a device; `draftmark.devices.synchronize` waits for all of it. Launches
by `record_call` and replays of a `RecordedGraph` are sent whole.

Beyond its sight: memory that is touched behind torch's back (numpy views, `data_ptr`); objects other than tensors that
a launch is given, which it reads when it runs; a second stream; ``x[i] = 5.`` for one element, for which CUDA waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

from torch import Tensor

from draftmark.errors import GraphError
from draftmark.graphs.active import LATE
from draftmark.graphs.operators import map_tensors

from .calls import LateCalls
from .operators import LateOperators
from .residency import Place, Residency
from .task_queue import TaskQueue


class LateDevice:
    """A context in which this thread's device work is late. Leaving it waits for everything.

    Attributes:
        waits: what made the host wait, in order: a call's name, or "a fence".
        places: whose memory is whose.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.places = Residency()
        self._queue = TaskQueue()
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        if LATE.get() is not None:
            raise GraphError("a device is late here already; leave the outer LateDevice first")
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
        """Say that these are in device memory, but for those that are declared host memory."""
        for tensor in tensors:
            self.places.on_device(tensor)

    def mark(self) -> int:
        """The present end of what was sent, for `wait`."""
        return self._queue.sent

    def wait(self, why: str, mark: int | None = None) -> None:
        """The host waits until the device has run everything, or what was sent before `mark`."""
        self.waits.append(why)
        self._queue.run(self._queue.sent if mark is None else mark)

    def advance(self, mark: int) -> None:
        """The device gets as far as `mark` by itself; nobody waited."""
        self._queue.run(mark)

    @contextmanager
    def on_time(self) -> Iterator[None]:
        """Wait for everything, and run what the block does as it comes."""
        self._queue.run(self._queue.sent)
        token = LATE.set(None)
        try:
            yield
        finally:
            LATE.reset(token)

    def send(self, name: str, work: Callable[[], object], pinned: Sequence[Tensor] = ()) -> None:
        """Send work of any kind. `pinned`: aliases of the pinned tensors that it touches, which torch keeps for it."""
        self._queue.send(name, work, pinned)

    def record_call(self, fn: Callable[..., object], args: Sequence[Any], mutates: Sequence[Tensor]) -> None:
        """Send a hand-launched kernel; see `draftmark.graphs.record_call`."""
        self.owns(mutates)
        args, pinned = self.operands(list(args))
        self._queue.send(f"record_call({getattr(fn, '__name__', repr(fn))})", partial(fn, *args), pinned, borrows=True)

    def operands(self, tree: Any) -> tuple[Any, list[Tensor]]:
        """What a task reads: the very memory, or the present values of what the host may change at once.

        Returns:
            The tree with tensors of the task's own, and those of them that are pinned.
        """
        pinned: list[Tensor] = []

        def own(tensor: Tensor) -> Tensor:
            place, alias = self.places.of(tensor), tensor.detach()
            if place is Place.PINNED:
                pinned.append(alias)
            return alias if place in (Place.PINNED, Place.DEVICE) else alias.clone()

        return map_tensors(own, tree), pinned
