"""Progress on stderr: one line that updates on a terminal; in a pipe, one line per finished part."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .rendering import console

if TYPE_CHECKING:
    from rich.status import Status


class ProgressLine:
    """Progress line on stderr, so that stdout contains only the result."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def say(self, text: str) -> None:
        """Show `text` until the next call; prints nothing in a pipe."""
        from rich.text import Text

        if self._status is not None:
            self._status.update(Text(text))

    def milestone(self, text: str) -> None:
        """Show `text`, also in a pipe."""
        if self._status is None:
            print(text, file=sys.stderr, flush=True)
        self.say(text)

    def hide(self) -> None:
        """Remove the line for good, before other text is written to the terminal."""
        if self._status is not None:
            self._status.stop()


@contextmanager
def progress_line(first: str) -> Iterator[ProgressLine]:
    """Show a progress line for the ``with`` block, and remove it at the end."""
    terminal = console(stderr=True)
    if not terminal.is_terminal:
        yield ProgressLine(None)
        return
    with terminal.status(first) as status:
        yield ProgressLine(status)
