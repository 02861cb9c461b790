"""Tests that commands do not import files of the current folder that are named like standard modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one file for each of several standard modules; importing such a file ends the process."""
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user was imported')\n")
    return tmp_path


def _draftmark(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as installed: without the current folder on the path."""
    command = [sys.executable, "-P", "-m", "draftmark_tools.cli", *arguments]
    here = str(Path(__file__).parent / "judge")
    path = [here, str(folder / "installed"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_contract_imports_nothing_from_current_folder(folder: Path) -> None:
    """The command, its worker and a check's own process import nothing from the current folder."""
    chosen = ["--tier", "sizing", "-k", "imports_lightly", "--workers", "1", "--allow-part"]
    done = _draftmark(folder, "contract", "reference", "--json", "verdict.json", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = json.loads((folder / "verdict.json").read_text())["results"]
    assert [one["outcome"] for one in ended] == ["passed"], ended


def test_judge_imports_nothing_from_current_folder(folder: Path) -> None:
    """The worker of `draftmark judge` imports nothing from the current folder."""
    info = folder / "installed" / "fake_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[draftmark.judges]\nfake = fake_engine:ENGINE\n")
    done = _draftmark(folder, "judge", "fake:MIXED", "-k", "shrinks", "--allow-part")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, " in done.stdout
