"""Tests that a record depends neither on the order of items nor on the number of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftmark_contract.runner.outputs import write_outputs
from draftmark_contract.runner.session import ContractSession, conclude

SHUFFLE = """
import random

def pytest_collection_modifyitems(items):
    random.Random(7).shuffle(items)
"""
SUBSET = "load and mandatory or describes_itself or overflow and target or any_grad_mode and small"


def _shuffled(path: Path) -> dict[str, Any]:
    """Run some items of both tiers with pytest in random order on two workers; return the record."""
    (path.parent / "shuffle.py").write_text(SHUFFLE)
    environment = {**os.environ, "PYTHONPATH": str(path.parent), "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--pyargs", "draftmark_contract", "-q", "--noconftest", "-k", SUBSET]
    command += ["--attn-backend=reference", "--attn-tier=host", f"--attn-json={path}", "-n", "2", "-p", "shuffle"]
    done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return _read(path)


def _in_order(path: Path, items: set[str]) -> dict[str, Any]:
    """Run these items in this process in the suite's order; return the record."""
    session = ContractSession("reference", "host", None)
    records = {item: session.run(item).as_json() for item in session.items if item in items}
    write_outputs(conclude(session, records), str(path), None, None)
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    """Read a record and return it without its times."""
    record: dict[str, Any] = json.loads(path.read_text())
    for row in record["results"]:
        del row["seconds"]
    return record


@pytest.mark.long
def test_record_does_not_depend_on_order(tmp_path: Path) -> None:
    """A shuffled run on two workers gives the verdict and outcomes of an ordered run."""
    shuffled = _shuffled(tmp_path / "shuffled.json")
    items = {row["item"] for row in shuffled["results"]}
    assert {row["tier"] for row in shuffled["results"]} == {"sizing", "host"} and len(items) > 30
    assert _in_order(tmp_path / "in-order.json", items) == shuffled
