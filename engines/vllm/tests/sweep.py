"""Shared code of the tests of model families and of vLLM options: parametrization and comparison of results."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pytest

from engines.vllm.tests.engine_run import RunResult

SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
NEW_TOKENS = 16
ROUNDING = 1e-4
"""Tolerance of a log-probability in float32."""


def each(names: Iterable[str], quick: set[str]) -> pytest.MarkDecorator:
    """Return a pytest mark that runs a test once per name. Names that are not in `quick` are marked slow."""
    marked = [pytest.param(one, marks=() if one in quick else pytest.mark.slow) for one in names]
    return pytest.mark.parametrize("name", marked)


def assert_alike(result: RunResult, wanted: RunResult) -> None:
    """Check that texts are equal, and log-probabilities up to rounding. A wrong key would change every one."""
    assert result.tokens == wanted.tokens
    pairs = zip(chain(*result.logprobs), chain(*wanted.logprobs), strict=True)
    assert max(abs(one - other) for one, other in pairs) < ROUNDING
