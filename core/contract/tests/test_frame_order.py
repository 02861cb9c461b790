"""The record does not depend on the order of the items, nor on the number of workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The subset in the suite's own order."""
    return _record(tmp_path_factory.mktemp("order"))


@pytest.mark.parametrize("arguments", [("-n", "2", "-p", "shuffle")], ids=" ".join)
def test_record_is_the_same(tmp_path: Path, in_order: list[dict[str, Any]], arguments: tuple[str, ...]) -> None:
    """Shuffled, on two workers: the same items with the same outcomes, in the suite's order."""
    (tmp_path / "shuffle.py").write_text(SHUFFLE)
    assert len(in_order) > 30
    assert _record(tmp_path, *arguments) == in_order
