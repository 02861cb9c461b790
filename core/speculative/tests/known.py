"""A speculation for tests that drafts from texts known in advance, with wrong guesses mixed in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from draftmark_speculative import DraftTree, Speculation

VOCAB = 256


@dataclass(frozen=True)
class Oracle(Speculation):
    """Speculation that mixes each request's known text with wrong guesses, so that accepted lengths vary.

    A random model never repeats itself, so n-gram drafts would leave the accepting path untested.
    """

    topk: int
    num_draft_tokens: int
    texts: tuple[tuple[int, ...], ...]
    seed: int = 0

    def begin(self, request_id: int, prompt: Sequence[int]) -> OracleDrafter:
        return OracleDrafter(self, request_id, prompt)


class OracleDrafter:
    """Proposes trees in which at most one path is right, for a random number of tokens."""

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
