"""Keys that each attention pass (here called level) reads. Integers only, no torch.

A mode in which drafts can be trees runs two levels:

* The *common* level has the prefix pages that every row sees, without a mask.
* The *masked* level has single tokens under FlashInfer's custom mask. These tokens are the tail (the request's draft
  tokens), which begins within a page. With a window they also include the *head*: prefix tokens between the window
  edges of the shallowest and the deepest row, up to the next page.

Each level rounds its output to 16 bit, and their merge rounds again (`contract.roundoffs` has the bound).

All other modes run one causal level over prefix and tail. *Paged level* means the common or the causal level.
"""

from __future__ import annotations

from typing import Any

from draftmark import Geometry, Mode, ceil_div, minimum


def is_masked(geometry: Geometry, mode: Mode) -> bool:
    """Return true if forwards of `mode` run two passes. With one row per request a single causal pass is enough."""
    if mode is Mode.VERIFY:
        return bool(geometry.draft.num_draft_tokens > 1)
    return mode is Mode.DRAFT and bool(geometry.draft.topk > 1)


def masked_modes(geometry: Geometry) -> list[Mode]:
    """Return the geometry's modes that run two passes."""
    return [mode for mode in geometry.modes if is_masked(geometry, mode)]


def draft_steps_share_a_plan(geometry: Geometry) -> bool:
    """Return true if all draft steps of a round share one plan of the pass over pages.

    They share it if that pass reads only the prefix. A causal pass also reads the draft tokens, and with a window the
    first page depends on the number of draft tokens.
    """
    return is_masked(geometry, Mode.DRAFT) and bool(geometry.attention.window_left < 0)


def head_len(geometry: Geometry, tail_len: Any) -> Any:
    """Return the number of prefix tokens that the masked pass reads; 0 without a window."""
    a = geometry.attention
    if a.window_left < 0:
        return 0
    return minimum(a.window_left, tail_len + a.page_size - 1)


def masked_len(geometry: Geometry, tail_len: Any) -> Any:
    """Return the number of tokens that the masked pass reads per request.

    It does not depend on the prefix, so this pass is planned without lengths.
    """
    return head_len(geometry, tail_len) + tail_len


def common_pages(prefix: int, tail_len: int, page_size: int, window_left: int) -> int:
    """Return the number of whole prefix pages that all rows of a request see, which the unmasked pass reads.

    They go from the window edge of the deepest row to the prefix's end.
    """
    pages = -(-prefix // page_size)
    if window_left < 0:
        return pages
    first = -(-max(0, prefix + tail_len - window_left) // page_size)
    return pages - min(first, pages)


def level_pages(geometry: Geometry, mode: Mode, prefix: int, tail_len: int) -> int:
    """Return the KV pages of one request that the pass over pages reads (the causal pass, or the prefix pass)."""
    a = geometry.attention
    if is_masked(geometry, mode):
        return common_pages(prefix, tail_len, a.page_size, a.window_left)
    return -(-(prefix + tail_len) // a.page_size)


def mask_bytes(q_len: Any, masked: Any) -> Any:
    """Return the bytes of one request's mask: a bit for each row and masked token, rounded up to whole bytes."""
    return ceil_div(q_len * masked, 8)
