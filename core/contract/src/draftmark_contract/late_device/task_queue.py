"""A stream that is late: what was sent to it waits, in order, until somebody waits for it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from draftmark.graphs.active import LATE
from draftmark.graphs.ledger import references, storage_bytes, storage_key

GIVEN_AWAY = 0xFF
"""What fills pinned memory that its owner dropped: as the poison of a fresh arena, the next owner, does."""

FAILED = "while a late device ran"
"""How the note begins that a task's error carries."""


@dataclass
class Task:
    """One operation that was sent.

    Attributes:
        pinned: our own aliases of the pinned tensors that it reads or writes.
        borrows: torch does not know of them, so its allocator would not keep their memory until the task is through.
    """

    name: str
    run: Callable[[], object]
    pinned: Sequence[Tensor]
    borrows: bool


class TaskQueue:
    """Tasks in order of sending.

    Attributes:
        sent: tasks that were ever sent: the mark of the present end.
        done: tasks that have run.
    """

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._own: Counter[int] = Counter()
        self.sent = 0
        self.done = 0

    def send(
        self, name: str, run: Callable[[], object], pinned: Sequence[Tensor] = (), *, borrows: bool = False
    ) -> None:
        """Enqueue; see `Task`."""
        self._own.update(map(storage_key, pinned))
        self._tasks.append(Task(name, run, pinned, borrows))
        self.sent += 1

    def run(self, upto: int) -> None:
        """Run what was sent before the mark `upto`, in order."""
        token = LATE.set(None)
        try:
            # Static tensors may have been made in inference mode, and then may be written in no other.
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
                while self.done < min(upto, self.sent):
                    self._run_next()
        finally:
            LATE.reset(token)

    def drop(self) -> None:
        """Forget what has not run."""
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
        """Overwrite memory that nobody but this queue holds: its allocator has handed it on already."""
        for tensor in pinned:
            if references(tensor) <= self._own[storage_key(tensor)]:
                storage_bytes(tensor).fill_(GIVEN_AWAY)
