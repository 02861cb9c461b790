"""What one sees while waiting: a line that keeps changing on a terminal; in a pipe, one for each part that is done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .rendering import console

if TYPE_CHECKING:
    from rich.status import Status


class ProgressLine:
    """The line, on stderr, so that stdout stays clean for the result."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def say(self, text: str) -> None:
        """Show `text` until the next call; nothing in a pipe."""
        from rich.text import Text

        if self._status is not None:
            self._status.update(Text(text))

    def milestone(self, text: str) -> None:
        """Show `text`, in a pipe too, where it is a sign of life."""
        if self._status is None:
            print(text, file=sys.stderr, flush=True)
        self.say(text)

    def hide(self) -> None:
        """Take the line away for good: text comes on the same terminal."""
        if self._status is not None:
            self._status.stop()


@contextmanager
def progress_line(first: str) -> Iterator[ProgressLine]:
    """A progress line that disappears at the end."""
    terminal = console(stderr=True)
    if not terminal.is_terminal:
        yield ProgressLine(None)
        return
    with terminal.status(first) as status:
        yield ProgressLine(status)
