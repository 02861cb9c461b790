"""JSON Schema of the records that `draftmark contract` and `draftmark judge` write."""

from __future__ import annotations

from importlib.resources import files

NAME = "verdict-3.json"


def schema_text() -> str:
    """Return the schema as JSON text."""
    return files(__package__).joinpath(NAME).read_text(encoding="utf-8")
