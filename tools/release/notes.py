"""Notes of a release: what the first section of CHANGELOG.md says before its details."""

from __future__ import annotations

import re

from .publisher import PLACEHOLDER
from .readme import LINK

MOST_LINES = 20


def notes(changelog: str, repository: str = PLACEHOLDER) -> str:
    """Return the first section of the changelog with its heading, up to its first heading of level 3.

    Relative links become links to files of the repository.

    Raises:
        ValueError: the changelog has no section, or this part has more than `MOST_LINES` lines.
    """
    sections = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)[1:]
    if not sections:
        raise ValueError("CHANGELOG.md has no section (a line that begins with '## '), so a release has no notes")
    found = re.split(r"^### ", sections[0], flags=re.MULTILINE)[0].rstrip() + "\n"
    if found.count("\n") > MOST_LINES:
        raise ValueError(f"the notes have {found.count(chr(10))} lines, at most {MOST_LINES}; move details under a ###")
    return LINK.sub(lambda match: f"[{match[2]}]({repository}/blob/main/{match[3]})", found)
