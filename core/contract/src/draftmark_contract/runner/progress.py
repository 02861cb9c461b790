"""Shows the progress of a run on stderr: a bar on a terminal, one line a minute in a pipe."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from draftmark_tools.cli.rendering import console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LINE_S = 60.0
"""Seconds between two lines in a pipe."""


class Progress:
    """Shows "item n of m", the stage of the run, and the estimated time left.

    Args:
        command: command that the lines in a pipe begin with, e.g. ``"draftmark contract"``.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._start = self._said = time.monotonic()
        self._before: int | None = None
        self._bar: tuple[Bar, TaskID] | None = None
        self._terminal = console(stderr=True).is_terminal

    def show(self, done: int, total: int, stage: str) -> None:
        """Update the display: `done` of `total` items have ended, and `stage` names what runs now."""
        now = time.monotonic()
        # Start the clock here: items of an earlier run with the same journal took no time in this run.
        if self._before is None:
            self._start, self._before = now, done
        left = _left(now - self._start, done - self._before, total - done)
        if self._terminal:
            self._update(done, total, stage, left)
        elif now - self._said >= LINE_S:
            self._said = now
            text = f"{self._command}: item {min(done + 1, total):,} of {total:,}, {stage}{left}"
            print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar[0].stop()
        self._bar, self._terminal = None, False

    def _update(self, done: int, total: int, stage: str, left: str) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("item {task.fields[item]}"), BarColumn(20), TextColumn("{task.fields[stage]}"))
            bar = Bar(*columns, console=console(stderr=True), transient=True, auto_refresh=False)
            bar.start()
            self._bar = bar, bar.add_task("", item="", stage="")
        bar, task = self._bar
        item = f"{min(done + 1, total):,} of {total:,}"
        bar.update(task, completed=done, total=total, item=item, stage=f"{stage}{left}", refresh=True)


def _left(seconds: float, done: int, left: int) -> str:
    """Return as text the time that the remaining items take at the average pace so far; "" before the first item."""
    if not done:
        return ""
    rest = seconds / done * left
    return f", {rest / 60:.0f} min left" if rest >= 90 else f", {rest:.0f} s left"
