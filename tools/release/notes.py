"""Notes of a release: the first section of CHANGELOG.md."""

from __future__ import annotations

import re


def notes(changelog: str) -> str:
    """Return the first section of the changelog, with its heading.

    Raises:
        ValueError: the changelog has no section.
    """
    sections = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)[1:]
    if not sections:
        raise ValueError("CHANGELOG.md has no section (a line that begins with '## '), so a release has no notes")
    return sections[0].rstrip() + "\n"
