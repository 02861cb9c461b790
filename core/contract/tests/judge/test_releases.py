"""`--release`: an engine at a version that is not installed."""

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
        """Another one."""
        return Released(release)

    def version(self) -> str:
        """Of the release."""
        return f"released {self.release or 'installed'}"

    def targets(self) -> Sequence[TargetInfo]:
        """One."""
        return [TargetInfo("ONE", "the one")]

    def environment(self, target: str, device: str) -> dict[str, str]:
        """None."""
        return {}

    def open(self, target: str, device: str) -> None:
        """Never."""


class Installed:
    """An engine that is judged as it is installed."""

    name = "installed"
    install = "pip install installed"
    version, targets = Released.version, Released.targets
    environment, open = Released.environment, Released.open
    release = ""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both."""
    monkeypatch.setattr(engines, "engines", lambda: {"released": Released(), "installed": Installed()})
    monkeypatch.setattr(engines, "absent", dict)


def test_a_release_is_the_one_that_is_judged() -> None:
    """And the command of a finding names it."""
    engine, info = engines.find("released:ONE", "1.2.post3")
    assert engine.version() == "released 1.2.post3" and info.name == "ONE"
    assert engines.find("released:ONE")[0].version() == "released installed"
    assert _command("released:ONE", "cpu", "1.2.post3") == "draftmark judge released:ONE --release 1.2.post3"


def test_an_engine_without_releases_says_so() -> None:
    """With what to do instead."""
    with pytest.raises(ArgumentError, match="installed is judged as it is installed here; install that release"):
        engines.find("installed:ONE", "1.2")
