"""Draft heads for tests: random ones, which guess wrong, and one that is often right."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from draftmark_speculative.eagle import DraftHead, HeadConfig
from draftmark_speculative.eagle.tiny import tiny_pair

VOCAB = 256
WIDTH = 48


@cache
def _random_head(features: tuple[int, ...] = (0, 1, 2), seed: int = 0, draft_vocab: int | None = None) -> DraftHead:
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
    """(feature_layers, seed, draft_vocab) → a head with wide random weights."""
    return _random_head


@pytest.fixture(scope="session")
def markov():
    """strength → (model, head): a model near a Markov chain, and the head that knows the chain."""
    return cache(tiny_pair)
