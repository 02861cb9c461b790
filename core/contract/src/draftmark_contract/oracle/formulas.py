"""The oracle's own copy of every length formula of a batch. No other module of the contract computes these lengths.

The suite tests code that uses `Geometry`. An oracle with numbers from `Geometry` would share its mistakes. This module
therefore repeats the table of modes, and the lengths that follow from it, from section 2 of the design.
`tests/test_formulas.py` checks that no other module repeats them. All values may be symbolic integers of a proof, so no
branch depends on a value. No torch.
"""

from __future__ import annotations

from typing import Any

from draftmark.geometry import BatchGeometry, Geometry, Mode, StateGeometry, maximum

WHOLE_REQUEST = 2**40
"""Tokens of a state slot: a slot is one page that holds a whole request."""


def rows_and_tail(geometry: BatchGeometry, mode: Mode, step: Any = 0) -> tuple[Any, Any]:
    """Return (query rows, tail slots) per request in a mode with fixed numbers. The ragged modes have none."""
    k, d, b = geometry.draft.topk, geometry.draft.num_draft_tokens, geometry.draft.block_size
    again = reread_rows(geometry)
    fixed = {
        **{Mode.DECODE: (1, 1), Mode.DRAFT: (k, k * (step + 1)), Mode.VERIFY: (d, d)},
        **{Mode.DRAFT_EXTEND: (again, again), Mode.DRAFT_BLOCK: (b, b)},
    }
    return fixed[mode]


def reread_rows(geometry: BatchGeometry) -> Any:
    """Return the rows of one request in DRAFT_EXTEND: D accepted tokens, and one for each module but the first."""
    return geometry.draft.num_draft_tokens + (geometry.draft.num_modules - 1)


def draft_steps(geometry: BatchGeometry) -> Any:
    """Return the number of DRAFT forwards in a round: the first of S steps comes from DRAFT_EXTEND or VERIFY."""
    return geometry.draft.num_steps - 1


def max_tail(geometry: BatchGeometry) -> Any:
    """Return the most tail slots of a request in any forward: one, a tree or its DRAFT_EXTEND, all steps, a block."""
    block = (geometry.draft.block_size,) if Mode.DRAFT_BLOCK in geometry.modes else ()
    return maximum(1, reread_rows(geometry), geometry.draft.topk * draft_steps(geometry), *block)


def max_prefix(geometry: BatchGeometry) -> Any:
    """Return the longest prefix of any forward: the context limit, plus with overlap a round unknown to the host."""
    unseen = max_tail(geometry) if geometry.limits.overlap else 0
    return geometry.limits.max_context_len + unseen


def max_requests(geometry: BatchGeometry) -> Any:
    """Return the number of requests of the largest batch. With padding it may exceed max_num_reqs (sglang#25124)."""
    return maximum(geometry.limits.max_num_reqs, *geometry.limits.capture_batch_sizes)


def max_rows(geometry: BatchGeometry) -> Any:
    """Return the query rows of the largest forward of any mode."""
    block = (geometry.draft.block_size,) if Mode.DRAFT_BLOCK in geometry.modes else ()
    budgets = geometry.limits.row_budgets if Mode.RAGGED_VERIFY in geometry.modes else ()
    each = maximum(geometry.draft.topk, reread_rows(geometry), *block)
    return maximum(geometry.limits.max_extend_tokens, max_requests(geometry) * each, *budgets)


def max_budget(geometry: BatchGeometry) -> Any:
    """Return the query rows of the largest RAGGED_VERIFY forward: a stated budget, or D rows for every request."""
    budgets = geometry.limits.row_budgets or (max_requests(geometry) * geometry.draft.num_draft_tokens,)
    return maximum(*budgets)


def page_size_of(geometry: Geometry | StateGeometry) -> Any:
    """Return the tokens of a page of an attention layer, or `WHOLE_REQUEST` for a layer with recurrent state."""
    return WHOLE_REQUEST if isinstance(geometry, StateGeometry) else geometry.attention.page_size


def state_numel(geometry: StateGeometry) -> Any:
    """Return the elements of the state of one slot in one layer."""
    return geometry.state.num_heads * geometry.state.value_dim * geometry.state.key_dim


def checkpoint(prefix: Any, count: Any, interval: Any) -> Any:
    """Return the last multiple of `interval` that a commit of `count` tokens reaches; at most `prefix` for none."""
    return (prefix + count) // interval * interval


def pages(tokens: Any, page_size: Any) -> Any:
    """Return the number of pages that hold `tokens` tokens."""
    return (tokens + page_size - 1) // page_size


def max_pages(geometry: Geometry) -> Any:
    """Return the columns of the page table: the number of pages of the longest request with its longest tail."""
    return pages(max_prefix(geometry) + max_tail(geometry), geometry.attention.page_size)


def null_pages(geometry: Geometry, unique_slots: bool) -> Any:
    """Return the number of null pages at the start of the pool: one, or a set for each request with unique slots."""
    if not unique_slots:
        return 1
    return max_requests(geometry) * pages(max_tail(geometry), geometry.attention.page_size)
