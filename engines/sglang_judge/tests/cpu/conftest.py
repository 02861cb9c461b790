"""Settings for tests that run SGLang itself (`make engines`). Without SGLang no test of this folder is collected."""

from __future__ import annotations

import importlib.util
import os

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # SGLang's allocators and index kernels are written in Triton.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Import SGLang once, so that forked cases need not import it."""
    import sglang.srt.managers.scheduler
    import sglang.srt.speculative.eagle_worker_v2
    import sglang.srt.speculative.ngram_worker  # noqa: F401
