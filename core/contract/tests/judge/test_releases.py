"""Tests of `draftmark judge --release`: an engine at a release that is not installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from draftmark.cli.errors import ArgumentError
from draftmark_contract.judge import engines
from draftmark_contract.judge.run import _command
from draftmark_contract.judge.target import TargetInfo


@dataclass(frozen=True)
class Released:
    """An engine that can be judged at any release."""

    release: str = ""
    name = "released"
    install = "pip install released"

    def at(self, release: str) -> Released:
        """Return the engine at another release."""
        return Released(release)

    def version(self) -> str:
        """Return a name with the release."""
        return f"released {self.release or 'installed'}"

    def targets(self) -> Sequence[TargetInfo]:
        """Return one target."""
        return [TargetInfo("ONE", "the one")]

    def environment(self, target: str, device: str) -> dict[str, str]:
        """Return an empty dict: the engine needs no environment variables."""
        return {}

    def open(self, target: str, device: str) -> None:
        """Do nothing; no test calls it."""


class Installed:
    """An engine that can be judged only at its installed release."""

    name = "installed"
    install = "pip install installed"
    version, targets = Released.version, Released.targets
    environment, open = Released.environment, Released.open
    release = ""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the judge find both engines, and report no adapter as missing."""
    monkeypatch.setattr(engines, "engines", lambda: {"released": Released(), "installed": Installed()})
    monkeypatch.setattr(engines, "absent", dict)


def test_release_selects_the_judged_version() -> None:
    """`find` returns the engine at the given release, and the command of a finding names the release."""
    engine, info = engines.find("released:ONE", "1.2.post3")
    assert engine.version() == "released 1.2.post3" and info.name == "ONE"
    assert engines.find("released:ONE")[0].version() == "released installed"
    assert _command("released:ONE", "cpu", "1.2.post3") == "draftmark judge released:ONE --release 1.2.post3"


def test_engine_without_releases_rejects_the_option() -> None:
    """`--release` fails with a remedy for an engine that supports only its installed release."""
    with pytest.raises(ArgumentError, match="installed is judged only at its installed release; install that release"):
        engines.find("installed:ONE", "1.2")
