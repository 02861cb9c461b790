"""What one sees while waiting: one line that keeps changing on a terminal, nothing in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from draftmark.cli.rendering import console

if TYPE_CHECKING:
    from rich.status import Status

    from .. import Engine


class ProgressLine:
    """The line, on stderr, so that stdout stays clean for the text."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def say(self, text: str) -> None:
        """Show `text` until the next call."""
        from rich.text import Text

        if self._status is not None:
            self._status.update(Text(text))

    def decoding(self, what: str, engine: Engine, seconds: float, done: int, prompts: int) -> None:
        """Show where an engine stands after `seconds`."""
        if self._status is None:
            return
        s, pages = engine.statistics, engine.pages
        self.say(
            f"{what}: {s.tokens} tokens · {s.tokens / seconds:.1f} tokens/s · accepted {s.mean_accepted:.2f} · "
            f"{pages.in_use}/{pages.total} KV pages · {done}/{prompts} done"
        )


@contextmanager
def progress_line(first: str) -> Iterator[ProgressLine]:
    """A progress line that disappears at the end."""
    terminal = console(stderr=True)
    if not terminal.is_terminal:
        yield ProgressLine(None)
        return
    with terminal.status(first) as status:
        yield ProgressLine(status)
