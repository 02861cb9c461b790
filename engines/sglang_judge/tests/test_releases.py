"""Tests of the judge's downloads of SGLang releases, with a stand-in for pip."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftmark.errors import DraftmarkError
from draftmark_sglang_judge.engine import ENGINE
from draftmark_sglang_judge.releases import folder_of, prepare


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """List of the requirements with which pip was called. The stand-in for pip installs only a wheel's metadata."""
    requirements: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        *_, folder, requirement = command
        requirements.append(requirement)
        if requirement == "sglang==9.9.9":
            return subprocess.CompletedProcess(command, 1, "", "WARNING: a mirror\nERROR: No matching distribution")
        if requirement.startswith("sglang=="):
            info = Path(folder) / f"sglang-{requirement.partition('==')[2]}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Requires-Dist: torch==2.11.0\nRequires-Dist: transformers==5.6.0\n")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("DRAFTMARK_RELEASES", str(tmp_path / "releases"))
    return requirements


def test_release_is_downloaded_once_with_its_pins(fetched: list[str]) -> None:
    """A release is downloaded once, with the transformers version that it pins and tokenizers that fit this version."""
    prepare("0.5.12.post1")
    prepare("0.5.12.post1")
    assert fetched == ["sglang==0.5.12.post1", "transformers==5.6.0", "tokenizers>=0.22,<=0.23.0"]
    assert (folder_of("0.5.12.post1") / "sglang-0.5.12.post1.dist-info").is_dir()


def test_unknown_release_leaves_no_folder(fetched: list[str]) -> None:
    """For a malformed or unknown version an error is raised, and no folder remains."""
    with pytest.raises(DraftmarkError, match="release 'latest' is not a version"):
        prepare("latest")
    with pytest.raises(DraftmarkError, match=r"could not download sglang==9.9.9: ERROR: No matching distribution"):
        prepare("9.9.9")
    assert fetched == ["sglang==9.9.9"] and not list(folder_of("9.9.9").parent.iterdir())


def test_release_comes_first_on_the_path(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The release's folder is the first entry of the judge's PYTHONPATH; without a release PYTHONPATH is not set."""
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert ENGINE.at("0.5.13").environment("flashinfer", "cpu")["PYTHONPATH"].endswith("sglang-0.5.13:/mine")
    assert "PYTHONPATH" not in ENGINE.environment("flashinfer", "cpu")
    assert ENGINE.at("0.5.13").version() == "SGLang 0.5.13"
