"""The tutorial's backend, as `draftmark new-backend` writes it, and what it takes to make a mutant of it.

Somebody who has read the tutorial alone changes this one, so the mutants of the second attack are subclasses of it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from draftmark.skeleton import write_skeleton

_FOLDER = tempfile.TemporaryDirectory(prefix="draftmark-tutorial-")
sys.path.append(str(write_skeleton("tugboat", Path(_FOLDER.name)) / "src"))

from draftmark_tugboat import Plugin, contract  # noqa: E402
from draftmark_tugboat.backend import Backend  # noqa: E402

__all__ = ["Backend", "Plugin", "notes"]


def notes(usage: Callable[..., dict[str, int]] | None) -> Any:
    """The tutorial's contract notes, with a `usage` for a mutant that has buffers of its own."""
    return SimpleNamespace(layouts=contract.layouts, **({"usage": usage} if usage else {}))
