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
