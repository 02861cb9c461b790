"""Tables and numbers: rich on a terminal, aligned plain text in a pipe, JSON for programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Row = Sequence[object]

LEAST_WRAPPED = 8
"""Width below which a column that wraps is no longer readable."""


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        title: text of the header.
        right: align to the right, for numbers.
        style: rich style on a terminal.
        wrap: on a terminal the column may wrap; other columns keep their width.
    """

    title: str
    right: bool = False
    style: str = ""
    wrap: bool = False


def console(*, stderr: bool = False) -> Console:
    """Return a console on the current stdout or stderr. It prints text unchanged: no markup, emoji or highlighting."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, markup=False, emoji=False, highlight=False)


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Redirect stdout to stderr while a plugin loads, so that its output cannot damage a table or JSON object."""
    with redirect_stdout(sys.stderr):
        yield


ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # a control sequence, such as a colour
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # an operating-system command, such as a window title
    r"|\x1b.?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def printable(text: str) -> str:
    """Return text without escape sequences and control characters, except tabs and line ends.

    Text of a plugin, a file name or a model may contain them, and a terminal would act on them.
    """
    return ESCAPES.sub("", text)


def show(text: str = "", style: str = "") -> None:
    """Print a line of text without wrapping and without control characters; in a pipe also without colour."""
    out, text = console(), printable(text)
    if out.is_terminal:
        out.print(text, style=style or None, soft_wrap=True)
    else:
        print(text, flush=True)


def show_table(columns: Sequence[Column], rows: Sequence[Row], footer: Row | None = None) -> None:
    """Print a table on stdout; `footer` is a separate last row.

    A terminal too narrow for the columns that do not wrap gets aligned plain lines, which it wraps itself.
    """
    out = console()
    rows = [[printable(str(cell)) for cell in row] for row in rows]
    if not out.is_terminal or _least_width(columns, rows, footer) > out.width:
        print(plain_table(columns, rows, footer))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, show_footer=footer is not None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(
            column.title,
            footer="" if footer is None else str(footer[index]),
            justify="right" if column.right else "left",
            style=column.style,
            footer_style="bold",
            no_wrap=not column.wrap,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(str, row))
    out.print(table)


def _least_width(columns: Sequence[Column], rows: Sequence[Row], footer: Row | None) -> int:
    """Return the width below which a terminal's table would cut a cell."""
    lines = [[column.title for column in columns], *rows, *([] if footer is None else [footer])]
    widest = [max(len(str(line[i])) for line in lines) for i in range(len(columns))]
    kept = [LEAST_WRAPPED if column.wrap else width for column, width in zip(columns, widest, strict=True)]
    return sum(kept) + 2 * (len(columns) - 1)


def plain_table(columns: Sequence[Column], rows: Sequence[Row], footer: Row | None = None) -> str:
    """Return the table as aligned lines, never wrapped, without trailing blanks."""
    lines = [[column.title for column in columns], *([str(cell) for cell in row] for row in rows)]
    if footer is not None:
        lines.append([str(cell) for cell in footer])
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    aligned = [
        "  ".join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    ]
    rule = "  ".join("-" * width for width in widths)
    aligned.insert(1, rule)
    if footer is not None:
        aligned.insert(len(aligned) - 1, rule)
    return "\n".join(aligned)


def show_json(value: object) -> None:
    """Print one JSON object on stdout, with unescaped Unicode."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def human_bytes(count: int) -> str:
    """Return a number of bytes with its unit: 1536 becomes ``1.5 KiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} EiB"


def shorten(text: str, width: int) -> str:
    """Return `text` on one line, cut at `width` with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
