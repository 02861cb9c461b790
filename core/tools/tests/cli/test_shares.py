"""Bars that show each buffer's share of the total memory, as `draftmark size` prints them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftmark_tools.cli.shares import Part, show_shares

PARTS = [Part("mask", 250), Part("page_table", 740), Part("indptr", 6), Part("lens", 4)]


def test_a_pipe_gets_one_line_for_each_share(capsys: pytest.CaptureFixture[str]) -> None:
    """Parts are sorted by size; parts below 1 % are summed up; a bar is proportional to its share."""
    show_shares(PARTS)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["page_table", "mask", "2"]
    assert lines[0][1:5] == ["74.0", "%", "740", "B"] and lines[2][1:4] == ["others", "1.0", "%"]
    assert (len(lines[0][-1]), len(lines[1][-1]), len(lines[2][-1])) == (27, 9, 1)


@pytest.mark.parametrize("width", [40, 80])
def test_a_terminal_gets_one_stacked_bar(terminal: Callable[..., Any], width: int) -> None:
    """The bar is as wide as the terminal, at most 72 characters, and its legend has one line for each share."""
    shown = terminal("stdout", width)
    show_shares(PARTS)
    bar, *legend = shown.plain.splitlines()
    assert bar.rstrip() == "█" * min(width, 72)
    assert [line.split()[1] for line in legend] == ["page_table", "mask", "2"]
    assert max(map(len, legend)) <= width


def test_nothing_is_printed_without_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """`show_shares` prints nothing if the total is 0 bytes."""
    show_shares([])
    show_shares([Part("empty", 0)])
    assert capsys.readouterr().out == ""


def test_size_prints_the_shares_of_every_buffer(draftmark: Callable[..., Any]) -> None:
    """`draftmark size` prints shares of the backend's buffers and the core's batch tensors; they add up to 100 %."""
    done = draftmark("size", "reference", "--topk", 8, "--num-draft-tokens", 64)
    _, _, after = done.out.partition("shares of the 241.5 KiB")
    lines = [line for line in after.splitlines() if " % " in line]
    assert any(line.startswith("slot_mapping") for line in lines)
    assert any(line.startswith("batch: page_table") for line in lines)
    assert sum(float(line.partition(" %")[0].split()[-1]) for line in lines) == pytest.approx(100, abs=0.5)
