"""Builds the environment of child processes: they find this process's modules, but none of the current folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def fresh(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return environment variables for a Python process and the Python processes that it starts.

    ``python -m`` and ``python -c`` put the current folder first on the path. There, a user's `types.py` or `code.py`
    would hide the module of the standard library.

    Args:
        more: variables to add; folders of its PYTHONPATH come first.
    """
    more = more or {}
    paths = [more.get("PYTHONPATH", ""), *sys.path]
    return {**os.environ, **more, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
