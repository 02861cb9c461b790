"""Stand-in for the class that vLLM's `SuffixDecodingProposer` uses. Drafts are tokens after an earlier, equal suffix.

The longest matching suffix counts, and its length limits the number of drafts. So requests of one step have different
numbers of rows, as with the original package.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

LONGEST = 4


class SuffixDecodingCache:
    """Stores the tokens of each request, and drafts from them."""

    def __init__(self, **limits: Any) -> None:
        self._tokens: dict[str, list[int]] = {}
        self.cached_requests: set[str] = set()

    @property
    def active_requests(self) -> set[str]:
        """Names of the active requests."""
        return set(self._tokens)

    def start_request(self, name: str, prompt: Sequence[int]) -> None:
        """Store the prompt of a new request."""
        self._tokens[name] = [int(one) for one in prompt]

    def add_active_response(self, name: str, tokens: Sequence[int]) -> None:
        """Append sampled tokens to a request."""
        self._tokens[name] += tokens

    def stop_request(self, name: str) -> None:
        """Remove a request."""
        del self._tokens[name]

    def speculate(self, name: str, pattern: Sequence[int], max_spec_tokens: int, **limits: Any) -> SimpleNamespace:
        """Return drafts. Their number is at most the length of the longest matching suffix."""
        tokens = self._tokens[name]
        for length in range(LONGEST, 0, -1):
            for first in range(len(tokens) - length - 1, -1, -1):
                if tokens[first : first + length] == tokens[-length:]:
                    behind = tokens[first + length :]
                    return SimpleNamespace(token_ids=behind[: min(length, max_spec_tokens)])
        return SimpleNamespace(token_ids=[])
