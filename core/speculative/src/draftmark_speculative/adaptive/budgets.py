"""Row budgets (rows verified in one forward over all requests) to capture. Integers only, no torch."""

from __future__ import annotations

MOST_ROWS = 512
"""Rows of the largest budget, unless twice the largest batch is more. With more rows a GPU is bound by computation."""
DENSE_FROM = 128
"""Number of rows from which every row costs time, so that budgets lie closer together."""


def row_budgets(max_num_reqs: int, num_draft_tokens: int) -> tuple[int, ...]:
    """Return row budgets for batches of 1 to max_num_reqs requests, ascending.

    Budgets are powers of two and the midpoints between them; from DENSE_FROM on, also the quarter points. A budget
    has rows for the roots of a batch and some drafts. The largest budget is `MOST_ROWS` or twice the largest batch,
    but not more than all requests can fill.
    """
    most = min(max_num_reqs * num_draft_tokens, max(MOST_ROWS, 2 * max_num_reqs))
    found, power = {most}, 2
    while power < most:
        parts = 4 if power >= DENSE_FROM else 2
        found |= {min(most, power + power * part // parts) for part in range(parts)}
        power *= 2
    return tuple(sorted(found))
