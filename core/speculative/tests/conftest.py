"""Fixtures of the speculative loop: tiny models, their plain text, and a drafter that knows the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from draftmark_speculative import DraftTree, Speculation
from draftmark_speculative.models.tiny import tiny_model

VOCAB = 256


@dataclass(frozen=True)
class Oracle(Speculation):
    """Speculation that knows each request's text and mixes it with wrong guesses, so that acceptance is ragged.

    A random model never repeats itself, so n-gram drafts would leave the accepting path untested.
    """

    topk: int
    num_draft_tokens: int
    texts: tuple[tuple[int, ...], ...]
    seed: int = 0

    def begin(self, request_id: int, prompt: Sequence[int]) -> OracleDrafter:
        return OracleDrafter(self, request_id, prompt)


class OracleDrafter:
    """Trees of which one path may be right for a while."""

    def __init__(self, oracle: Oracle, request_id: int, prompt: Sequence[int]) -> None:
        self._oracle = oracle
        self._text = oracle.texts[request_id]
        self._random = random.Random(oracle.seed * 1000 + request_id)
        self._given = 0
        self._last = prompt[-1]

    def extend(self, tokens: Sequence[int]) -> None:
        self._given += len(tokens)
        self._last = tokens[-1]

    def propose(self) -> DraftTree:
        tree, draw, nodes = DraftTree([self._last]), self._random, self._oracle.num_draft_tokens
        if draw.random() < 0.15:
            return tree
        for _ in range(self._oracle.topk):
            right = list(self._text[self._given : self._given + draw.randint(0, nodes)])
            wrong = [draw.randrange(VOCAB) for _ in range(draw.randint(0, 3))]
            tree.insert(right + wrong, draw.randint(0, nodes - len(tree)))
        return tree


@cache
def _model(family: str):
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
    """Family name → a cached tiny model."""
    return _model


@pytest.fixture(scope="session")
def plain_text():
    """(family, prompt, count) → transformers' own greedy continuation."""
    return _text


@pytest.fixture(scope="session")
def oracle():
    """The Oracle class."""
    return Oracle


@pytest.fixture(scope="session")
def prompts():
    """(count, longest, seed) → random prompts of different lengths."""

    def make(count: int, longest: int, seed: int = 0) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]

    return make
