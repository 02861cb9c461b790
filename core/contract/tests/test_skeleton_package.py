"""Tests of the package that `draftmark new-backend` writes: names and templates. `tests/test_wheels.py` builds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmark_tools.cli import main


def new_backend(name: str, folder: Path) -> int:
    """Run `draftmark new-backend` and return its exit code."""
    return main(["new-backend", name, "--folder", str(folder)])


def test_names_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid package name and an existing folder are rejected with exit code 2 and one sentence."""
    assert new_backend("My-NPU", tmp_path) == 2
    assert "lower-case" in capsys.readouterr().err
    assert new_backend("my_npu", tmp_path) == 0
    assert new_backend("my_npu", tmp_path) == 2
    assert "already exists" in capsys.readouterr().err


def test_no_placeholder_is_left(tmp_path: Path) -> None:
    """Every placeholder of the template is replaced, in file names and in text."""
    new_backend("my_npu", tmp_path)
    for path in (tmp_path / "draftmark-my-npu").rglob("*"):
        assert "@" not in path.name
        if path.is_file() and path.suffix != ".yml":
            assert "@" not in path.read_text().replace("@hookimpl", "").replace("'draftmark-my-npu[", "")
    assert (tmp_path / "draftmark-my-npu/.github/workflows/contract.yml").is_file()
