"""Every length formula of a batch, a second time: the oracle's own copy, and the only one in the contract.

The suite judges those who use `Geometry`; an oracle that took its numbers from there would share its mistakes. So the
table of modes and the lengths that follow from it are written here once more, from the design's section 2, and every
other module of the contract takes them from here (`tests/test_formulas.py` sees to it). Integers, or symbolic integers
in a proof: no branch on a value, no torch.
"""

from __future__ import annotations

from typing import Any

from draftmark.geometry import Geometry, Mode, maximum


def rows_and_tail(geometry: Geometry, mode: Mode, step: Any = 0) -> tuple[Any, Any]:
    """Query rows and tail slots of a request of a uniform mode; EXTEND is ragged and stands in no table."""
    k, d = geometry.draft.topk, geometry.draft.num_draft_tokens
    return {Mode.DECODE: (1, 1), Mode.DRAFT: (k, k * (step + 1)), Mode.VERIFY: (d, d), Mode.DRAFT_EXTEND: (d, d)}[mode]


def draft_steps(geometry: Geometry) -> Any:
    """DRAFT forwards of a round: the first of S steps is the one that DRAFT_EXTEND or VERIFY made."""
    return geometry.draft.num_steps - 1


def max_tail(geometry: Geometry) -> Any:
    """Tail slots that any forward of a request may have: one token, a verify tail, or all steps of a draft."""
    return maximum(1, geometry.draft.num_draft_tokens, geometry.draft.topk * draft_steps(geometry))


def max_prefix(geometry: Geometry) -> Any:
    """The longest committed prefix of any forward: C, and with overlap one round that the host has not seen."""
    unseen = max_tail(geometry) if geometry.limits.overlap else 0
    return geometry.limits.max_context_len + unseen


def max_requests(geometry: Geometry) -> Any:
    """Requests of the largest batch: padding may reach above the live limit (sglang#25124)."""
    return maximum(geometry.limits.max_num_reqs, *geometry.limits.capture_batch_sizes)


def max_rows(geometry: Geometry) -> Any:
    """Query rows of the largest forward of any mode."""
    each = maximum(geometry.draft.topk, geometry.draft.num_draft_tokens)
    return maximum(geometry.limits.max_extend_tokens, max_requests(geometry) * each)


def pages(tokens: Any, page_size: Any) -> Any:
    """Pages that hold so many tokens."""
    return (tokens + page_size - 1) // page_size


def max_pages(geometry: Geometry) -> Any:
    """Pages of the longest request with its longest tail: what a row of the page table must hold."""
    return pages(max_prefix(geometry) + max_tail(geometry), geometry.attention.page_size)


def null_pages(geometry: Geometry, unique_slots: bool) -> Any:
    """Pages at the start of the pool that belong to no request: one, or a set for each request of the largest batch."""
    if not unique_slots:
        return 1
    return max_requests(geometry) * pages(max_tail(geometry), geometry.attention.page_size)
