"""What the loop's tests share: a model whose drafts are as good as is wanted, and costs that decide what pays."""

from __future__ import annotations

from functools import cache

import pytest

from draftmark_speculative import Adaptive, EngineConfig, generate
from draftmark_speculative.adaptive.costs import Cost, CostTable
from draftmark_speculative.eagle.tiny import tiny_pair

COUNT = 30


def _table(row_s: float) -> CostTable:
    """A second a round, and `row_s` more for each row of a budget beyond the first."""
    return CostTable({1: Cost(1.0), 64: Cost(1.0)}, {1: Cost(1.0), 1001: Cost(1.0 + 1000 * row_s)})


@pytest.fixture(scope="session")
def markov():
    """strength → (model, head): 0 drafts right always, 0.01 for about two tokens, 1 hardly ever."""
    return cache(tiny_pair)


@pytest.fixture(scope="session")
def table():
    """row_s → a cost table."""
    return _table


@pytest.fixture(scope="session")
def run():
    """(model, drafts, row_s, starts, **config) → texts and engine: adaptive, four requests at a time."""

    def of(model, drafts, row_s, starts, *, budgets=(), probe_share=0.01, count=COUNT, **more):
        speculate = drafts and Adaptive(drafts, budgets, _table(row_s), probe_share)
        small = {"page_size": 4, "max_num_reqs": 4, "max_context_len": 64, "max_extend_tokens": 20, "guard": True}
        outs, engine = generate(model, starts, count, EngineConfig(**{**small, **more}, speculate=speculate))
        assert engine.pages.in_use == 0
        return [out.tokens for out in outs], engine

    return of
