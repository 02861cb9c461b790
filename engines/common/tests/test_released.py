"""Tests of `released`, which reads an engine's files in several releases for the adapters' drift tests."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path

import pytest

from draftmark_engines import SupportedVersions
from engines.common.tests.released import Releases, arguments, defined

VARIABLE = "DRAFTMARK_TEST_WHEELS"
RELEASES = Releases(SupportedVersions("Sun", ("no-such-sun", "no-such-moon"), "1", "3"), "no_such_sun", VARIABLE)
SOURCE = "class A:\n    def f(self, x, y=1): ...\n\nclass B:\n    def f(cls, z): ...\n"


def test_wheels_of_a_folder_are_read_by_their_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wheels` finds only wheels of the engine's distributions in the folder, and reads files from each."""
    for name in ("no_such_sun-1.2-py3-none-any", "no_such_moon-2.0-py3-none-any", "no_such_sunday-9.9-py3-none-any"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr("no_such_sun/deep/file.py", f"# of {name}")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    found = {version: read("deep/file.py") for version, read in RELEASES.wheels().items()}
    assert found == {"1.2": "# of no_such_sun-1.2-py3-none-any", "2.0": "# of no_such_moon-2.0-py3-none-any"}
    assert RELEASES.installed() == {}


def test_skips_without_a_release_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no release can be read, the reason for the skip names the engine and the environment variable."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for mark in (RELEASES.each(), RELEASES.each_wheel()):
        (left_out,) = mark.args[1]
        assert left_out.marks[0].args == (f"no Sun is installed, and {VARIABLE} names no folder of wheels",)


def test_definitions_are_found_by_their_path() -> None:
    """`defined` finds a method by class and name, and `arguments` leaves out self and cls."""
    assert arguments(defined(SOURCE, "A", "f")) == ["x", "y"]
    assert arguments(defined(SOURCE, "B", "f")) == ["z"]
    assert isinstance(defined(SOURCE, "B"), ast.ClassDef)
