"""Work of a simulated device that the host has sent, and the kinds of memory that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from draftmark.graphs.active import LATE
from draftmark_reference.graphs.operators import map_tensors

from .residency import Place, Residency
from .task_queue import TaskQueue


class DeviceWork:
    """Queue of one thread's device work, which runs when the host waits.

    Attributes:
        waits: reasons for which the host waited, in order: a call's name, or "a fence".
        places: kind of memory of each tensor.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.places = Residency()
        self._queue = TaskQueue()

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
