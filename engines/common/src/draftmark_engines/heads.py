"""What the writers of draft heads share: an engine has its own names and files for a head, but the same two folders."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import EngineError


def said_of(head: Path, target: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """head.json of a head's folder, and config.json of its target's.

    Raises:
        EngineError: one of them is absent.
    """
    return _read(head / "head.json"), _read(target / "config.json")


def write_from_command_line(doc: str | None, write: Callable[[Path, Path, Path], object]) -> None:
    """Call ``write(head, target, out)`` with the three folders that the command line names."""
    parser = argparse.ArgumentParser(description=doc)
    for name in ("head", "target", "out"):
        parser.add_argument(name, type=Path)
    asked = parser.parse_args()
    write(asked.head, asked.target, asked.out)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise EngineError(f"{file} does not exist; name a head's folder, then its target's")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
