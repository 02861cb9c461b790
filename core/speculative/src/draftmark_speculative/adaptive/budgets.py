"""Which budgets of rows to capture. Integers only."""

from __future__ import annotations

MOST_ROWS = 512
"""Rows of the largest budget, unless more requests than half of it need more: behind it a GPU computes, not reads."""
DENSE_FROM = 128
"""Rows from which each costs time, so that budgets lie closer."""


def row_budgets(max_num_reqs: int, num_draft_tokens: int) -> tuple[int, ...]:
    """Budgets for batches of 1 to max_num_reqs: powers of two and the numbers half way between, as far as they help;
    quarters from DENSE_FROM on.

    A budget holds the roots of a batch and some drafts, so the largest is what all requests could fill, or `MOST_ROWS`,
    or twice the largest batch.
    """
    most = min(max_num_reqs * num_draft_tokens, max(MOST_ROWS, 2 * max_num_reqs))
    found, power = {most}, 2
    while power < most:
        parts = 4 if power >= DENSE_FROM else 2
        found |= {min(most, power + power * part // parts) for part in range(parts)}
        power *= 2
    return tuple(sorted(found))
