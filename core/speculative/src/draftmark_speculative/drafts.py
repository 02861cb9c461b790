"""Drafts: guesses at the next tokens of one request, as a tree, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class DraftTree:
    """Draft tokens of one request, parents before children; node 0 is the root (the pending token).

    Attributes:
        tokens: token of each node.
        parents: node index of each node's parent; -1 for the root.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])

    def __len__(self) -> int:
        return len(self.tokens)

    def insert(self, path: Sequence[int], budget: int) -> int:
        """Add a path from the root, sharing nodes with what is there; returns how many nodes were new."""
        node, added = 0, 0
        for token in path:
            child = self._child(node, token)
            if child is None:
                if added == budget:
                    break
                child = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                added += 1
            node = child
        return added

    def _child(self, node: int, token: int) -> int | None:
        for child in range(node + 1, len(self.tokens)):
            if self.parents[child] == node and self.tokens[child] == token:
                return child
        return None


class Drafter(Protocol):
    """Guesses for one request. It sees every token of it, in order."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that were verified and given out."""

    def propose(self) -> DraftTree:
        """A tree whose root is the newest token; a root alone means no guess. Within the speculation's limits."""


class Speculation(Protocol):
    """A way of drafting, fixed for an engine's life.

    Attributes:
        topk: most branches of a tree; 1 means every tree is a chain, and needs no mask.
        num_draft_tokens: most nodes of a tree, root included.
    """

    @property
    def topk(self) -> int: ...

    @property
    def num_draft_tokens(self) -> int: ...

    def begin(self, request_id: int, prompt: Sequence[int]) -> Drafter:
        """A drafter for a new request."""
