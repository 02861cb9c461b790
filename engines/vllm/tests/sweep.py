"""Shared parts of the tables of families and of options: drafts, the quick set, and a comparison of results."""

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
    """Parametrize a test by the names of a table. Names outside the quick set are marked slow."""
    marked = [pytest.param(one, marks=() if one in quick else pytest.mark.slow) for one in names]
    return pytest.mark.parametrize("name", marked)


def assert_alike(result: RunResult, wanted: RunResult) -> None:
    """Check that texts are equal, and log-probabilities up to rounding. One wrong key would change all of them."""
    assert result.tokens == wanted.tokens
    pairs = zip(chain(*result.logprobs), chain(*wanted.logprobs), strict=True)
    assert max(abs(one - other) for one, other in pairs) < ROUNDING
