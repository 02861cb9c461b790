"""Converter of a README for package indexes, where relative links do not work."""

from __future__ import annotations

import re
from collections.abc import Callable

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+://|#)([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def for_index(text: str) -> str:
    """Replace each relative link by its text, and remove pictures of the repository."""
    return _outside_blocks(text, lambda part: LINK.sub(lambda match: "" if match[1] else match[2], part))


def relative_links(text: str) -> list[str]:
    """Return the targets of relative links and pictures in a README."""
    outside = FENCE.sub("", text)
    return [match[3] for match in LINK.finditer(outside)]


def _outside_blocks(text: str, change: Callable[[str], str]) -> str:
    pieces, at = [], 0
    for fence in FENCE.finditer(text):
        pieces += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*pieces, change(text[at:])])
