"""Each distribution as a user gets it: its wheel alone beside the core's, in a fresh environment without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))


def run(*command: object, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """A command with a clean Python path."""
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout, env=environment)


def wheel(source: Path, folder: Path) -> Path:
    """The wheel of one distribution, built from a copy so that nothing is left in the tree."""
    copy = folder / "source"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "emulator"))
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    done = run(*pip, "--wheel-dir", folder, copy)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A new virtual environment with the core's wheel and the contract's needs, and no torch."""
    folder = tmp_path_factory.mktemp("fresh")
    assert run(sys.executable, "-m", "venv", folder / "venv").returncode == 0
    python = folder / "venv" / "bin" / "python"
    core, contract = (wheel(ROOT / "core" / name, tmp_path_factory.mktemp(name)) for name in ("draftmark", "contract"))
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    done = run(*install, "-c", ROOT / "constraints.txt", core, f"draftmark-contract[proof] @ {contract.as_uri()}")
    assert done.returncode == 0, done.stderr
    assert run(python, "-c", "import torch").returncode != 0, "this environment must have no torch"
    return python


def judge(python, source, name, folder):
    """Install a distribution's wheel, run list, size and the sizing tier, and uninstall it again."""
    built = wheel(source, folder)
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    assert run(*pip, "install", "--quiet", "--no-deps", built).returncode == 0
    try:
        draftmark = python.parent / "draftmark"
        found = run(draftmark, "list")
        assert found.returncode == 0 and name in found.stdout, found.stderr
        sized = run(draftmark, "size", name, "--page-size", 128)  # of the profile that all serve
        judged = run(draftmark, "contract", name, "--tier", "sizing")
        return sized, judged
    finally:
        run(*pip, "uninstall", "--quiet", "--yes", built.name.split("-")[0])


def test_the_reference_conforms_without_torch(fresh):
    """The core's wheel alone: the reference passes the sizing tier, proofs included, where torch is not installed."""
    judged = run(fresh.parent / "draftmark", "contract", "reference", "--tier", "sizing")
    assert judged.returncode == 0, judged.stdout[-3000:]
    assert "reference conforms to draftmark contract" in judged.stdout


@pytest.mark.parametrize("source", PLUGINS, ids=lambda path: path.name)
def test_each_plugin_alone_is_sized_and_conforms(fresh, source, tmp_path):
    """A plugin's wheel beside the core's, its runtime absent: list, size and the sizing tier."""
    sized, judged = judge(fresh, source, source.name, tmp_path)
    assert sized.returncode == 0, sized.stderr
    assert judged.returncode == 0, judged.stdout[-3000:]
