"""The record does not depend on the order of the items, nor on the number of workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SHUFFLE = """
import random

def pytest_collection_modifyitems(items):
    random.Random(7).shuffle(items)
"""
SUBSET = "load and (plugin or mandatory) or padding and is_declared or survive_every_step and target"


def _record(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The results of a run of a subset of both tiers, without their times."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--pyargs",
        "draftmark_contract",
        "-q",
        "--noconftest",
        "-k",
        SUBSET,
        *arguments,
    ]
    done = subprocess.run(
        [*command, "--attn-backend=reference", "--attn-tier=host", "--attn-json=v.json"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results: list[dict[str, Any]] = json.loads((folder / "v.json").read_text())["results"]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in results]


def test_record_is_the_same(tmp_path: Path) -> None:
    """Shuffled, on two workers: the same items with the same outcomes, in the suite's order."""
    (tmp_path / "shuffle.py").write_text(SHUFFLE)
    in_order = _record(tmp_path)
    assert len(in_order) > 30
    assert _record(tmp_path, "-n", "2", "-p", "shuffle") == in_order
