"""Fixture: the environment in which `draftmark judge` runs a backend."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def judged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the environment of the process that judges the module's `TARGET` on a CPU."""
    from draftmark_vllm.judge import ENGINE

    before = dict(os.environ)
    os.environ.update(ENGINE.environment(request.module.TARGET, "cpu"))
    yield
    os.environ.clear()
    os.environ.update(before)
