"""Installed entry points of backends. Imports no backend."""

from __future__ import annotations

from draftmark.registry import Available, available


def entry(name: str) -> Available | None:
    """Return the first installed backend called `name`, of any contract major, or None."""
    return next((row for row in available() if row.name == name), None)
