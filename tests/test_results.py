"""Recorded results, and the plans of runs: what any reader may read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RESULTS = sorted((Path(__file__).parent.parent / "benchmarks").rglob("*.json"))
FOLDERS = re.compile(r"/(?:root|home|tmp|work|Users|mnt|workspace)/[\w.-]+")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_names_no_folder_of_its_machine(path):
    """Tracebacks among what a run said are the usual way in."""
    assert not FOLDERS.findall(path.read_text(encoding="utf-8"))
