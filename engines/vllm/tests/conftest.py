"""What vLLM asks for and no test installs, and models that are too large for a copy in each worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's suffix decoding asks for."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """SmolLM2 and the head of this repository; the first worker that asks writes their 0.6 GB for all workers."""
    from filelock import FileLock

    from engines.vllm.tests.engine_models import smollm2, smollm2_head

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with FileLock(folder / "trained.lock"):
        return smollm2(folder), smollm2_head(folder)
