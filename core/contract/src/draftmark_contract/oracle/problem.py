"""Error that decoding raises for metadata without a valid meaning."""

from __future__ import annotations

from typing import Any


class DecodeProblem(Exception):
    """The metadata has no valid meaning. `what` is a sentence; `got` and `expected` are the two values."""

    def __init__(self, what: str, got: Any, expected: Any) -> None:
        self.what, self.got, self.expected = what, got, expected
        super().__init__(f"{what}: got {got}, expected {expected}")
