"""Tests of `draftmark judge --release`, which judges an engine at a release that is not installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from draftmark_contract.judge import engines
from draftmark_contract.judge.layer import opening
from draftmark_contract.judge.target import TargetInfo
from draftmark_tools.cli.errors import ArgumentError


@dataclass(frozen=True)
class Released:
    """Engine that can be judged at any release."""

    release: str = ""
    name = "released"
    install = "pip install released"

    def at(self, release: str) -> Released:
        """Return this engine at another release."""
        return Released(release)

    def version(self) -> str:
        """Return a name with the release."""
        return f"released {self.release or 'installed'}"

    def targets(self) -> Sequence[TargetInfo]:
        """Return the engine's only backend."""
        return [TargetInfo("ONE", "the one")]

    def environment(self, target: str, device: str) -> dict[str, str]:
        """Return an empty dict: the engine needs no environment variables."""
        return {}

    def open(self, target: str, device: str) -> None:
        """Do nothing; no test calls it."""


class Installed:
    """Engine that can be judged only at its installed release."""

    name = "installed"
    install = "pip install installed"
    version, targets = Released.version, Released.targets
    environment, open = Released.environment, Released.open
    release = ""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the judge's list of engines with the two classes of this file, and report no adapter as missing."""
    monkeypatch.setattr(engines, "engines", lambda: {"released": Released(), "installed": Installed()})
    monkeypatch.setattr(engines, "absent", dict)


def test_release_selects_the_judged_version() -> None:
    """`find` returns the engine at the given release, and the command printed for a wrong item names that release."""
    engine, info = engines.find("released:ONE", "1.2.post3")
    assert engine.version() == "released 1.2.post3" and info.name == "ONE"
    assert engines.find("released:ONE")[0].version() == "released installed"
    command = opening(engine, "ONE", "cpu").arguments["command"]
    assert command == "draftmark judge released:ONE --release 1.2.post3"


def test_engine_without_releases_rejects_the_option() -> None:
    """An engine that supports only its installed release rejects `--release` with a remedy."""
    with pytest.raises(ArgumentError, match="installed is judged only at its installed release; install that release"):
        engines.find("installed:ONE", "1.2")
