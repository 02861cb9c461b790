"""The package that `draftmark new-backend` writes: it builds, loads, and its contract run says what to fill in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import draftmark
import draftmark_contract
from draftmark.cli import main

FOREIGN = ("draftmark", "__editable__")


def new_backend(name: str, folder: Path) -> int:
    """`draftmark new-backend`."""
    return main(["new-backend", name, "--folder", str(folder)])


def test_names_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no identifier, and a folder that exists, are refused with code 2 and a sentence."""
    assert new_backend("My-NPU", tmp_path) == 2
    assert "lower-case" in capsys.readouterr().err
    assert new_backend("my_npu", tmp_path) == 0
    assert new_backend("my_npu", tmp_path) == 2
    assert "exists already" in capsys.readouterr().err


def test_no_placeholder_is_left(tmp_path: Path) -> None:
    """Every template word is filled in, in names and in text."""
    new_backend("my_npu", tmp_path)
    for path in (tmp_path / "draftmark-my-npu").rglob("*"):
        assert "@" not in path.name
        if path.is_file() and path.suffix != ".yml":
            assert "@" not in path.read_text().replace("@hookimpl", "").replace("'draftmark-my-npu[", "")
    assert (tmp_path / "draftmark-my-npu/.github/workflows/contract.yml").is_file()


def _wheel(source: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(target)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    if "No module named 'setuptools'" in done.stderr or "Cannot import 'setuptools" in done.stderr:
        pytest.skip("needs setuptools >= 77 to build a wheel")
    assert done.returncode == 0, done.stderr
    return next(target.glob("*.whl"))


def _environment(folder: Path, wheels: list[Path]) -> Path:
    """Python of a fresh environment: these wheels, and this environment's third-party packages, but no draftmark."""
    import pluggy

    venv.create(folder / "env", symlinks=True)
    site = next((folder / "env").glob("lib/python*/site-packages"))
    for entry in Path(pluggy.__file__).parents[1].iterdir():
        if not entry.name.startswith(FOREIGN) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(site)
    return folder / "env" / "bin" / "python"


def test_wheel_runs_the_contract_in_a_fresh_environment(tmp_path: Path) -> None:
    """Built, installed beside draftmark's wheel: sizing holds; the host tier fails with what is left to write."""
    new_backend("my_npu", tmp_path)
    # A copy, so that no build folder is left in the source tree to leak old files into a later wheel.
    skip = shutil.ignore_patterns("build", "tests", "__pycache__", "*.egg-info")
    sources = [Path(module.__file__).parents[2] for module in (draftmark, draftmark_contract)]  # type: ignore[arg-type]
    copies = [shutil.copytree(source, tmp_path / "sources" / source.name, ignore=skip) for source in sources]
    wheels = [_wheel(source, tmp_path / source.name) for source in (*copies, tmp_path / "draftmark-my-npu")]
    python = _environment(tmp_path, wheels)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    code = "import sys, draftmark; assert 'env' in draftmark.__file__\n"
    code += "from draftmark_contract.runner.run import run_contract\n"
    code += "sys.exit(run_contract('my_npu', sys.argv[1], json_path=sys.argv[1] + '.json', k=sys.argv[2]))"

    def contract(tier: str, k: str) -> tuple[int, str, dict[str, object]]:
        command = [str(python), "-c", code, tier, k]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr, json.loads((tmp_path / f"{tier}.json").read_text())

    status, text, record = contract("sizing", "supports or load or proof")
    assert status == 0, text
    status, text, record = contract("host", "decodes_to_the_token_history and small-decode")
    assert status == 1
    assert "write_metadata is not written yet: set kv_lens[r]" in text
    assert record["counts"]["failed"]  # type: ignore[index]
