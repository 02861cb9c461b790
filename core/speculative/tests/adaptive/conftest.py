"""Fixture that runs the engine with adaptive rounds."""

from __future__ import annotations

import pytest

COUNT = 30


@pytest.fixture(scope="session")
def run(table):
    """Return run(model, drafts, row_s, starts, **config) → (texts, engine), which drafts adaptively."""
    from draftmark_speculative import Adaptive, EngineConfig, generate

    def of(model, drafts, row_s, starts, *, budgets=(), probe_share=0.01, count=COUNT, **more):
        speculate = drafts and Adaptive(drafts, budgets, table(row_s), probe_share)
        small = {"page_size": 4, "max_num_reqs": 4, "max_context_len": 64, "max_extend_tokens": 20, "guard": True}
        outs, engine = generate(model, starts, count, EngineConfig(**{**small, **more}, speculate=speculate))
        assert engine.pages.in_use == 0
        return [out.tokens for out in outs], engine

    return of
