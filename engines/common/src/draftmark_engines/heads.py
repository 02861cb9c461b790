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
        EngineError: one of them is absent, or no JSON.
    """
    return _read(head / "head.json"), _read(target / "config.json")


def write_from_command_line(doc: str | None, write: Callable[[Path, Path, Path], object]) -> None:
    """Call ``write(head, target, out)`` with the three folders that the command line names.

    A folder that is absent, that does not fit or that cannot be written ends the program with one sentence and code 1.
    """
    parser = argparse.ArgumentParser(description=doc)
    for name in ("head", "target", "out"):
        parser.add_argument(name, type=Path)
    asked = parser.parse_args()
    try:
        write(asked.head, asked.target, asked.out)
    except (EngineError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise EngineError(f"{file} does not exist; name a head's folder, then its target's")
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON's and UTF-8's own errors
        raise EngineError(f"{file} is no JSON ({error}); copy the folder again") from error
    return found
