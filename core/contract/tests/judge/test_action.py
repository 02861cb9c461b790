"""Tests of the GitHub action: its script judges the fake engine as on a runner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[4]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / ".github/actions/judge/action.yml").read_text(encoding="utf-8"))
STEPS = ACTION["runs"]["steps"]


def test_install_step_names_folders_that_exist() -> None:
    """The folders that the action installs are distributions of this repository."""
    script = STEPS[0]["run"]
    core, engines = ("draftmark", "tools", "contract"), ("common", "vllm_judge", "sglang_judge")
    for folder in (*(f"core/{name}" for name in core), *(f"engines/{name}" for name in engines)):
        assert (ROOT / folder / "pyproject.toml").exists()
    assert '"$root/engines/${TARGET%%:*}_judge"' in script and "$GITHUB_ACTION_PATH/../../.." in script


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "sample", "part", "code"),
    [
        ("fake:RIGHT", "0", "false", 0),
        ("fake:MIXED", "0", "false", 1),
        ("fake:MIXED", "1", "true", 1),
        pytest.param("fake:package.Two", "1", "false", 2, marks=pytest.mark.slow),
        ("fake:package.Two", "1", "true", 0),
    ],
)
def test_judge_step_writes_the_verdict_and_ends_with_its_code(
    tmp_path: Path, target: str, sample: str, part: str, code: int
) -> None:
    """The step has the command's exit code, and leaves the verdict, the page and a summary; a part leaves no page."""
    info = tmp_path / "path" / "fake_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[draftmark.judges]\nfake = fake_engine:ENGINE\n")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    command = bin_folder / "draftmark"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m draftmark_tools.cli "$@"\n')
    command.chmod(0o755)
    step = STEPS[1]
    inputs = {"TARGET": target, "DEVICE": "cpu", "AGAINST": "", "SAMPLE": sample, "ALLOW_PART": part, "OUTPUT": "judge"}
    assert set(step["env"]) == set(inputs)
    path = [str(info.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    files = {"GITHUB_OUTPUT": str(tmp_path / "output"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    environment = {**os.environ, **inputs, **files, "PYTHONPATH": os.pathsep.join(path)}
    environment["PATH"] = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    bash = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]  # as a runner starts a step with `shell: bash`
    done = subprocess.run(bash, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "output").read_text() == "verdict=judge/verdict.json\n"
    written = {"verdict.json", "report.html"} if code != 2 else set()
    assert {one.name for one in (tmp_path / "judge").iterdir()} == written | {"judge.txt"}
    assert "  fake 1.0, cpu" in (tmp_path / "summary").read_text()
