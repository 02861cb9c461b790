"""Markup that every page uses: the document with its style, tables, folded sections and coloured counts.

Every function returns markup. An argument named ``text`` or ``title`` is plain text and is escaped here; an argument
named ``body`` is markup already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

SHORT = 12
"""Maximum number of characters of a cell that is never broken."""


def document(title: str, body: str) -> str:
    """Return the whole HTML page."""
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    head = (
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
    )
    return f'<!doctype html>\n<html lang="en">{head}<body><h1>{escape(title)}</h1>{body}</body></html>\n'


def banner(kind: str, text: str, more: str = "") -> str:
    """Return the verdict in a coloured box: `text` in bold, and one sentence below it."""
    below = f"<span>{escape(more)}</span>" if more else ""
    return f'<p class="verdict {kind}"><b>{escape(text)}</b>{below}</p>'


def tiles(counts: Iterable[tuple[str, int, str]]) -> str:
    """Return a row of counts. Each has a name, a number and a colour; a zero has no colour."""
    cells = (
        f'<li class="{kind if count else "none"}"><b>{count:,}</b> {escape(name)}</li>' for name, count, kind in counts
    )
    return f'<ul class="counts">{"".join(cells)}</ul>'


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of names with their values, one pair a line; "" if there is no pair."""
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
    return f"<dl>{lines}</dl>" if lines else ""


def section(title: str, body: str) -> str:
    """Return a section with a heading; "" if `body` is empty."""
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def folded(text: str, body: str, shown: bool = False, strong: str = "") -> str:
    """Return a section that opens when the reader clicks its title `text`.

    Args:
        shown: True if the section is open when the page loads.
        strong: words in bold before `text`.
    """
    front = f"<b>{escape(strong)}</b>" if strong else ""
    return f"<details{' open' * shown}><summary>{front}{escape(text)}</summary>{body}</details>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of plain texts. Numbers are right-aligned, and a narrow screen shows each row as lines."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(_cell(*pair) for pair in zip(head, row, strict=True))}</tr>" for row in rows)
    return f'<table class="wide"><tr class="head">{top}</tr>{body}</table>'


def colour_map(head: Sequence[str], rows: Iterable[tuple[str, str, Sequence[str]]]) -> str:
    """Return a table of coloured cells.

    Args:
        head: titles of the columns. The first column has the row names.
        rows: name, small print below the name, and the cells (markup of `map_cell`).
    """
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{escape(name)}{f'<small class=soft>{escape(note)}</small>' if note else ''}</th>{''.join(cells)}</tr>"
        for name, note, cells in rows
    )
    return f'<table class="map"><tr>{top}</tr>{body}</table>'


def map_cell(counts: Sequence[tuple[str, int, str]], nothing: str = "no items") -> str:
    """Return a cell with its counts in words and as a bar. The first count above zero sets the cell's colour.

    Args:
        counts: name, number and colour of each count, the most serious first.
        nothing: text of a cell in which every count is zero.
    """
    found = [one for one in counts if one[1]]
    if not found:
        return f'<td class="none">{escape(nothing)}</td>'
    (name, count, kind), *rest = found
    bar = "".join(f'<i class="{colour}" style="flex:{number}"></i>' for _, number, colour in found)
    more = ", ".join(f"{number:,} {escape(word)}" for word, number, _ in rest)
    return f'<td class="{kind}"><b>{count:,} {escape(name)}</b>{more}<div class="bar">{bar}</div></td>'


def _cell(head: str, text: str) -> str:
    named = f' data-head="{escape(head)}"' if head else ""
    return f"<td{_kind(text)}{named}>{escape(text)}</td>"


def _kind(text: str) -> str:
    """Return the CSS class of a number, or of a short word that must not wrap."""
    number = text.replace(",", "").isdigit()
    return ' class="n"' if number else ' class="short"' if 0 < len(text) <= SHORT else ""
