"""Builds SVG elements as markup. Sizes are in pixels, and texts are escaped here."""

from __future__ import annotations

from html import escape


def mark(sign: str, x: int, y: int) -> str:
    """Return the symbol that marks a cell as missing, extra or wrong."""
    paths = {"−": "M4 8h8", "+": "M4 8h8M8 4v8", "✕": "M5 5l6 6M11 5l-6 6"}
    return f'<path class="mark" transform="translate({x} {y})" d="{paths[sign]}"/>'


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """Return a drawing that contains these elements. A narrow screen shrinks it."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg role="img" aria-label="{escape(title, quote=True)}" {size}>{"".join(parts)}</svg>'


def rect(x: int, y: int, width: int, height: int, kind: str, title: str = "") -> str:
    """Return a rectangle with the CSS class `kind`. It shows `title` while the pointer rests on it."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}">{inside}</rect>'


def text(x: int, y: int, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return a text with its base line at `y` and the CSS class `kind`."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
