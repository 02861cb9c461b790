"""Keys that each attention pass reads. Integers only, no torch.

A mode with possible trees runs two passes, called levels. The *common* level has the prefix pages that every row
sees, without a mask. The *masked* level has single tokens under FlashInfer's custom mask. These tokens are the tail,
which begins within a page. With a window they also include the *head*: prefix tokens between the window edges of the
shallowest and the deepest row, up to the next page. The other modes run one causal pass over prefix and tail. *Paged
level* means the common level or the causal pass.
"""

from __future__ import annotations

from typing import Any

from draftmark import Geometry, Mode, ceil_div, minimum


def is_masked(geometry: Geometry, mode: Mode) -> bool:
    """Return true if forwards of `mode` run two passes. One row per request is a chain and needs one pass."""
    if mode is Mode.VERIFY:
        return bool(geometry.draft.num_draft_tokens > 1)
    return mode is Mode.DRAFT and bool(geometry.draft.topk > 1)


def masked_modes(geometry: Geometry) -> list[Mode]:
    """Return the geometry's modes that run two passes."""
    return [mode for mode in geometry.modes if is_masked(geometry, mode)]


def draft_steps_share_a_plan(geometry: Geometry) -> bool:
    """Return true if all steps of a draft program have one plan of the paged level, which then has only the prefix.

    A causal level also has the tail. With a window the start of the common level depends on the tail's length.
    """
    return is_masked(geometry, Mode.DRAFT) and bool(geometry.attention.window_left < 0)


def head_len(geometry: Geometry, tail_len: Any) -> Any:
    """Return the prefix tokens in the masked level; 0 without a window."""
    a = geometry.attention
    if a.window_left < 0:
        return 0
    return minimum(a.window_left, tail_len + a.page_size - 1)


def masked_len(geometry: Geometry, tail_len: Any) -> Any:
    """Return the tokens of the masked level. The number does not depend on the prefix, so its plan needs no lengths."""
    return head_len(geometry, tail_len) + tail_len


def common_pages(prefix: int, tail_len: int, page_size: int, window_left: int) -> int:
    """Return pages of the common level: whole pages from the deepest row's window edge to the prefix's end."""
    pages = -(-prefix // page_size)
    if window_left < 0:
        return pages
    first = -(-max(0, prefix + tail_len - window_left) // page_size)
    return pages - min(first, pages)


def level_pages(geometry: Geometry, mode: Mode, prefix: int, tail_len: int) -> int:
    """Return pages of the paged level of one request."""
    a = geometry.attention
    if is_masked(geometry, mode):
        return common_pages(prefix, tail_len, a.page_size, a.window_left)
    return -(-(prefix + tail_len) // a.page_size)


def mask_bytes(q_len: Any, masked: Any) -> Any:
    """Return bytes of one request's mask: rows x masked tokens bits; each request begins at a new byte."""
    return ceil_div(q_len * masked, 8)
