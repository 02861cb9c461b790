"""Largest error of a correct output, in unit roundoffs of its 16-bit dtype. Does not import torch."""

from __future__ import annotations

ROUNDOFFS = 3
"""Usual bound: one for the weights before p·v, one for a partial result before parts are merged, one for the result."""
MOST_ROUNDOFFS = 5
"""Largest bound that a plugin may declare (`notes`). A larger one would hide a missing key."""


def declared_roundoffs(count: int) -> str:
    """Return the mark of an item if the plugin declares the bound of its outputs."""
    return f"within {count} roundoffs (declared)"


MARKS = tuple(declared_roundoffs(count) for count in range(ROUNDOFFS + 1, MOST_ROUNDOFFS + 1))
