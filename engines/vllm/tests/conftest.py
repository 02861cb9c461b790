"""Fixtures: a stand-in for a package that vLLM imports, and large models that all pytest workers share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for `arctic_inference`, which vLLM's suffix decoding imports, on the import path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))


@pytest.fixture(scope="session")
def trained(shared: Callable[[str], AbstractContextManager[Path]]) -> tuple[str, str]:
    """Return the folders of SmolLM2 and of its draft head (0.6 GB). The first pytest worker writes them for all."""
    from engines.vllm.tests.engine_models import smollm2, smollm2_head

    with shared("trained") as folder:
        return smollm2(folder), smollm2_head(folder)
