"""A proposer that knows the texts, for tests: a wrong branch first, then the right one."""

from __future__ import annotations

import ast
import os
from typing import Any

from draftmark_vllm.trees.step_trees import Parents


class SecondBranch:
    """Of each tree the odd nodes are wrong, the even ones the text's next tokens."""

    def __init__(self, vllm_config: Any) -> None:
        self._drafts = vllm_config.speculative_config.num_speculative_tokens
        self._texts = ast.literal_eval(os.environ["DRAFTMARK_ORACLE"])
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self.parents: list[Parents | None] = []

    def load_model(self, *given: Any, **more: Any) -> None:
        """There is none."""

    def propose(self, sampled: list[list[int]], counts: Any, tokens: Any, *given: Any, **more: Any) -> list[list[int]]:
        """Find the text that goes on as this request does, and draft the rest of it behind as many wrong tokens."""
        self.parents, drafts = [], []
        for number, given_tokens in enumerate(sampled):
            said = [int(one) for one in tokens[number, : int(counts[number])]]
            ahead = self._ahead(said)[: self._drafts // 2] if given_tokens else []
            nodes, parents = [], [-1]
            for place, token in enumerate(ahead):
                nodes += [(token + 1) % self._vocabulary, token]
                parents += [0 if not place else 2 * place - 1, 0 if not place else 2 * place]
            self.parents.append(tuple(parents) if nodes else None)
            drafts.append(nodes)
        return drafts

    def _ahead(self, said: list[int]) -> list[int]:
        """What follows; of several texts that fit the longest match counts."""
        for size in range(min(len(said), 24), 0, -1):
            for text in self._texts:
                if text[:size] == said[-size:]:
                    return list(text[size:])
        return []
