"""Simulates the stream of a late device: queued work runs, in order, only when the host waits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from draftmark.graphs.active import LATE
from draftmark_reference.graphs.ledger import references, storage_bytes, storage_key

GIVEN_AWAY = 0xFF
"""Byte written over pinned memory that its owner has freed, as the next owner (a poisoned new arena) would do."""

FAILED = "while a late device ran"
"""Start of the note that a queued operation's error carries."""


@dataclass
class Task:
    """A queued operation.

    Attributes:
        name: name for error notes.
        run: runs the operation.
        pinned: aliases of the pinned tensors that the operation reads or writes.
        borrows: True if torch does not see these tensors, so that its allocator may reuse their memory too early.
    """

    name: str
    run: Callable[[], object]
    pinned: Sequence[Tensor]
    borrows: bool


class TaskQueue:
    """Holds queued operations in the order in which the host sent them, and runs them.

    Attributes:
        sent: number of operations queued so far. This number is the mark of the queue's current end.
        done: number of operations that have run.
    """

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._own: Counter[int] = Counter()
        self.sent = 0
        self.done = 0

    def send(
        self, name: str, run: Callable[[], object], pinned: Sequence[Tensor] = (), *, borrows: bool = False
    ) -> None:
        """Append an operation to the queue; the arguments are the attributes of `Task`."""
        self._own.update(map(storage_key, pinned))
        self._tasks.append(Task(name, run, pinned, borrows))
        self.sent += 1

    def run(self, upto: int) -> None:
        """Run the operations queued before the mark `upto`, in order."""
        token = LATE.set(None)
        try:
            # Static tensors that were created in inference mode can be written only in inference mode.
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
                while self.done < min(upto, self.sent):
                    self._run_next()
        finally:
            LATE.reset(token)

    def drop(self) -> None:
        """Discard all operations that have not run."""
        self._tasks.clear()
        self._own.clear()
        self.done = self.sent

    def _run_next(self) -> None:
        task = self._tasks.popleft()
        if task.borrows:
            self._give_away(task.pinned)
        try:
            task.run()
        except Exception as error:
            error.add_note(f"{FAILED} {task.name}, task {self.done + 1} of the {self.sent} sent so far")
            self.drop()
            raise
        self._own.subtract(map(storage_key, task.pinned))
        self.done += 1

    def _give_away(self, pinned: Sequence[Tensor]) -> None:
        """Overwrite pinned memory that only this queue references. A real allocator would already reuse that memory."""
        for tensor in pinned:
            if references(tensor) <= self._own[storage_key(tensor)]:
                storage_bytes(tensor).fill_(GIVEN_AWAY)
