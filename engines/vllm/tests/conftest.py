"""A stand-in for a package that vLLM imports, and models too large for a copy in each worker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for the package of vLLM's suffix decoding on the path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))


@pytest.fixture(scope="session")
def trained(shared: Callable[[str], AbstractContextManager[Path]]) -> tuple[str, str]:
    """Return SmolLM2 and this repository's head. The first worker writes them, 0.6 GB, for all workers."""
    from engines.vllm.tests.engine_models import smollm2, smollm2_head

    with shared("trained") as folder:
        return smollm2(folder), smollm2_head(folder)
