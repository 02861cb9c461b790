"""Fixture: the environment in which `draftmark judge` runs a backend."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def judged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the environment of the process that judges the module's `TARGET` on a CPU.

    vLLM loads its plugins once in a process, and the judge's environment disables draftmark's. Later tests of this
    process fork engines that need it, so the flag is set back.
    """
    from vllm import plugins

    from draftmark_vllm_judge import ENGINE

    before, loaded = dict(os.environ), plugins.plugins_loaded
    os.environ.update(ENGINE.environment(request.module.TARGET, "cpu"))
    yield
    os.environ.clear()
    os.environ.update(before)
    plugins.plugins_loaded = loaded
