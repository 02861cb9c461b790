"""What vLLM asks for and no test installs, and models that are too large for a copy in each worker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's suffix decoding asks for."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))


@pytest.fixture(scope="session")
def trained(shared: Callable[[str], AbstractContextManager[Path]]) -> tuple[str, str]:
    """SmolLM2 and the head of this repository; the first worker that asks writes their 0.6 GB for all workers."""
    from engines.vllm.tests.engine_models import smollm2, smollm2_head

    with shared("trained") as folder:
        return smollm2(folder), smollm2_head(folder)
