"""The package that `draftmark new-backend` writes: names and templates. `tests/test_wheels.py` builds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmark.cli import main


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
