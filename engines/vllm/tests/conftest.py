"""What vLLM asks for and no test installs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's suffix decoding asks for."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))
