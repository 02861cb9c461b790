"""Tests of the progress that a run prints: item n of m, stage and time left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftmark_contract.runner import progress
from draftmark_contract.runner.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by a list with one time in seconds, which the test changes."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_pipe_gets_a_line_a_minute(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Output to a pipe has a line each minute with the item, the stage and the time left at the pace so far."""
    shown = Progress("draftmark contract")
    for second in range(0, 150, 10):
        clock[0] = float(second)
        shown.show(second // 10, 100, "host tier, padding.rows")
    assert capsys.readouterr().err.splitlines() == [
        "draftmark contract: item 7 of 100, host tier, padding.rows, 16 min left",
        "draftmark contract: item 13 of 100, host tier, padding.rows, 15 min left",
    ]


def test_terminal_gets_a_bar(clock: list[float], terminal: Callable[[str, int], Any]) -> None:
    """On a terminal, one line is updated in place, and removed at the end of the run."""
    stderr = terminal("stderr", 100)
    shown = Progress("draftmark judge")
    shown.show(0, 8, "padding.rows")
    clock[0] = 10.0
    shown.show(2, 8, "padding.rows")
    shown.stop()
    assert "item 3 of 8" in stderr.plain and "padding.rows, 30 s left" in stderr.plain
