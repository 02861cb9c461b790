"""Tables on a terminal of 80 columns: no line is wider, and every cell is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftmark_tools.cli import main


@pytest.fixture
def on_terminal(terminal: Callable[..., Any]) -> Callable[..., str]:
    """Return a function that runs a command on a terminal of 80 columns and returns its text without colours."""

    def run(*argv: object) -> str:
        shown = terminal("stdout", 80)
        assert main([str(word) for word in argv]) == 0
        return str(shown.plain)

    return run


def test_list_fits(on_terminal: Callable[..., str], distribution: Callable[..., Path]) -> None:
    """A long backend name is printed whole, and its note is a separate line below the table."""
    distribution("tomorrows_backend", group="draftmark.backends.v2", project="draftmark-of-a-vendor")
    shown = on_terminal("list")
    table, _, notes = shown.partition("tomorrows_backend of ")
    assert max(map(len, table.splitlines())) <= 80
    assert "reference" in table and "tomorrows_backend" in table and "this core supports contract v1" in notes


def test_size_fits(on_terminal: Callable[..., str]) -> None:
    """Tables of buffers fit 80 columns; only formulas wrap."""
    shown = on_terminal("size", "reference", "--topk", 8, "--num-draft-tokens", 64)
    rows = [line for line in shown.splitlines() if "  " in line and "·" not in line]
    assert max(map(len, rows)) <= 80
    assert "slot_mapping" in shown and "int64" in shown
