"""Proposer of n-gram draft trees. vLLM loads it by name: `{"method": "custom_class", "model": NAME}`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from draftmark_speculative.drafts import DraftTree

from ..settings import Settings
from .step_trees import Parents

MAX_NGRAM, MIN_NGRAM = 4, 2
"""Longest and shortest run of recent tokens to find again earlier in the text. The longest is tried first."""


class LookUpTrees:
    """Finds earlier occurrences of a request's newest tokens, and drafts their continuations as branches of a tree.

    Attributes:
        parents: parents of the nodes of each request's last tree, in `propose`'s order; None without drafts.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._nodes = 1 + vllm_config.speculative_config.num_speculative_tokens
        self._branches = Settings.read(vllm_config.additional_config).branches
        self._max_len = vllm_config.model_config.max_model_len
        self.parents: list[Parents | None] = []

    def load_model(self, *given: Any, **more: Any) -> None:
        """Do nothing: this proposer has no model."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray[Any, Any],
        token_ids_cpu: np.ndarray[Any, Any],
        *given: Any,
        **more: Any,
    ) -> list[list[int]]:
        """Return the draft tokens of every request, and store the trees' parents in `parents`.

        Args:
            sampled_token_ids: tokens that the last step sampled for each request; empty during its prefill.
            num_tokens_no_spec: number of tokens of each request.
            token_ids_cpu: the tokens, one row for each request.
        """
        self.parents = []
        drafts: list[list[int]] = []
        for number, sampled in enumerate(sampled_token_ids):
            count = int(num_tokens_no_spec[number])
            if not sampled or count >= self._max_len:
                self.parents.append(None)
                drafts.append([])
                continue
            tree = look_up(token_ids_cpu[number, :count], self._nodes, self._branches)
            self.parents.append(tuple(tree.parents) if len(tree) > 1 else None)
            drafts.append(tree.tokens[1:])
        return drafts


def look_up(tokens: np.ndarray[Any, Any], nodes: int, branches: int) -> DraftTree:
    """Return a tree of up to `nodes` nodes. Its root is the newest token, with up to `branches` paths below.

    Longer matches come first; among equal lengths, later matches come first. The paths share the nodes evenly.
    """
    tree, budget = DraftTree([int(tokens[-1])]), nodes - 1
    paths: dict[tuple[int, ...], None] = {}
    for end in _matches(tokens):
        paths.setdefault(_continuation(tokens, end, budget))
        if len(paths) == branches:
            break
    for rank, path in enumerate(paths):
        budget -= tree.insert(path, -(-budget // (len(paths) - rank)))
    return tree


def _matches(tokens: np.ndarray[Any, Any]) -> Iterator[int]:
    """Yield the indices after earlier occurrences of the newest tokens, best match first."""
    for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        if size < len(tokens):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            found = np.flatnonzero((windows == tokens[-size:]).all(1))
            yield from (int(one) + size for one in found[::-1])


def _continuation(tokens: np.ndarray[Any, Any], end: int, length: int) -> tuple[int, ...]:
    """Return `length` tokens from index `end` on. At the end of the text, copy on from the copied tokens (LZ77)."""
    lag, path = len(tokens) - end, [int(one) for one in tokens[end : end + length]]
    while len(path) < length:
        path.append(path[len(path) - lag])
    return tuple(path)
