"""Helpers for tests of HTML pages: check that a page is well-formed and self-contained, and find its SVG drawings."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta"}
NETWORK = r"https?://|src=|href=|<link|<script|@import|url\(|<[^>]* on[a-z]+="
"""Markup and CSS that load something or run a script."""


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """Accept an SVG element that closes itself."""

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes nothing"


def assert_self_contained(page: str) -> None:
    """Check that a page is well-formed, has no script, loads nothing, and follows the reader's colour scheme."""
    assert not re.search(NETWORK, page), re.search(NETWORK, page)
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    parser = _Balanced()
    parser.feed(page)
    assert parser.open == []


LONGEST = 16
"""Most characters of a word that a page does not break; a table has at most seven columns of them."""
UNBROKEN = r"<t[dh](?: class=\"(?:n|short)\")[^>]*>([^<]*)|<tr class=\"head\">(.*?)</tr>"
"""Cells that are never broken: numbers, short words and the heads of tables."""


def assert_fits(page: str) -> None:
    """Check that nothing on a page is wider than its window, so that it has no sideways scroll.

    Text breaks anywhere, messages wrap, drawings shrink, and words in cells that do not break are short.
    """
    style = page.partition("<style>")[2].partition("</style>")[0]
    wide = style.partition("@media (max-width")[0]
    rules = {one.strip(): body for one, body in re.findall(r"([^{}]+)\{([^{}]*)\}", wide)}
    assert "overflow-wrap: anywhere" in rules["body"] and "max-width: 72rem" in rules["body"]
    assert "white-space: pre-wrap" in rules["pre"] and "max-width: 100%" in rules["svg"]
    assert [one for one, body in rules.items() if "nowrap" in body] == ["td.n, th.n"]
    assert not re.search(r'style="[^"]*(width|nowrap)', page)
    cells = [re.sub(r"<[^>]*>", " ", cell or head) for cell, head in re.findall(UNBROKEN, page)]
    assert max((len(word) for cell in cells for word in cell.split()), default=0) <= LONGEST


def drawings(page: str) -> list[ElementTree.Element]:
    """Return the SVG drawings of a page."""
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def wrong_cells(page: str) -> list[str]:
    """Return the titles of the cells that the drawings of a page mark as wrong."""
    found = [one for drawing in drawings(page) for one in drawing.iter("rect") if one.get("class") == "wrong"]
    return [one.findtext("title", "") for one in found]


def details_open(page: str, text: str) -> bool:
    """Return whether the folded section with this text in its summary is open at first."""
    found = re.search(rf"<details( open)?><summary>(?:(?!</summary>).)*{re.escape(text)}", page)
    assert found, f"no folded section with {text!r}"
    return found[1] is not None
