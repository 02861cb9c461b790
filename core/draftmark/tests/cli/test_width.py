"""Tables on a terminal of 80 columns: nothing is wider, and no cell is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftmark.cli import main


@pytest.fixture
def on_terminal(terminal: Callable[..., Any]) -> Callable[..., str]:
    """What a command shows at 80 columns, without colours."""

    def run(*argv: object) -> str:
        shown = terminal("stdout", 80)
        assert main([str(word) for word in argv]) == 0
        return str(shown.plain)

    return run


def test_list_fits(on_terminal: Callable[..., str], distribution: Callable[..., Path]) -> None:
    """A backend with a long name and a note: each name is whole, and the note is a line of its own below."""
    distribution("tomorrows_backend", group="draftmark.backends.v2", project="draftmark-of-a-vendor")
    shown = on_terminal("list")
    table, _, notes = shown.partition("tomorrows_backend of ")
    assert max(map(len, table.splitlines())) <= 80
    assert "reference" in table and "tomorrows_backend" in table and "this core speaks contract v1" in notes


def test_size_fits(on_terminal: Callable[..., str]) -> None:
    """Buffers with their bytes; only the formulas are folded."""
    shown = on_terminal("size", "reference", "--topk", 8, "--num-draft-tokens", 64)
    rows = [line for line in shown.splitlines() if "  " in line and "·" not in line]
    assert max(map(len, rows)) <= 80
    assert "slot_mapping" in shown and "int64" in shown
