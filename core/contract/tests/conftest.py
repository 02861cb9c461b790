"""Fixtures of the suite's tests. Adds this folder to the path, so that tests can import the helper modules in it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def thawed() -> Iterator[None]:
    """Run a test without frozen objects: the state of the process has their number, and Python counts a million."""
    gc.unfreeze()
    yield
    gc.freeze()
