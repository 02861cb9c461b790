"""Released versions, and what they are judged with."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftmark.errors import DraftmarkError
from draftmark_sglang.judge.engine import ENGINE
from draftmark_sglang.judge.releases import folder_of, prepare


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Requirements that pip was asked for; it installs the wheel's metadata alone."""
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        *_, folder, requirement = command
        asked.append(requirement)
        if requirement == "sglang==9.9.9":
            return subprocess.CompletedProcess(command, 1, "", "WARNING: a mirror\nERROR: No matching distribution")
        if requirement.startswith("sglang=="):
            info = Path(folder) / f"sglang-{requirement.partition('==')[2]}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Requires-Dist: torch==2.11.0\nRequires-Dist: transformers==5.6.0\n")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("DRAFTMARK_RELEASES", str(tmp_path / "releases"))
    return asked


def test_a_release_is_fetched_once_with_what_it_pins(fetched: list[str]) -> None:
    """Its own transformers and tokenizers for that, and nothing else that it requires."""
    prepare("0.5.12.post1")
    prepare("0.5.12.post1")
    assert fetched == ["sglang==0.5.12.post1", "transformers==5.6.0", "tokenizers>=0.22,<=0.23.0"]
    assert (folder_of("0.5.12.post1") / "sglang-0.5.12.post1.dist-info").is_dir()


def test_a_release_that_is_none_leaves_nothing(fetched: list[str]) -> None:
    """A typing error is told before pip runs, an unknown version in pip's last words, and no folder is left."""
    with pytest.raises(DraftmarkError, match="release 'latest' is no version"):
        prepare("latest")
    with pytest.raises(DraftmarkError, match=r"could not fetch sglang==9.9.9: ERROR: No matching distribution"):
        prepare("9.9.9")
    assert fetched == ["sglang==9.9.9"] and not list(folder_of("9.9.9").parent.iterdir())


def test_a_release_comes_before_what_is_installed(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The judging process finds it first; without one its path is left alone."""
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert ENGINE.at("0.5.13").environment("flashinfer", "cpu")["PYTHONPATH"].endswith("sglang-0.5.13:/mine")
    assert "PYTHONPATH" not in ENGINE.environment("flashinfer", "cpu")
    assert ENGINE.at("0.5.13").version() == "SGLang 0.5.13"
