"""Shared code of the engines' converters for draft heads: it reads the input folders and the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import EngineError


def read_configs(head: Path, target: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of head.json in a head's folder, and of config.json in its target's folder.

    Raises:
        EngineError: a file is absent, or is not JSON.
    """
    return _read(head / "head.json"), _read(target / "config.json")


def write_from_command_line(doc: str | None, write: Callable[[Path, Path, Path], object]) -> None:
    """Call ``write(head, target, out)`` with the three folders from the command line.

    If a package or folder is absent, or a file does not fit or cannot be read or written, the program prints one
    sentence and exits with code 1.
    """
    parser = argparse.ArgumentParser(description=doc)
    for name in ("head", "target", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    try:
        write(given.head, given.target, given.out)
    except (EngineError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except ModuleNotFoundError as error:
        parser.exit(1, f"{parser.prog}: {error.name} is not installed; pip install {error.name}\n")
    except KeyError as error:
        parser.exit(1, f"{parser.prog}: head.json or config.json has no {error}; name a head, then its target\n")
    except Exception as error:  # a damaged file can raise any class (SafetensorError, RuntimeError, …)
        cause = " ".join(str(error).split())
        parser.exit(1, f"{parser.prog}: a file cannot be read ({type(error).__name__}: {cause}); copy it again\n")


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise EngineError(f"{file} does not exist; name a head's folder, then its target's")
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # base class of the errors for malformed JSON and malformed UTF-8
        raise EngineError(f"{file} is not JSON ({error}); copy the folder again") from error
    return found
