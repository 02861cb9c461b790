"""What vLLM's `SuffixDecodingProposer` calls: drafts are what followed the longest suffix that stood before.

Their number is the suffix's length, so requests of a step bring different numbers of rows, as the original's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

LONGEST = 4


class SuffixDecodingCache:
    """Tokens of each request."""

    def __init__(self, **limits: Any) -> None:
        self._tokens: dict[str, list[int]] = {}
        self.cached_requests: set[str] = set()

    @property
    def active_requests(self) -> set[str]:
        """Names of those that have begun."""
        return set(self._tokens)

    def start_request(self, name: str, prompt: Sequence[int]) -> None:
        """Take a prompt."""
        self._tokens[name] = [int(one) for one in prompt]

    def add_active_response(self, name: str, tokens: Sequence[int]) -> None:
        """Take what was sampled."""
        self._tokens[name] += tokens

    def stop_request(self, name: str) -> None:
        """Forget a request."""
        del self._tokens[name]

    def speculate(self, name: str, pattern: Sequence[int], max_spec_tokens: int, **limits: Any) -> SimpleNamespace:
        """Give as many drafts as tokens match."""
        tokens = self._tokens[name]
        for length in range(LONGEST, 0, -1):
            for first in range(len(tokens) - length - 1, -1, -1):
                if tokens[first : first + length] == tokens[-length:]:
                    behind = tokens[first + length :]
                    return SimpleNamespace(token_ids=behind[: min(length, max_spec_tokens)])
        return SimpleNamespace(token_ids=[])
