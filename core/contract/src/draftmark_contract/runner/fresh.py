"""Environments of processes that are started: they find what this process finds, and nothing in the current folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def fresh(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables of a Python process, its workers and whatever Python they start.

    ``python -m`` and ``python -c`` put the current folder first, where a user's `types.py` or `code.py` hides the
    standard library's.

    Args:
        more: variables of the caller; folders of its PYTHONPATH come first.
    """
    more = more or {}
    paths = [more.get("PYTHONPATH", ""), *sys.path]
    return {**os.environ, **more, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
