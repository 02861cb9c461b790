"""Fixtures of the speculative loop: tiny models, their plain texts, draft heads, and drafters with known texts.

Each fixture imports its modules itself: xdist's controller also reads this file, but runs no test.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

WIDTH = 48


@cache
def _model(family: str):
    from core.speculative.tests.known import VOCAB
    from draftmark_speculative.models.tiny import tiny_model

    return tiny_model(family, vocab_size=VOCAB)


@cache
def _text(family: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    out = _model(family).hf.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return tuple(out[0, len(prompt) :].tolist())


@pytest.fixture(scope="session")
def make_model():
    """Return a function from a family name to a cached tiny model."""
    return _model


@pytest.fixture(scope="session")
def plain_text():
    """Return a function (family, prompt, count) → transformers' own greedy continuation."""
    return _text


@pytest.fixture(scope="session")
def oracle():
    """Return the class `Oracle`, a speculation with known texts."""
    from core.speculative.tests.known import Oracle

    return Oracle


@pytest.fixture(scope="session")
def prompts():
    """Return a function (count, longest, seed) → random prompts of different lengths."""
    from core.speculative.tests.known import VOCAB

    def make(count: int, longest: int, seed: int = 0) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]

    return make


@cache
def _random_head(features: tuple[int, ...] = (0, 1, 2), seed: int = 0, draft_vocab: int | None = None):
    from core.speculative.tests.known import VOCAB
    from draftmark_speculative.eagle import DraftHead, HeadConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = DraftHead(HeadConfig(WIDTH, VOCAB, 4, 2, 12, 96, features, draft_vocab))
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.3)
        if draft_vocab is not None:
            head.d2t.copy_(torch.randperm(VOCAB)[:draft_vocab])
    return head.requires_grad_(False).eval()


@pytest.fixture(scope="session")
def random_head():
    """Return a function (feature_layers, seed, draft_vocab) → a head with wide random weights."""
    return _random_head


@pytest.fixture(scope="session")
def markov():
    """Return a function strength → (model, head). At strength 0 the head is always right, at 1 almost never."""
    from draftmark_speculative.eagle.tiny import tiny_pair

    return cache(tiny_pair)


@pytest.fixture(scope="session")
def table():
    """Return a function row_s → cost table: one second a round, and `row_s` for each row after the first."""
    from draftmark_speculative.adaptive.costs import Cost, CostTable

    return lambda row_s: CostTable({1: Cost(1.0), 64: Cost(1.0)}, {1: Cost(1.0), 1001: Cost(1.0 + 1000 * row_s)})
