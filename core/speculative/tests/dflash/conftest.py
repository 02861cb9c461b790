"""Fixtures of block drafts: tiny models with few tokens, so that wide trees are often right."""

from __future__ import annotations

from functools import cache

import pytest

VOCAB = 16


@cache
def _model(family: str):
    from draftmark_speculative.models.tiny import tiny_model

    return tiny_model(family, vocab_size=VOCAB)


@pytest.fixture(scope="session")
def few_tokens():
    """Return a function from a family name to a cached tiny model with 16 tokens."""
    return _model


@pytest.fixture(scope="session")
def starts():
    """Return a function (count, longest, seed) → random prompts of these tokens."""
    import random

    def make(count: int, longest: int, seed: int = 0) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]

    return make


@pytest.fixture(scope="session")
def plain():
    """Return a function (model, prompts, count) → the texts of plain decoding, for any model."""
    from draftmark_speculative import EngineConfig, generate

    known: dict[tuple, list] = {}

    def of(model, prompts, count):
        key = (id(model), str(prompts), count)
        if key not in known:
            known[key] = generate(model, prompts, count, EngineConfig(max_context_len=96))[0]
        return known[key]

    return of
