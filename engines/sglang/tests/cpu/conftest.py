"""Fixtures for tests that run SGLang itself (`make engines`). Without SGLang no test of this folder is collected."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]
sys.path.insert(0, str(HERE))
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # SGLang's allocators and index kernels are written in Triton.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
if not collect_ignore_glob and importlib.metadata.version("sglang") in ("0.5.17", "0.5.18"):
    os.environ.setdefault("CXX", str(HERE / "with_cstddef.sh"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the test session writes its models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def target(folder: Path) -> str:
    """Folder of a tiny random Llama."""
    import models

    return str(models.tiny_llama(folder / "target"))


@pytest.fixture(scope="session")
def eagle(folder: Path) -> str:
    """Folder of an EAGLE head for `target`."""
    import models

    return str(models.tiny_eagle(folder / "eagle"))


@pytest.fixture(scope="session")
def deep_target(folder: Path) -> str:
    """Folder of a Llama of four layers, because EAGLE-3 needs hidden states of three layers.

    SGLang collects no hidden state before the first or after the last layer.
    """
    import models

    return str(models.tiny_llama(folder / "deep_target", layers=4))


@pytest.fixture(scope="session")
def eagle3(folder: Path) -> str:
    """Folder of an EAGLE-3 head for `deep_target`."""
    import models

    return str(models.tiny_eagle3(folder / "eagle3"))


@pytest.fixture(scope="session")
def smollm2(folder: Path) -> str:
    """Folder of SmolLM2-135M-Instruct, converted once per session."""
    import models
    from scheduler import in_a_fork

    return str(in_a_fork(models.smollm2, folder / "smollm2"))


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Import SGLang once, so that forked cases need not import it."""
    import sglang.srt.managers.scheduler
    import sglang.srt.speculative.eagle_worker_v2
    import sglang.srt.speculative.ngram_worker  # noqa: F401
