"""Installs plugins of this package under names of their own, so that any Python process with this path loads them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from draftmark.version import ENTRY_POINT_GROUP

_FOLDER = tempfile.TemporaryDirectory(prefix="draftmark-mutants-")


def install(plugins: Mapping[str, str]) -> None:
    """Write a distribution with these entry points (name → ``module:class``) to a folder on the path."""
    metadata = Path(_FOLDER.name, "draftmark_mutants-0.dist-info")
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: draftmark-mutants\nVersion: 0\n")
    lines = [f"{name} = {plugin}" for name, plugin in plugins.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines, ""]))
    if _FOLDER.name not in sys.path:
        sys.path.append(_FOLDER.name)
