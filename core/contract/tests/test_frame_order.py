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
SUBSET = "load and mandatory or describes_itself or overflow and target or survive_every_step and small"


def _record(folder: Path, *arguments: str) -> dict[str, Any]:
    """The record of a run of a subset of both tiers, without times."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--pyargs", "draftmark_contract", "-q", "--noconftest", "-k", SUBSET]
    command += ["--attn-backend=reference", "--attn-tier=host", "--attn-json=v.json", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads((folder / "v.json").read_text())
    for row in record["results"]:
        del row["seconds"]
    return record


def test_record_is_the_same(tmp_path: Path) -> None:
    """Shuffled, on two workers: the same verdict, with the same outcomes in the suite's order."""
    (tmp_path / "shuffle.py").write_text(SHUFFLE)
    in_order = _record(tmp_path)
    assert {row["tier"] for row in in_order["results"]} == {"sizing", "host"} and len(in_order["results"]) > 30
    assert _record(tmp_path, "-n", "2", "-p", "shuffle") == in_order
