"""The tutorial's backend, as `draftmark new-backend` writes it, as a base class for mutants.

Authors of the second attack had read only the tutorial, so their mutants are subclasses of its classes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from draftmark.loaded import LoadedBackend
from draftmark.plugin import BackendPlugin
from draftmark_contract.skeleton import write_skeleton

_FOLDER = tempfile.TemporaryDirectory(prefix="draftmark-tutorial-")
sys.path.append(str(write_skeleton("tugboat", Path(_FOLDER.name)) / "src"))

from draftmark_tugboat import Plugin, contract  # noqa: E402
from draftmark_tugboat.backend import Backend  # noqa: E402

__all__ = ["Backend", "Plugin", "loaded", "notes"]


def notes(usage: Callable[..., dict[str, int]] | None) -> Any:
    """Return the tutorial's contract notes, with the `usage` of a mutant that adds buffers."""
    return SimpleNamespace(layouts=contract.layouts, **({"usage": usage} if usage else {}))


def loaded(plugin: type[BackendPlugin], usage: Callable[..., dict[str, int]] | None = None) -> LoadedBackend:
    """Load a plugin of another design with the tutorial's contract notes; `usage` as in `notes`."""
    made = plugin()
    made.contract_notes = lambda: notes(usage)  # type: ignore[attr-defined]
    return LoadedBackend("tugboat", made)
