"""Draft proposer for tests that has the expected generated texts. It drafts a wrong token before each right token."""

from __future__ import annotations

import ast
import os
from typing import Any

from draftmark_vllm.trees.step_trees import Parents


class SecondBranch:
    """Drafts trees with wrong tokens in odd nodes, and the next tokens of the expected text in even nodes."""

    def __init__(self, vllm_config: Any) -> None:
        self._drafts = vllm_config.speculative_config.num_speculative_tokens
        self._texts = ast.literal_eval(os.environ["DRAFTMARK_ORACLE"])
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self.parents: list[Parents | None] = []

    def load_model(self, *given: Any, **more: Any) -> None:
        """Do nothing: this proposer has no model."""

    def propose(self, sampled: list[list[int]], counts: Any, tokens: Any, *given: Any, **more: Any) -> list[list[int]]:
        """Find the expected text of each request. Draft its next tokens, each after a wrong sibling node."""
        self.parents, drafts = [], []
        for number, given_tokens in enumerate(sampled):
            text_so_far = [int(one) for one in tokens[number, : int(counts[number])]]
            ahead = self._ahead(text_so_far)[: self._drafts // 2] if given_tokens else []
            nodes, parents = [], [-1]
            for place, token in enumerate(ahead):
                nodes += [(token + 1) % self._vocabulary, token]
                parents += [0 if not place else 2 * place - 1, 0 if not place else 2 * place]
            self.parents.append(tuple(parents) if nodes else None)
            drafts.append(nodes)
        return drafts

    def _ahead(self, text_so_far: list[int]) -> list[int]:
        """Return the next tokens, from the expected text that matches the longest end of the request."""
        for size in range(min(len(text_so_far), 24), 0, -1):
            for text in self._texts:
                if text[:size] == text_so_far[-size:]:
                    return list(text[size:])
        return []
