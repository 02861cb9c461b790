"""What the tables of families and of options share: drafts, what is quick, and what counts as the same."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pytest

from engines.vllm.tests.engine_run import Said

SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
NEW_TOKENS = 16
ROUNDING = 1e-4
"""Of a log-probability, in float32."""


def each(names: Iterable[str], quick: set[str]) -> pytest.MarkDecorator:
    """Each name of a table, those that are not quick in the slow set."""
    marked = [pytest.param(one, marks=() if one in quick else pytest.mark.slow) for one in names]
    return pytest.mark.parametrize("name", marked)


def assert_alike(said: Said, wanted: Said) -> None:
    """Texts are equal, and log-probabilities but for rounding: in a random model a wrong key moves every one."""
    assert said.tokens == wanted.tokens
    pairs = zip(chain(*said.logprobs), chain(*wanted.logprobs), strict=True)
    assert max(abs(one - other) for one, other in pairs) < ROUNDING
